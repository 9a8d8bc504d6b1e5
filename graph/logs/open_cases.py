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

_SETTLE_S: Final = 5.0  # after a request began, news of what its step evicted may come; chosen
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
    """

    engine: int
    row: int
    key: int
    miss: Miss
    computed: int
    short: int
    at: float


class OpenCases:
    """Cases by their requests' ids in the log.

    An engine tells of a step's requests before it tells what the step evicted for them.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.cases: dict[int, OpenCase] = {}

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
        key = int(self._tables.blocks.keys[row])
        self.cases[number] = OpenCase(engine, row, key, miss, computed, short, now)

    def drop(self, number: int) -> OpenCase | None:
        """Close a request's case as it is; returns it, if it has one."""
        return self.cases.pop(number, None)

    def close(self, engine: int, log: EvictionLog, now: float) -> list[tuple[int, OpenCase]]:
        """Close an engine's cases whose block left, with their new misses, and those that are too
        old for it: a block that leaves later had not left when the request looked."""
        blocks, closed = self._tables.blocks, list[tuple[int, OpenCase]]()
        for number, case in list(self.cases.items()):
            if case.engine != engine:
                continue
            if now - case.at > _SETTLE_S:
                closed.append((number, self.cases.pop(number)))
            elif not int(blocks.tiers[engine, case.row]) & _HOT and self._is_same(case):
                del self.cases[number]
                closed.append((number, case._replace(miss=self._gone(case, log, now))))
        return closed

    def _is_same(self, case: OpenCase) -> bool:
        return int(self._tables.blocks.keys[case.row]) == case.key

    def _gone(self, case: OpenCase, log: EvictionLog, now: float) -> Miss:
        index = case.miss.index
        rows = np.full(index + 1, case.row, dtype=np.int32)
        miss = judge(self._tables, log, case.engine, NO_ROW, rows, index, now)
        left = miss.left if isnan(miss.left) else case.at  # in its step, heard of later
        return replace(miss, left=left).keeping_all(case.short)
