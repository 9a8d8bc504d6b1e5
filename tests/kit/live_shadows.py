"""Shadows beside a graph that hears a trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvgraph.advisor.replay.fast import lru_hits
from kvgraph.advisor.replay.graph_order import TraceEvents
from kvgraph.advisor.replay.trace import Trace
from kvgraph.advisor.shadows.runner import INTERVAL_S, ShadowRunner, ShadowSet
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import Policy, Referee
from kvgraph.graph.wire.events import EngineHello


class Live:
    """A graph that hears a trace, as an engine under LRU tells it, and the shadows beside it."""

    def __init__(
        self,
        trace: Trace,
        capacity: int,
        cpu: Callable[[], float] = time.thread_time,
        policy: Policy | None = None,
        referee: Referee | None = None,
        always: bool = True,
    ) -> None:
        self.now = 0.0
        self.trace, self.capacity = trace, capacity
        self.graph = KVCacheGraph(clock=lambda: self.now, policy=policy, referee=referee)
        self.runner = ShadowRunner(self.graph, lambda: self.now, cpu, always=always)
        self.hello()

    def hello(self) -> None:
        hello = EngineHello("host", "", self.trace.block_size, self.capacity + 1, "")
        self.graph.apply("e", [hello])
        self.runner.tick()

    @property
    def set(self) -> ShadowSet:
        return self.runner.sets["e"]

    def play(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Hear the trace; ``meanwhile`` is called after every request."""
        events = TraceEvents(self.trace, hints=True)
        hits = lru_hits(self.trace, self.capacity)
        next_tick = 0.0
        for request, at in enumerate(self.trace.at.tolist()):
            while next_tick <= at:
                self.now = next_tick
                self.runner.tick()
                next_tick += INTERVAL_S
            self.now = at
            hit = int(hits[request])
            started = events.started(request, hit)
            self.graph.apply(
                "e", [started, events.stored(request, hit), events.finished(request, at)]
            )
            meanwhile()
        self.runner.tick()

    def ask(self, hit: int = 0) -> None:
        """The trace's first request, once more, of which so many blocks are found."""
        events = TraceEvents(self.trace, hints=True)
        asked = [events.started(0, hit), events.stored(0, hit), events.finished(0, self.now)]
        self.graph.apply("e", asked)

    def rate(self, name: str) -> float:
        (rate,) = [self.set.rate(pool) for pool in self.set.pools if pool.name == name]
        assert rate is not None
        return rate
