"""What an engine's pool would hold under another order: counted, not stored.

A shadow sees the walks of the engine's own requests. Both kinds follow vLLM's pool: the blocks of a
request are in use from its start, and join the free queue tail first at its end.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.columns.columns import grown
from ...graph.types import Keys, Rows

Mask = npt.NDArray[np.bool_]
Turns = npt.NDArray[np.int64]

_NEVER: Final = -1
_ROOM: Final = 4  # a shadow's log is cut at so many times its capacity; chosen


class LruShadow:
    """A pool that evicts the longest unused block, exactly: a stack, cut at its capacity.

    Each use puts its blocks on top. A block is held while fewer than ``capacity`` others were used
    after it, so it is enough to keep when each was used, and where the cut is.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: Turns = np.empty(0, dtype=np.int64)  # by row: when it was last used
        self._key: Keys = np.empty(0, dtype=np.uint64)  # by row: the block that it was then
        self._standing = np.zeros(_ROOM * capacity + 1, dtype=np.bool_)  # by use: still the last
        self._first = 0  # the use that stands at the start of ``_standing``
        self._next = 0
        self._cut = 0  # what was used before this is out
        self._held = 0

    def found(self, rows: Rows, keys: Keys) -> int:
        """How many of these blocks are held, from the first on without a gap."""
        self._reserve(rows)
        held = (self._used[rows] >= self._cut) & (self._key[rows] == keys)
        return _leading(held)

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back: its tail is the oldest of
        them."""
        self._reserve(rows)
        self._make_room(len(rows))
        before = self._used[rows]
        gone = before[before >= self._first]
        self._standing[gone - self._first] = False
        self._held -= int(np.count_nonzero(before >= self._cut))
        uses = np.arange(self._next + len(rows) - 1, self._next - 1, -1)
        self._used[rows], self._key[rows] = uses, keys
        self._standing[self._next - self._first : self._next - self._first + len(rows)] = True
        self._next += len(rows)
        self._held += len(rows)
        if self._held > self.capacity:
            self._evict(self._held - self.capacity)

    def _evict(self, excess: int) -> None:
        log = self._standing[self._cut - self._first : self._next - self._first]
        self._cut += int(np.flatnonzero(log)[excess - 1]) + 1
        self._held = self.capacity

    def _make_room(self, uses: int) -> None:
        """Cut off the log's start: blocks that are not held need no place."""
        end = self._next - self._first
        if end + uses <= len(self._standing):
            return
        kept = self._standing[self._cut - self._first : end]
        self._standing = np.zeros(len(kept) + uses + _ROOM * self.capacity, dtype=np.bool_)
        self._standing[: len(kept)] = kept
        self._first = self._cut

    def _reserve(self, rows: Rows) -> None:
        if len(rows) and int(rows.max()) >= len(self._used):
            size = int(rows.max()) * 5 // 4 + 1
            self._used = grown(self._used, size, _NEVER)
            self._key = grown(self._key, size)


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
        self._order: Rows = np.empty(0, dtype=np.int32)  # evict first → evict last
        self._as_of = 0  # the uses that the ranking knew

    def restart(self, resident: Rows, keys: Keys) -> None:
        """Hold these blocks from now on: those of the engine's own pool."""
        self._resident[:] = False
        self._held = 0
        self._order = self._order[:0]
        self.use(resident[: self.capacity], keys[: self.capacity])

    def rows(self, keys: Keys) -> Rows:
        """int32, ascending: the rows of the blocks that are held.

        Args:
            keys: uint64 by row: what the table's rows hold now.
        """
        rows: Rows = np.flatnonzero(self._resident[: len(keys)]).astype(np.int32)
        mine: Mask = self._key[rows] == keys[rows]
        return np.asarray(rows[mine])

    def adopt(self, order: Rows) -> None:
        """Evict in this order from now on."""
        self._order, self._as_of = order, self._uses

    def found(self, rows: Rows, keys: Keys) -> int:
        """How many of these blocks are held, from the first on without a gap."""
        self._reserve(rows)
        return _leading(self._resident[rows] & (self._key[rows] == keys))

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
        ranked = self._resident[self._order] & (self._used[self._order] <= self._as_of)
        places = np.flatnonzero(ranked)[:excess]
        self._resident[self._order[places]] = False
        if len(places):
            self._order = self._order[int(places[-1]) + 1 :]
        if left := excess - len(places):
            rows = np.flatnonzero(self._resident)
            oldest = np.argpartition(self._used[rows], left - 1)[:left]
            self._resident[rows[oldest]] = False
        self._held = self.capacity

    def _reserve(self, rows: Rows) -> None:
        if len(rows) and int(rows.max()) >= len(self._used):
            size = int(rows.max()) * 5 // 4 + 1
            self._used = grown(self._used, size, _NEVER)
            self._key = grown(self._key, size)
            self._resident = grown(self._resident, size)


def _leading(held: Mask) -> int:
    """How many are true before the first that is not."""
    return int(np.argmin(held)) if len(held) and not held.all() else len(held)
