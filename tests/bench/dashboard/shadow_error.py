"""How far a shadow's hit rate is from a full replay of the same hours."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from kvgraph.advisor.policies.guard import Guard
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.advisor.replay.arms import HINTS, Settings, run_arm
from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.graph_order import TraceEvents
from kvgraph.advisor.replay.trace import Trace
from kvgraph.advisor.shadows.pools import LruPool, PolicyPool
from kvgraph.advisor.shadows.runner import INTERVAL_S, ShadowRunner, ShadowSet
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import View
from kvgraph.graph.wire.events import EngineHello

from ..figures import Figures
from ..policies.policies_fleets import SHIPPED, fleet, sessions_in

ENGINE: Final = "e"


SELDOM: Final = "ranked_every_8_s"
LESS: Final = {
    SELDOM: 8.0,
    "ranked_every_64_s": 64.0,
}  # seconds between rankings where the whole takes too long; those of LRU need none


class Hours(NamedTuple):
    """Traffic: users, hours, and the pool's blocks of 512 tokens."""

    users: int
    hours: float
    capacity: int


FEW: Final = Hours(24, 4.0, 2_000)
MANY: Final = Hours(240, 1.0, 20_000)


@dataclass
class _Played:
    shadows: ShadowSet
    cpu_s: float

    def rates(self) -> dict[str, float]:
        """Share of all blocks that each shadow would have found, as the page tells it."""
        return {pool.name: self.shadows.rate(pool) or 0.0 for pool in self.shadows.pools}

    def of(self, policy: str) -> dict[str, float]:
        rates = self.rates()
        pools = (pool for pool in self.shadows.ranked if pool.policy_name == policy)
        return {pool.name: rates[pool.name] for pool in pools}


def run(figures: Figures, quick: bool) -> None:
    """All shadows against replays of the same hours by what they stand for; then those of policies,
    where they do less to take less of a core.
    """
    few = _traffic(FEW._replace(hours=1.0) if quick else FEW)
    whole = play(few, FEW.capacity)
    full = {pool.name: _replayed(few, pool) for pool in whole.shadows.pools}
    figures.add("shadow_error_points", _error(whole.rates(), full), "points", "≤ 1.0")
    for less, every_s in LESS.items():
        played = play(few, FEW.capacity, every_s)
        _add_error(figures, less, played, full, "≤ 1.0" if less == SELDOM else "")
    figures.add("shadows_cpu_percent_of_the_trace", _cpu_percent(whole, few), "%")
    if not quick:
        _add_many(figures)


def _replayed(trace: Trace, pool: LruPool | PolicyPool) -> float:
    """The share that an engine finds which is what a shadow stands for, guard included."""
    hints = "" if isinstance(pool, LruPool) else HINTS
    arm = f"{pool.policy_name}{hints}"
    blocks = round(FEW.capacity * pool.capacity)
    return float(run_arm(arm, trace, blocks, Settings()).sum() / trace.full.sum())


def _add_many(figures: Figures) -> None:
    """Ten times as many users, whose shadows would take too long if they ranked that often: beside
    shadows that do.
    """
    many = _traffic(MANY)
    whole, seldom = play(many, MANY.capacity), play(many, MANY.capacity, 64.0)
    _add_error(figures, f"ranked_every_64_s_of_{MANY.users}_users", seldom, whole.rates())
    for name, played in (("", whole), ("_ranked_every_64_s", seldom)):
        cpu = _cpu_percent(played, many)
        figures.add(f"shadows_cpu_percent_of_{MANY.users}_users{name}", cpu, "%")


def _traffic(hours: Hours) -> Trace:
    sessions = sessions_in(SHIPPED, lambda _: None)
    return fleet("agents", sessions, hours.users, hours.hours, Signals.ALL)


def _add_error(
    figures: Figures, less: str, played: _Played, full: dict[str, float], target: str = ""
) -> None:
    """How far the default policy's shadows are from those that do all."""
    found = played.of(LifecyclePolicy.name)
    error = _error(found, {each: full[each] for each in found})
    figures.add(f"shadow_error_points_{less}", error, "points", target)


def _error(found: dict[str, float], full: dict[str, float]) -> float:
    return max(100 * abs(found[name] - rate) for name, rate in full.items())


def _cpu_percent(played: _Played, trace: Trace) -> float:
    return 100 * played.cpu_s / float(trace.at[-1])


def play(trace: Trace, capacity: int, rank_every_s: float = INTERVAL_S) -> _Played:
    """A graph that hears a trace as an engine under LRU tells it, and shadows beside it."""
    now = [0.0]
    guard = Guard(LifecyclePolicy.name)  # stays with LRU here: what shadows begin with
    graph = KVCacheGraph(policy=LifecyclePolicy(), clock=lambda: now[0], referee=guard)
    runner = ShadowRunner(graph, lambda: now[0], cpu=lambda: 0.0, always=True)
    runner.rank_every_s = rank_every_s
    graph.apply(ENGINE, [EngineHello(ENGINE, "", trace.block_size, capacity + 1, "v")])
    runner.tick()
    events, hits, cpu_s = TraceEvents(trace, hints=True), lru_hits(trace, capacity), 0.0
    view = View(graph.tables, graph.rules, graph.tables.engines[ENGINE], 0.0)
    next_tick = 0.0
    for request, at in enumerate(trace.at.tolist()):
        if next_tick <= at:
            now[0] = at
            graph.policy.observe(replace(view, now=at))
            cpu_s -= time.thread_time()
            runner.tick()
            cpu_s += time.thread_time()
            next_tick = at + INTERVAL_S
        now[0], hit = at, int(hits[request])
        graph.apply(ENGINE, [events.started(request, hit)])
        graph.apply(ENGINE, [events.stored(request, hit), events.finished(request, at)])
    runner.tick()
    return _Played(runner.sets[ENGINE], cpu_s)
