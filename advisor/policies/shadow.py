"""What an engine's pool would hold under another order: counted, not stored.

A shadow sees the walks of the engine's own requests. Both kinds follow vLLM's pool: the blocks of a
request are in use from its start, and join the free queue tail first at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.ranking.policy import Scores
from ...graph.tables.columns import grown
from ...graph.types import Keys, Rows

# Pools of several sizes under LRU, exactly: one stack, cut at each size.

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


# ``FallingOrder``: rows by their scores, sorted only as far as somebody asks.

_FALLING_ORDER_PARTS: Final = 16  # in which the order is sorted, one after the other; chosen
_FALLING_ORDER_LEAST: Final = 1024  # rows of a part; chosen
_FEW: Final = 64  # rows that are given however few are asked for; chosen
_TIMES: Final = 2  # as many rows as are asked for: some are passed over; chosen


class FallingOrder:
    """Rows from the highest score to the lowest; of equals the one that was given first.

    Args:
        rows: int32 ``[n]``.
        scores: float64 ``[n]``, theirs; no NaN.
    """

    def __init__(self, rows: Rows, scores: Scores) -> None:
        self._rows, self._scores = rows, scores  # not sorted yet
        self._part = max(_FALLING_ORDER_LEAST, len(rows) // _FALLING_ORDER_PARTS)
        self._sorted = rows[:0]
        self._at = 0  # in ``_sorted``

    @classmethod
    def empty(cls) -> FallingOrder:
        """One without a row."""
        return cls(np.empty(0, dtype=np.int32), np.empty(0))

    def peek(self, count: int) -> Rows:
        """int32: the next rows: about twice ``count`` at most, at least one if any is left."""
        if self._at == len(self._sorted):
            self._sort()
        return self._sorted[self._at : self._at + max(_FEW, _TIMES * count)]

    def skip(self, count: int) -> None:
        """Go on behind the first ``count`` of the next rows."""
        self._at += count

    def _sort(self) -> None:
        """Sort the highest part of what is left."""
        rows, scores = self._rows, self._scores
        if len(rows) > 2 * self._part:
            high = scores >= np.partition(scores, len(scores) - self._part)[-self._part]
            self._rows, self._scores = rows[~high], scores[~high]
            rows, scores = rows[high], scores[high]
        else:
            self._rows, self._scores = rows[:0], scores[:0]
        self._sorted, self._at = rows[np.argsort(-scores, kind="stable")], 0


Mask = npt.NDArray[np.bool_]
Holders = npt.NDArray[np.uint16]
_BITS: Final = [1 << place for place in range(16)]
_ALL: Final = (1 << 16) - 1
# Of a full pool, one is emptied ahead: a policy is judged by a pool that is smaller by half of that
# on average, never by a larger one. Pools of fewer blocks are exact. Chosen.
_PARTS: Final = 512


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


class Found(NamedTuple):
    """Which pools hold some blocks.

    Attributes:
        held_by: uint16 ``[n]``: a bit for each pool, of the blocks that any of them may hold.
        by_all: The bits of the pools that hold all of these.
    """

    held_by: Holders
    by_all: int

    def by(self, pool: RankedShadow) -> int:
        """How many of the blocks a pool holds, from the first on without a gap."""
        if self.by_all & pool.bit:
            return len(self.held_by)
        return leading((self.held_by & pool.bit) != 0)


class Uses:
    """When blocks were used last, and which pools hold them: one book for all pools that follow the
    same requests, so that a request costs little more for many pools than for one."""

    def __init__(self) -> None:
        self.key: Keys = np.empty(0, dtype=np.uint64)  # by row
        self.used: Turns = np.empty(0, dtype=np.int64)  # by row: which use was its last
        self.held_by: Holders = np.empty(0, dtype=np.uint16)  # by row: a bit for each pool
        self.count = 0
        self._pools: list[RankedShadow] = []

    def join(self, pool: RankedShadow) -> int:
        """The bit of a pool that follows these uses from now on, empty; at most 16 do."""
        taken = [each.bit for each in self._pools]
        self._pools.append(pool)
        return next(bit for bit in _BITS if bit not in taken)

    def leave(self, pool: RankedShadow) -> None:
        """Note that a pool follows them no longer, and holds nothing."""
        if pool in self._pools:
            self._pools.remove(pool)
        self.held_by &= np.uint16(~pool.bit & _ALL)
        pool.held = 0

    def found(self, rows: Rows, keys: Keys) -> Found:
        """Which of these blocks are held."""
        self.reserve(rows)
        same = leading(self.key[rows] == keys)
        held_by = self.held_by[rows[:same]]
        return Found(held_by, int(np.bitwise_and.reduce(held_by)))

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back, in every pool."""
        self.reserve(rows)
        before, everybody = self.held_by[rows], sum(each.bit for each in self._pools)
        fresh = before[before != everybody]
        if len(fresh):
            in_some = fresh.any()
            for each in self._pools:
                held = int(np.count_nonzero(fresh & each.bit)) if in_some else 0
                each.held += len(fresh) - held
            self.held_by[rows] = everybody
        self.key[rows] = keys
        self.used[rows] = np.arange(self.count + len(rows), self.count, -1)
        self.count += len(rows)
        for each in self._pools:
            if each.held > each.capacity:
                each.evict_surplus()

    def seed(self, pool: RankedShadow, rows: Rows, keys: Keys) -> None:
        """Note that one pool holds these blocks; those of which no use is known count as used
        before all others, the first of them last."""
        self.reserve(rows)
        unknown = rows[self.key[rows] != keys]
        for each in self._pools:
            each.held -= int(np.count_nonzero(self.held_by[unknown] & each.bit))
        self.held_by[unknown], self.key[rows] = 0, keys
        self.used[unknown] = -np.arange(1, len(unknown) + 1)
        pool.held += int(np.count_nonzero((self.held_by[rows] & pool.bit) == 0))
        self.held_by[rows] |= np.uint16(pool.bit)
        if pool.held > pool.capacity:
            pool.evict_surplus()

    def reserve(self, rows: Rows) -> None:
        """Make room for these rows."""
        if len(rows) and int(rows.max()) >= len(self.used):
            size = int(rows.max()) * 5 // 4 + 1
            self.used = grown(self.used, size)
            self.key = grown(self.key, size)
            self.held_by = grown(self.held_by, size)


