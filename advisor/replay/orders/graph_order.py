"""A live sidecar's eviction order: a ``KVCacheGraph`` and a policy's rankings of it."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ....graph.kvcache_graph import KVCacheGraph
from ....graph.messages.advice import PRESSING_SHARE, AdmissionAdvice
from ....graph.messages.events import AnyEvent, BlocksStored, EngineHello
from ....graph.ranking.copy_worth import worth_spilling
from ....graph.ranking.policy import Policy
from ....graph.ranking.profile import Rules
from ....graph.tables.tables import GraphLimits
from ....graph.types import NO_ROW, Keys
from ...admission.admission import Admission
from ...policies.guard import Guard
from ..traces.trace import Trace
from ..traces.trace_events import TraceEvents
from .orders import EvictionOrder

_ENGINE: Final = "replay"
_SLICE: Final = 512  # keys looked up at a time; chosen


@dataclass(frozen=True, slots=True)
class Planning:
    """How a live sidecar plans.

    Attributes:
        interval_s: Seconds between two rankings.
        delay_s: Seconds until a sidecar knows of an event: an engine reports five times per second.
        pressing_share: Share of a pool; after so many stored blocks an engine reports at once,
            and is answered at once.
        pressing_delay_s: Seconds that this takes.
        max_ranked: Blocks per ranking; behind them an engine's own order holds.
    """

    interval_s: float = 0.5
    delay_s: float = 0.2
    pressing_share: float = PRESSING_SHARE
    pressing_delay_s: float = 0.02
    max_ranked: int = 8192


class GraphOrder(EvictionOrder):
    """Reports to a real graph what an engine's hook would report, and evicts by its rankings.

    A ranking is made at every multiple of the interval from what happened before, as live; a
    ranking that no eviction asks for is left out, which changes no result. Behind a ranking's end
    the engine's own order holds: the longest free block first.

    Args:
        policy: Fresh, since it may learn.
        rules: None takes the defaults.
        hints: Whether callers name their sessions and say what the trace knows; if the trace has
            nothing that they said, they say which turns are their sessions' last.
        layers: Whether the engine reads off each prompt where its parts are.
    """

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        *,
        rules: Rules | None = None,
        planning: Planning | None = None,
        hints: bool = False,
        layers: bool = False,
    ) -> None:
        self.planning = planning or Planning()
        self._now = 0.0
        self._block_size = trace.block_size
        self._trace_events = TraceEvents(trace, hints, layers)
        self._graph = KVCacheGraph(
            policy=policy,
            rules=rules,
            referee=Guard(policy.name),
            limits=GraphLimits(logs=False),
            clock=lambda: self._now,
        )
        self._news: deque[_News] = deque()  # that the graph has not heard yet
        self._free: OrderedDict[int, float] = OrderedDict()
        self._ranking: Keys = self._trace_events.keys[:0]  # what is left of it
        self._protected: set[int] = set()  # block ids
        self._slice: list[int] = []  # its next block ids, evict last → evict first
        self._tick = self._known_of = -math.inf
        self._stored = 0  # blocks since the last ranking
        self._pressing = 1
        self._word: AdmissionAdvice | None = None
        self._ids_by_key = np.argsort(self._trace_events.keys, kind="stable")
        self._sorted_keys = self._trace_events.keys[self._ids_by_key]

    def serves(self, capacity: int) -> None:
        hello = EngineHello(_ENGINE, "", self._block_size, capacity + 1, "")
        self._graph.apply(_ENGINE, [hello])
        self._pressing = max(1, int(self.planning.pressing_share * capacity))

    def freed(self, request: int, blocks: Sequence[int], now: float) -> None:
        self._free.update(dict.fromkeys(blocks, now))

    def reused(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._free[block]

    def victims(self, count: int, now: float) -> list[int]:
        self._refresh(now)
        taken: list[int] = []
        while len(taken) < count and (block := self._next_ranked()) is not None:
            # What was used since the ranking's moment is not in it.
            if self._free.get(block, math.inf) <= self._known_of:
                del self._free[block]
                taken.append(block)
        taken.extend(self._longest_free() for _ in range(count - len(taken)))
        return taken

    def started(self, request: int, hit: int, new: Sequence[int], now: float) -> None:
        self._news.append(_News(now, self._trace_events.started(request, hit)))
        self._stored += len(new)
        if new:
            self._news.append(_News(now, self._trace_events.stored(request, hit), new))

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        self._news.append(_News(now, None, blocks))

    def worth_copying(self, blocks: Sequence[int]) -> Sequence[int]:
        tables, keys = self._graph.tables, self._trace_events.keys[list(blocks)]
        rows = tables.blocks.find(keys, tables.salt(0))
        worthy = (rows == NO_ROW) | worth_spilling(tables, rows, self._now)
        return [block for block, worth in zip(blocks, worthy.tolist(), strict=True) if worth]

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:
        if made:
            self._news.append(_News(now, self._trace_events.copied(made)))
        if gone:
            self._news.append(_News(now, self._trace_events.dropped(gone)))

    def finished(self, request: int, now: float) -> None:
        self._news.append(_News(now, self._trace_events.finished(request, now)))

    def advised(self, admission: Admission, now: float) -> AdmissionAdvice:
        """What a sidecar has said of room by ``now``: made at every multiple of the interval."""
        tick = math.floor(now / self.planning.interval_s) * self.planning.interval_s
        if self._word is None or tick > self._word.ts:
            known_of = tick - self.planning.delay_s
            self._catch_up(known_of)
            self._now = tick
            word = admission.advise(self._graph.tables, 0, tick)
            self._word = replace(word, known_of=known_of)
        return self._word

    def _longest_free(self) -> int:
        """Take the longest free block that is not protected, or the longest free one of all."""
        for _ in range(len(self._protected)):
            block = next(iter(self._free))
            if block not in self._protected:
                break
            self._free.move_to_end(block)
        return self._free.popitem(last=False)[0]

    def _next_ranked(self) -> int | None:
        """The ranking's next block id; keys are looked up one slice at a time."""
        if not self._slice:
            self._slice = self._ids(self._ranking[:_SLICE])[::-1]
            self._ranking = self._ranking[_SLICE:]
        return self._slice.pop() if self._slice else None

    def _refresh(self, now: float) -> None:
        """Rank as of the last tick if that was not done yet, or as of now if much was
        stored since."""
        tick = math.floor(now / self.planning.interval_s) * self.planning.interval_s
        if self._stored >= self._pressing:
            self._rank(now, now - self.planning.pressing_delay_s)
        elif tick > self._tick:
            self._rank(tick, tick - self.planning.delay_s)

    def _rank(self, tick: float, known_of: float) -> None:
        self._tick, self._known_of, self._stored = tick, known_of, 0
        self._catch_up(known_of)
        self._now = tick
        ranking = self._graph.rank(_ENGINE, self.planning.max_ranked)
        self._ranking, self._protected = ranking.order, set(self._ids(ranking.protected))
        self._slice = []

    def _ids(self, keys: Keys) -> list[int]:
        """The trace's numbers of these blocks."""
        found: list[int] = self._ids_by_key[np.searchsorted(self._sorted_keys, keys)].tolist()
        return found

    def _catch_up(self, tick: float) -> None:
        """Report to the graph all that happened before ``tick``.

        What became and ceased to be resident meanwhile is reported last, as two runs: a ranking
        sees the same columns, and the graph takes a run at once.
        """
        stored: list[AnyEvent] = []
        changed: dict[int, bool] = {}
        while self._news and self._news[0].at < tick:
            self._now = self._news[0].at
            turns: list[AnyEvent] = []
            while self._news and self._news[0].at == self._now:
                news = self._news.popleft()
                if isinstance(news.event, BlocksStored):
                    stored.append(news.event)
                elif news.event is not None:
                    turns.append(news.event)
                changed.update(dict.fromkeys(news.blocks, news.event is not None))
            self._graph.apply(_ENGINE, turns)
        removed = [block for block, resident in changed.items() if not resident]
        self._graph.apply(_ENGINE, stored)
        if removed:
            self._graph.apply(_ENGINE, [self._trace_events.removed(removed)])


@dataclass(frozen=True, slots=True)
class _News:
    """One thing that happened: an event, or (without one) the eviction of blocks."""

    at: float
    event: AnyEvent | None
    blocks: Sequence[int] = ()
