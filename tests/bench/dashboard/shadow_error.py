"""How far a shadow's hit rate is from a full replay of the same hours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...advisor.replay.fast.lru import lru_hits
from ...advisor.replay.traces.trace import Trace
from ...advisor.replay.traces.trace_events import TraceEvents
from ...advisor.shadows.shadow_runner import INTERVAL_S, ShadowRunner
from ...advisor.shadows.shadow_set import CAPACITIES, ShadowSet
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.events import EngineHello
from ...graph.ranking.formulas import ClassicPolicy
from ..figures import Figures
from ..policies.policies_fleets import SHIPPED, fleet, sessions_in

USERS: Final = 24
HOURS: Final = 4.0
CAPACITY: Final = 2_000  # blocks of 512 tokens
HALVINGS: Final = (0, 1, 2)
"""How often the sample of sessions that policies' shadows follow is halved; LRU's follow all."""


@dataclass
class _Played:
    """Shadows of one play of the trace."""

    shadows: ShadowSet
    cpu_s: float

    def rates(self) -> dict[str, float]:
        """Share of all blocks that each shadow would have found, as the page tells it."""
        return {pool.name: self.shadows.rate(pool) or 0.0 for pool in self.shadows.pools}


def run(figures: Figures, quick: bool) -> None:
    """Shadows of LRU at every size against LRU itself, and those of a policy that follow a part of
    the sessions against those that follow all."""
    from ...advisor.replay.recordings.signals import Signals

    sessions = sessions_in(SHIPPED, lambda _: None)
    trace = fleet("agents", sessions, USERS, 1.0 if quick else HOURS, Signals.ALL)
    played = [play(trace, CAPACITY, halvings) for halvings in HALVINGS]
    full = {
        _name(size): lru_hits(trace, round(CAPACITY * size)).sum() / trace.full.sum()
        for size in CAPACITIES
    }
    _add_error(figures, "", full, played, "≤ 1.0")
    unsampled = played[0].rates()
    policies = {pool.name: unsampled[pool.name] for pool in played[0].shadows.ranked}
    _add_error(figures, "_of_a_policy", policies, played, "")
    seconds = float(trace.at[-1])
    figures.add("shadows_cpu_percent_of_the_trace", 100 * played[0].cpu_s / seconds, "%")
    figures.add("shadowed_blocks", played[0].shadows.asked, "")
    figures.add("lru_hit_rate", 100 * full["lru"], "%")


def _add_error(
    figures: Figures, of: str, full: dict[str, float], played: list[_Played], target: str
) -> None:
    """The largest error of these shadows, for each share of sessions."""
    for halvings, each in zip(HALVINGS, played, strict=True):
        rates = each.rates()
        error = max(100 * abs(rates[name] - rate) for name, rate in full.items())
        suffix = f"_of_{0.5**halvings:.0%}".replace("%", "_percent") if halvings else ""
        figures.add(f"shadow_error_points{of}{suffix}", error, "points", target)


def play(trace: Trace, capacity: int, halvings: int = 0) -> _Played:
    """A graph that hears a trace as an engine under LRU tells it, and shadows beside it."""
    now = [0.0]
    graph = KVCacheGraph(policy=ClassicPolicy(), clock=lambda: now[0])
    runner = ShadowRunner(graph, lambda: now[0])
    graph.apply("e", [EngineHello("e", "", trace.block_size, capacity + 1, "v")])
    runner.tick()
    for _ in range(halvings):
        runner.sets["e"].halve()
    events, hits, cpu_s = TraceEvents(trace, hints=True), lru_hits(trace, capacity), 0.0
    next_tick = 0.0
    for request, at in enumerate(trace.at.tolist()):
        if next_tick <= at:
            now[0] = at
            runner.tick()
            cpu_s += runner.spent_s
            next_tick = at + INTERVAL_S
        now[0], hit = at, int(hits[request])
        graph.apply("e", [events.started(request, hit)])
        graph.apply("e", [events.stored(request, hit), events.finished(request, at)])
    runner.tick()
    return _Played(runner.sets["e"], cpu_s)


def _name(size: float) -> str:
    return "lru" if size == 1.0 else f"lru ×{size:g}"
