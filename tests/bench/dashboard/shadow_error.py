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
SHARES: Final = (1.0, 0.5, 0.25)


@dataclass
class _Played:
    """Shadows of one play of the trace."""

    shadows: ShadowSet
    cpu_s: float

    def rate(self, name: str) -> float:
        """Share of all blocks that a shadow would have found, as the page tells it."""
        (pool,) = [pool for pool in self.shadows.pools if pool.name == name]
        rate = self.shadows.rate(pool.found)
        assert rate is not None
        return rate


def run(figures: Figures, quick: bool) -> None:
    """Shadows of LRU at every size, at every share of sessions, against LRU itself."""
    from ...advisor.replay.recordings.signals import Signals

    sessions = sessions_in(SHIPPED, lambda _: None)
    trace = fleet("agents", sessions, USERS, 1.0 if quick else HOURS, Signals.ALL)
    full = {
        _name(size): lru_hits(trace, round(CAPACITY * size)).sum() / trace.full.sum()
        for size in CAPACITIES
    }
    for share in SHARES:
        played = play(trace, CAPACITY, share)
        errors = [100 * abs(played.rate(name) - rate) for name, rate in full.items()]
        suffix = "" if share == 1.0 else f"_of_{share:.0%}".replace("%", "_percent")
        target = "≤ 1.0" if share == 1.0 else ""  # a smaller share is followed only where all cost
        figures.add(f"shadow_error_points{suffix}", max(errors), "points", target)  # too much
        if share == 1.0:
            seconds = float(trace.at[-1])
            figures.add("shadows_cpu_percent_of_the_trace", 100 * played.cpu_s / seconds, "%")
            figures.add("shadowed_blocks", played.shadows.asked, "")
            figures.add("lru_hit_rate", 100 * full["lru"], "%")


def play(trace: Trace, capacity: int, share: float) -> _Played:
    """A graph that hears a trace as an engine under LRU tells it, and shadows beside it."""
    now = [0.0]
    graph = KVCacheGraph(policy=ClassicPolicy(), clock=lambda: now[0])
    runner = ShadowRunner(graph, lambda: now[0])
    graph.apply("e", [EngineHello("e", "", trace.block_size, capacity + 1, "v")])
    runner.tick()
    runner.sets["e"].sample.share = share
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
