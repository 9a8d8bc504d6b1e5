"""``OpenCases``: misses of blocks that may have left the pool in the step that looked for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from ..types import HELD, NO_ROW, Rows, Tier
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


class OpenCases:
    """Cases by their engines, and their requests' ids in the log.

    An engine tells of a step's requests before it tells what the step evicted for them, all of that
    in one event. So the first evictions that are told after a request are its step's, unless more
    was told before: a request after blocks were stored, or a message that tells of requests alone.

    Args:
        closed: Is told each case that is closed, by its request's id, with the miss that stays.
    """

    def __init__(self, tables: Tables, closed: Callable[[int, OpenCase], None]) -> None:
        self._tables, self._closed = tables, closed
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

    def add(
        self, number: int, engine: int, miss: Miss, row: int, computed: int, short: int, now: float
    ) -> None:
        """Add a request whose miss is open."""
        key, log = int(self._tables.blocks.keys[row]), self._tables.history.evictions.get(engine)
        case = OpenCase(row, key, miss, computed, short, now, 0 if log is None else log.next)
        self._open.setdefault(engine, {})[number] = case

    def drop(self, engine: int, number: int) -> None:
        """Close a request's case as it is, if it has one: nothing of it is awaited any more."""
        cases = self._open.get(engine, {})
        if number in cases:
            self._closed(number, cases.pop(number))
        if not cases:
            self._open.pop(engine, None)

    def step_told(self, engine: int, now: float) -> None:
        """Close an engine's cases, now that the evictions of their steps were heard of: whose block
        is among these has a new miss."""
        for number, case in self._open.pop(engine, {}).items():
            self._closed(number, self._judged(engine, case, now))

    def step_over(self, engine: int) -> None:
        """Close an engine's cases as they are: what follows is of a later step."""
        for number in list(self._open.get(engine, ())):
            self.drop(engine, number)

    def message_over(self, engine: int) -> None:
        """A message is over that told of requests, and of no block after them: close the cases that
        were open before it as they are. News of the others' steps may begin the next message."""
        for number in self._carried.pop(engine, ()):
            self.drop(engine, number)
        if left := self._open.get(engine):
            self._carried[engine] = set(left)

    def _judged(self, engine: int, case: OpenCase, now: float) -> OpenCase:
        log = self._tables.history.evictions.get(engine)
        is_late = now - case.at > _LATEST_S
        if log is None or is_late or int(self._tables.blocks.keys[case.row]) != case.key:
            return case
        row, key = np.array([case.row], dtype=np.int32), np.array([case.key], dtype=np.uint64)
        if int(log.find(row, key)[0]) < case.since:
            return case
        index = case.miss.index
        rows = np.full(index + 1, case.row, dtype=np.int32)
        miss = judge(self._tables, log, engine, NO_ROW, rows, index, now)
        left = miss.left if isnan(miss.left) else case.at  # in its step, heard of later
        return case._replace(miss=replace(miss, left=left).keeping_all(case.short))
