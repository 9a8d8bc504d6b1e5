"""Pools of several sizes under LRU, exactly: one stack, cut at each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.columns.columns import grown
from ...graph.types import Keys, Rows

Turns = npt.NDArray[np.int64]

_NEVER: Final = -1
_ROOM: Final = 4  # the log is cut at so many times the largest pool; chosen
_LEAST: Final = 256  # uses that are looked at together; chosen
_SURPLUS: Final = 64  # a pool is cut when so small a part of it is to go, or somebody asks; chosen


@dataclass(slots=True)
class _Pool:
    """One of the pools.

    Attributes:
        cut: What was used before this use is out. Where ``held`` is more than the capacity, the cut
            is still to be moved on; never beyond the last ``capacity`` uses, since each of them is
            of one block.
        held: Blocks that were used last after the cut.
    """

    capacity: int
    cut: int = 0
    held: int = 0


class LruStack:
    """Pools that evict the longest unused block, each of another size (Mattson et al., 1970).

    Each use puts its blocks on top. A block is in a pool while fewer others than fit were used
    after it, so it is enough to keep when each was used, and where each pool's cut is. A use costs
    what it uses and what it evicts, however large the pools are.

    Args:
        capacities: Of the pools, in blocks.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self._pools = [_Pool(capacity) for capacity in capacities]
        self._most = max(capacities)
        self._used: Turns = np.empty(0, dtype=np.int64)  # by row: when it was last used
        self._key: Keys = np.empty(0, dtype=np.uint64)  # by row: the block that it was then
        self._standing = np.zeros(_ROOM * self._most + 1, dtype=np.bool_)  # by use: still the last
        self._first = 0  # the use that stands at the start of ``_standing``
        self._next = 0

    def found(self, rows: Rows, keys: Keys) -> list[int]:
        """How many of these blocks each pool holds, from the first on without a gap."""
        self._reserve(rows)
        used, same = self._used[rows], leading(self._key[rows] == keys)
        oldest = int(used.min()) if len(used) else 0
        found = []
        for pool in self._pools:
            if oldest < self._next - pool.capacity and pool.held > pool.capacity:
                self._evict(pool)
            found.append(same if oldest >= pool.cut else min(same, leading(used >= pool.cut)))
        return found

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back: its tail is the oldest of
        them."""
        if not len(rows):
            return
        self._reserve(rows)
        self._make_room(len(rows))
        before = self._used[rows]
        oldest = int(before.min())
        gone = before if oldest >= self._first else before[before >= self._first]
        self._standing[gone - self._first] = False
        uses = np.arange(self._next + len(rows) - 1, self._next - 1, -1)
        self._used[rows], self._key[rows] = uses, keys
        self._standing[self._next - self._first : self._next - self._first + len(rows)] = True
        self._next += len(rows)
        for pool in self._pools:
            if oldest < pool.cut:
                pool.held += len(rows) - int(np.count_nonzero(before >= pool.cut))
            if pool.held > pool.capacity + pool.capacity // _SURPLUS:
                self._evict(pool)

    def _evict(self, pool: _Pool) -> None:
        excess, pool.held = pool.held - pool.capacity, pool.capacity
        while True:
            start = pool.cut - self._first
            log = self._standing[start : start + max(_LEAST, 2 * excess)]
            there = int(np.count_nonzero(log))
            if there >= excess:
                pool.cut += int(np.flatnonzero(log)[excess - 1]) + 1
                return
            excess -= there
            pool.cut += len(log)

    def _make_room(self, uses: int) -> None:
        """Cut off the log's start: blocks that no pool holds need no place."""
        end = self._next - self._first
        if end + uses <= len(self._standing):
            return
        first = min(pool.cut for pool in self._pools)
        kept = self._standing[first - self._first : end]
        self._standing = np.zeros(len(kept) + uses + _ROOM * self._most, dtype=np.bool_)
        self._standing[: len(kept)] = kept
        self._first = first

    def _reserve(self, rows: Rows) -> None:
        if len(rows) and int(rows.max()) >= len(self._used):
            size = int(rows.max()) * 5 // 4 + 1
            self._used = grown(self._used, size, _NEVER)
            self._key = grown(self._key, size)


def leading(held: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    first = int(held.argmin()) if len(held) else 0
    return first if len(held) and not held[first] else len(held)
