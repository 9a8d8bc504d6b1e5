"""``SimulatedSidecar``: the graph of a live sidecar, for one simulated engine or several."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ....graph.kvcache_graph import KVCacheGraph
from ....graph.messages.advice import EvictionRanking
from ....graph.messages.events import AnyEvent, BlocksStored, EngineHello
from ....graph.ranking.formulas import LruPolicy
from ....graph.ranking.policy import Policy
from ....graph.ranking.profile import Rules
from ....graph.tables.tables import GraphLimits
from ...policies.guard import Guard
from ..traces.trace import Trace
from ..traces.trace_events import TraceEvents


@dataclass(frozen=True, slots=True)
class News:
    """One thing that happened to an engine: an event, or (without one) the eviction of blocks.

    Attributes:
        at: Seconds of the trace.
        blocks: That became resident by the event, or were evicted.
    """

    at: float
    event: AnyEvent | None
    blocks: Sequence[int] = ()

    @property
    def is_eviction(self) -> bool:
        """Whether ``blocks`` were evicted."""
        return self.event is None


class SimulatedSidecar:
    """A real graph with a simulated clock, which hears of each engine as late as a live one would.

    Engines that share it are one fleet: a session that moves is known where it arrives, and what
    one engine teaches counts for all.

    Args:
        policy: Fresh, since it may learn.
        rules: None takes the defaults.
        hints: Whether callers name their sessions and say what the trace knows; if the trace has
            nothing that they said, they say which turns are their sessions' last.
        layers: Whether the engines read off each prompt where its parts are.
        stops: Whether they read off each answer why it ended.
        guard: Whether LRU rules until the policy has shown that it finds more.

    Attributes:
        now: The graph's clock, in seconds of the trace.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        *,
        rules: Rules | None = None,
        hints: bool = False,
        layers: bool = False,
        stops: bool = False,
        guard: bool = True,
    ) -> None:
        self.now = 0.0
        self.events = TraceEvents(trace, hints, layers, stops)
        self.graph = KVCacheGraph(
            policy=policy,
            rules=rules,
            referee=Guard(policy.name, yields=guard and policy.name != LruPolicy.name),
            limits=GraphLimits(logs=False),
            clock=lambda: self.now,
        )
        self._block_size = trace.block_size
        self._unheard: dict[str, deque[News]] = {}  # by engine, what the graph has not heard yet

    def join(self, capacity: int) -> str:
        """The name of one more engine, whose pool has ``capacity`` blocks."""
        engine = f"replay {len(self._unheard)}"
        self._unheard[engine] = deque()
        self.graph.apply(engine, [EngineHello(engine, "", self._block_size, capacity + 1, "")])
        return engine

    def happened(self, engine: str, news: News) -> None:
        """Note what will be heard of later."""
        self._unheard[engine].append(news)

    def rank(self, engine: str, limit: int, now: float) -> EvictionRanking:
        """What an engine should evict first, by what was heard so far."""
        self.now = now
        return self.graph.rank(engine, limit)

    def hear(self, engine: str, before: float, others_before: float) -> None:
        """Report to the graph all that happened to an engine before a time.

        What became and ceased to be resident meanwhile is reported last, as two runs: a ranking
        sees the same columns, and the graph takes a run at once.

        Args:
            others_before: The time before which the other engines' news is heard, too.
        """
        stored: dict[str, list[AnyEvent]] = {}
        changed: dict[str, dict[int, bool]] = {}
        while (heard := self._next_heard(engine, before, others_before)) is not None:
            queue, turns = self._unheard[heard], list[AnyEvent]()
            self.now = queue[0].at
            while queue and queue[0].at == self.now:
                news = queue.popleft()
                if isinstance(news.event, BlocksStored):
                    stored.setdefault(heard, []).append(news.event)
                elif news.event is not None:
                    turns.append(news.event)
                resident = not news.is_eviction
                changed.setdefault(heard, {}).update(dict.fromkeys(news.blocks, resident))
            self.graph.apply(heard, turns)
        for heard, blocks in changed.items():
            self.graph.apply(heard, stored.get(heard, []))
            if removed := [block for block, resident in blocks.items() if not resident]:
                self.graph.apply(heard, [self.events.removed(removed)])

    def _next_heard(self, engine: str, before: float, others_before: float) -> str | None:
        """The engine whose news is the oldest that may be heard."""
        first, oldest = None, before
        for heard, queue in self._unheard.items():
            until = before if heard == engine else others_before
            if queue and queue[0].at < min(until, oldest):
                first, oldest = heard, queue[0].at
        return first
