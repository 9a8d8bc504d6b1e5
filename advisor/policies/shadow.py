"""What an engine's pool would hold under another order: counted, not stored.

A shadow sees the walks of the engine's own requests. Both kinds follow vLLM's pool: the blocks of a
request are in use from its start, and join the free queue tail first at its end.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.columns.columns import grown
from ...graph.ranking.policy import Scores
from ...graph.types import Keys, Rows
from .falling_order import FallingOrder
from .lru_stack import LruStack, Turns, leading

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