class RankedShadow:
    """A pool that evicts by rankings; a block that was used after a ranking was made is exempt from
    it.

    When a ranking is used up, the longest unused block goes.

    Args:
        uses: What it follows, if others follow that too.

    Attributes:
        held: Blocks.
        bit: By which ``uses`` knows it.
    """

    def __init__(self, capacity: int, uses: Uses | None = None) -> None:
        self.capacity = capacity
        self.held = 0
        self._uses = uses or Uses()
        self.bit = self._uses.join(self)
        self._order = FallingOrder.empty()
        self._as_of = 0  # the uses that the ranking knew

    def restart(self, resident: Rows, keys: Keys) -> None:
        """Hold these blocks from now on, the last used first: those of the engine's own pool."""
        self.leave()
        self.bit = self._uses.join(self)
        self.use_up()
        self._uses.seed(self, resident[: self.capacity], keys[: self.capacity])

    def leave(self) -> None:
        """Follow nothing any more, and hold nothing, until ``restart``."""
        self._uses.leave(self)

    def rows(self, keys: Keys) -> Rows:
        """int32, ascending: the rows of the blocks that are held.

        Args:
            keys: uint64 by row: what the table's rows hold now.
        """
        held = (self._uses.held_by[: len(keys)] & self.bit) != 0
        rows: Rows = np.flatnonzero(held).astype(np.int32)
        mine: Mask = self._uses.key[rows] == keys[rows]
        return np.asarray(rows[mine])

    def adopt(self, rows: Rows, scores: Scores) -> None:
        """Evict these from now on, the highest score first; of equals the first of them."""
        self._order, self._as_of = FallingOrder(rows, scores), self._uses.count

    def use_up(self) -> None:
        """Evict by no ranking any more, until there is another one."""
        self._order = FallingOrder.empty()

    def found(self, rows: Rows, keys: Keys) -> int:
        """How many of these blocks are held, from the first on without a gap."""
        return self._uses.found(rows, keys).by(self)

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back."""
        self._uses.use(rows, keys)

    def evict_surplus(self) -> None:
        """Evict what is beyond the capacity, and a little more, so that most requests evict
        nothing."""
        kept = self.capacity - self.capacity // _PARTS
        excess, uses, self.held = self.held - kept, self._uses, kept
        while excess:
            next_ones = self._order.peek(excess)
            if not len(next_ones):
                rows = np.flatnonzero(uses.held_by & self.bit).astype(np.int32)
                self.adopt(rows, -uses.used[rows].astype(np.float64))
                continue
            held = (uses.held_by[next_ones] & self.bit) != 0
            places = np.flatnonzero(held & (uses.used[next_ones] <= self._as_of))[:excess]
            uses.held_by[next_ones[places]] &= np.uint16(~self.bit & _ALL)
            excess -= len(places)
            self._order.skip(len(next_ones) if excess else int(places[-1]) + 1)
