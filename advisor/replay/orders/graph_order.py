"""The eviction order of an engine that a live sidecar advises."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ....graph.messages.advice import PRESSING_SHARE, AdmissionAdvice
from ....graph.messages.events import AnyEvent
from ....graph.ranking.copy_worth import worth_spilling
from ....graph.ranking.policy import Policy
from ....graph.types import NO_ROW, Keys
from ...admission.admission import Admission
from ..traces.trace import Trace
from .orders import EvictionOrder
from .simulated_sidecar import News, SimulatedSidecar

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
    """Reports to a sidecar what an engine's hook would report, and evicts by its rankings.

    A ranking is made at every multiple of the interval from what happened before, as live; a
    ranking that no eviction asks for is left out, which changes no result. Behind a ranking's end
    the engine's own order holds: the longest free block first.

    Args:
        sidecar: Advises this engine, and perhaps others.
    """

    def __init__(self, sidecar: SimulatedSidecar, planning: Planning | None = None) -> None:
        self.planning = planning or Planning()
        self._sidecar = sidecar
        self._engine = ""
        self._free: OrderedDict[int, float] = OrderedDict()
        self._ranking: Keys = sidecar.events.keys[:0]  # what is left of it
        self._protected: set[int] = set()  # block ids
        self._slice: list[int] = []  # its next block ids, evict last → evict first
        self._tick = self._known_of = -math.inf
        self._stored = 0  # blocks since the last ranking
        self._pressing = 1
        self._word: AdmissionAdvice | None = None
        self._ids_by_key = np.argsort(sidecar.events.keys, kind="stable")
        self._sorted_keys = sidecar.events.keys[self._ids_by_key]

    @property
    def sidecar(self) -> SimulatedSidecar:
        """Who advises this engine."""
        return self._sidecar

    @classmethod
    def alone(cls, trace: Trace, policy: Policy, *, hints: bool = False) -> GraphOrder:
        """The order of an engine with a sidecar of its own, by the defaults; see
        ``SimulatedSidecar``."""
        return cls(SimulatedSidecar(trace, policy, hints=hints))

    def serves(self, capacity: int) -> None:
        self._engine = self._sidecar.join(capacity)
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
        self._tell(now, self._sidecar.events.started(request, hit))
        self._stored += len(new)
        if new:
            self._tell(now, self._sidecar.events.stored(request, hit), new)

    def evicted(self, blocks: Sequence[int], now: float) -> None:
        self._tell(now, None, blocks)

    def worth_copying(self, blocks: Sequence[int]) -> Sequence[int]:
        tables, keys = self._sidecar.graph.tables, self._sidecar.events.keys[list(blocks)]
        rows = tables.blocks.find(keys, tables.salt(tables.engines[self._engine]))
        worthy = (rows == NO_ROW) | worth_spilling(tables, rows, self._sidecar.now)
        return [block for block, worth in zip(blocks, worthy.tolist(), strict=True) if worth]

    def copied(self, made: Sequence[int], gone: Sequence[int], now: float) -> None:
        if made:
            self._tell(now, self._sidecar.events.copied(made))
        if gone:
            self._tell(now, self._sidecar.events.dropped(gone))

    def finished(self, request: int, now: float) -> None:
        self._tell(now, self._sidecar.events.finished(request, now))

    def advised(self, admission: Admission, now: float) -> AdmissionAdvice:
        """What a sidecar has said of room by ``now``: made at every multiple of the interval."""
        tick = math.floor(now / self.planning.interval_s) * self.planning.interval_s
        if self._word is None or tick > self._word.ts:
            known_of = tick - self.planning.delay_s
            self._sidecar.hear(self._engine, known_of, known_of)
            self._sidecar.now = tick
            tables = self._sidecar.graph.tables
            word = admission.advise(tables, tables.engines[self._engine], tick)
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
        self._sidecar.hear(self._engine, known_of, min(known_of, tick - self.planning.delay_s))
        ranking = self._sidecar.rank(self._engine, self.planning.max_ranked, tick)
        self._ranking, self._protected = ranking.order, set(self._ids(ranking.protected))
        self._slice = []

    def _ids(self, keys: Keys) -> list[int]:
        """The trace's numbers of these blocks."""
        found: list[int] = self._ids_by_key[np.searchsorted(self._sorted_keys, keys)].tolist()
        return found

    def _tell(self, now: float, event: AnyEvent | None, blocks: Sequence[int] = ()) -> None:
        self._sidecar.happened(self._engine, News(now, event, blocks))
