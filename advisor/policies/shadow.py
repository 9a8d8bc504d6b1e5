"""What an engine's pool would hold under another order: counted, not stored.

A shadow sees the walks of the engine's own requests. Both kinds follow vLLM's pool: the blocks of a
request are in use from its start, and join the free queue tail first at its end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...graph.columns.columns import grown
from ...graph.ranking.policy import Scores
from ...graph.types import Keys, Rows
from .falling_order import FallingOrder
from .lru_stack import LruStack, Turns, leading

Mask = npt.NDArray[np.bool_]


class LruShadow:
    """A pool that evicts the longest unused block, exactly."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._stack = LruStack([capacity])

    def found(self, rows: Rows, keys: Keys) -> int:
        """How many of these blocks are held, from the first on without a gap."""
        return self._stack.found(rows, keys)[0]

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back: its tail is the oldest of
        them."""
        self._stack.use(rows, keys)


class RankedShadow:
    """A pool that evicts by rankings; a block that was used after a ranking was made is exempt from
    it.

    When a ranking is used up, the longest unused block goes.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held = 0
        self._resident: Mask = np.empty(0, dtype=np.bool_)  # by row
        self._key: Keys = np.empty(0, dtype=np.uint64)  # by row
        self._used: Turns = np.empty(0, dtype=np.int64)  # by row: which use was its last
        self._uses = 0
        self._order = FallingOrder.empty()
        self._as_of = 0  # the uses that the ranking knew

    def restart(self, resident: Rows, keys: Keys) -> None:
        """Hold these blocks from now on: those of the engine's own pool."""
        self._resident[:] = False
        self._held = 0
        self.use_up()
        self.use(resident[: self.capacity], keys[: self.capacity])

    def rows(self, keys: Keys) -> Rows:
        """int32, ascending: the rows of the blocks that are held.

        Args:
            keys: uint64 by row: what the table's rows hold now.
        """
        rows: Rows = np.flatnonzero(self._resident[: len(keys)]).astype(np.int32)
        mine: Mask = self._key[rows] == keys[rows]
        return np.asarray(rows[mine])

    def adopt(self, rows: Rows, scores: Scores) -> None:
        """Evict these from now on, the highest score first; of equals the first of them."""
        self._order, self._as_of = FallingOrder(rows, scores), self._uses

    def use_up(self) -> None:
        """Evict by no ranking any more, until there is another one."""
        self._order = FallingOrder.empty()

    def found(self, rows: Rows, keys: Keys) -> int:
        """How many of these blocks are held, from the first on without a gap."""
        self._reserve(rows)
        return leading(self._resident[rows] & (self._key[rows] == keys))

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back."""
        self._reserve(rows)
        self._held += int(np.count_nonzero(~self._resident[rows]))
        self._resident[rows], self._key[rows] = True, keys
        self._used[rows] = np.arange(self._uses + len(rows), self._uses, -1)
        self._uses += len(rows)
        if self._held > self.capacity:
            self._evict(self._held - self.capacity)

    def _evict(self, excess: int) -> None:
        while excess:
            next_ones = self._order.peek(excess)
            if not len(next_ones):
                rows = np.flatnonzero(self._resident).astype(np.int32)
                self.adopt(rows, -self._used[rows].astype(np.float64))
                continue
            ranked = self._resident[next_ones] & (self._used[next_ones] <= self._as_of)
            places = np.flatnonzero(ranked)[:excess]
            self._resident[next_ones[places]] = False
            excess -= len(places)
            self._order.skip(len(next_ones) if excess else int(places[-1]) + 1)
        self._held = self.capacity

    def _reserve(self, rows: Rows) -> None:
        if len(rows) and int(rows.max()) >= len(self._used):
            size = int(rows.max()) * 5 // 4 + 1
            self._used = grown(self._used, size)
            self._key = grown(self._key, size)
            self._resident = grown(self._resident, size)
