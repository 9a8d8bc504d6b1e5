"""``OpenCases``: misses of blocks that may have left the pool in the step that looked for them."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ..types import HELD, NO_ROW, Rows, Tier
from .evictions.eviction_log import EvictionLog
from .miss_judge import judge
from .reasons import Reason
from .request_facts import Miss

if TYPE_CHECKING:
    from ..tables.tables import Tables

_LATEST_S: Final = 2.0  # after a request began, its step's news is told; ten times as long as an
# engine's client rests between two messages. Chosen
_HOT: Final = int(Tier.HOT)


class OpenCase(NamedTuple):
    """A request's miss of a block that the pool has by the books.

    Attributes:
        row: The missing block's.
        key: As the graph calls it: another one at the row is another block.
        miss: As it is unless the block had left.
        computed: Blocks that the request computes.
        short: By about how many blocks the pool was too small for all that it computes again; 0:
            not known.
        at: When it began.
        since: The id of the first eviction that was not heard of by then.
    """

    row: int
    key: int
    miss: Miss
    computed: int
    short: int
    at: float
    since: int


Closed = list[tuple[int, OpenCase]]
"""Cases with their requests' ids, and their misses as they stay."""


class OpenCases:
    """Cases by their engines, and their requests' ids in the log.

    An engine tells of a step's requests before it tells what the step evicted for them, all of that
    in one event. So the first evictions that are told after a request are its step's, unless more
    was told before: a request after blocks were stored, or a message that tells of requests alone.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._open: dict[int, dict[int, OpenCase]] = {}
        self._carried: dict[int, set[int]] = {}  # from one message to the next

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def awaits(self, engine: int) -> bool:
        """Whether a step's evictions are awaited, since a case of the engine's is open."""
        return engine in self._open

    def is_open(self, engine: int, miss: Miss, rows: Rows) -> bool:
        """Whether a miss is of a block that the pool has by the books.

        Args:
            rows: int32, the whole prompt's.
        """
        if miss.reason in (Reason.NOT_CACHEABLE, Reason.OTHER_GROUP):
            return False  # that it was there changes nothing
        return int(self._tables.blocks.tiers[engine, rows[miss.index]]) & HELD == _HOT

    def add(self, engine: int, number: int, case: OpenCase) -> None:
        """Add a request whose miss is open."""
        self._open.setdefault(engine, {})[number] = case

    def drop(self, engine: int, number: int) -> OpenCase | None:
        """Close a request's case as it is; returns it, if it has one."""
        cases = self._open.get(engine, {})
        case = cases.pop(number, None)
        if case is not None and not cases:
            self.close(engine)
        return case

    def close(self, engine: int) -> Closed:
        """Close an engine's cases as they are: their steps are over."""
        self._carried.pop(engine, None)
        return list(self._open.pop(engine, {}).items())

    def close_carried(self, engine: int) -> Closed:
        """A message is over that told of requests alone: close the cases that were open before it
        as they are. News of the others' steps may begin the next message."""
        carried = self._carried.pop(engine, set())
        closed = [(number, self._open[engine].pop(number)) for number in carried]
        if left := self._open.get(engine):
            self._carried[engine] = set(left)
        else:
            self._open.pop(engine, None)
        return closed

    def judge(self, engine: int, log: EvictionLog, now: float) -> Closed:
        """Close an engine's cases, now that the evictions of their steps were heard of: whose block
        is among these has a new miss."""
        closed = self.close(engine)
        return [(number, self._judged(engine, case, log, now)) for number, case in closed]

    def _judged(self, engine: int, case: OpenCase, log: EvictionLog, now: float) -> OpenCase:
        row, key = np.array([case.row], dtype=np.int32), np.array([case.key], dtype=np.uint64)
        is_late = now - case.at > _LATEST_S
        if is_late or int(self._tables.blocks.keys[case.row]) != case.key:
            return case
        if int(log.find(row, key)[0]) < case.since:
            return case
        index = case.miss.index
        rows = np.full(index + 1, case.row, dtype=np.int32)
        miss = judge(self._tables, log, engine, NO_ROW, rows, index, now)
        left = miss.left if isnan(miss.left) else case.at  # in its step, heard of later
        return case._replace(miss=replace(miss, left=left).keeping_all(case.short))
