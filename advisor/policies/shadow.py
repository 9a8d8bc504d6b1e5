"""Simulates what an engine's pool would hold under another order; it counts and stores no KV. As in
vLLM's pool, the blocks of a request are in use from its start, and join the free queue tail first
at its end.

``core.LruStack`` simulates pools of several sizes under LRU exactly, as one stack cut at each size
(Mattson et al., 1970). ``core.RankedPools`` stores the last use of each block, and which of several
ranked pools hold it: pools that follow the same requests share one, so that a request costs little
more for many pools than for one. Their memory grows with their pools, not with the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.compiled import core
from ...graph.ranking.policy import Scores
from ...graph.tables.blocks import Places
from ...graph.tables.tables import Tables
from ...graph.tables.walks import Walk
from ...graph.types import Keys, Rows, Tier


def newest_first(uses: core.RankedPools, rows: Rows) -> Rows:
    """Return the same rows, the most recently used first."""
    used = np.empty(len(rows), dtype=np.int64)
    uses.used(rows, used)
    ordered: Rows = rows[np.argsort(-used, kind="stable")]
    return ordered


def newest_resident(tables: Tables, engine: int, tiers: Tier = Tier.HOT) -> Rows:
    """Return the blocks that an engine has in any of ``tiers``, int32, the most recently used
    first.
    """
    resident = tables.blocks.holding(engine, int(tiers))
    return resident.rows[np.argsort(-resident.last_used(), kind="stable")]


class RankedShadow:
    """A pool that evicts by rankings; a block used after a ranking was made is exempt from it.

    When a ranking is used up, the least recently used block is evicted. A full pool is emptied by a
    512th ahead of need: so a policy is judged by a pool that is smaller by half of that on average,
    never by a larger one. Pools of fewer blocks are exact.

    It follows ``uses``, which at most 16 pools may share.
    """

    def __init__(self, capacity: int, uses: core.RankedPools | None = None) -> None:
        self._capacity = capacity
        self._uses = uses or core.RankedPools()
        self.number = self._uses.join(capacity)  # by which `uses` knows it
        self._follows = True

    @property
    def capacity(self) -> int:
        """Number of blocks that it has room for; a change applies from the next use on."""
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._capacity = capacity
        if self._follows:
            self._uses.resize(self.number, capacity)

    @property
    def held(self) -> int:
        return self._uses.held(self.number) if self._follows else 0

    def restart(self, resident: Rows, keys: Keys) -> None:
        """Hold these blocks of the engine's own pool from now on, the most recently used first."""
        self.leave()
        self.number, self._follows = self._uses.join(self._capacity), True
        most = self._capacity
        self._uses.seed(self.number, resident[:most], keys[:most])

    def leave(self) -> None:
        """Stop following requests and hold nothing, until ``restart``."""
        if self._follows:
            self._uses.leave(self.number)
            self._follows = False

    def rows(self, keys: Keys) -> Rows:
        """Return the rows of the blocks held, int32, ascending."""
        if not self._follows:
            return np.empty(0, dtype=np.int32)
        return np.frombuffer(self._uses.rows(self.number, keys), dtype=np.int32)

    def adopt(self, rows: Rows, scores: Scores, lengths: Places | None = None) -> None:
        """Evict these from now on, the highest score first; of equal scores the first.

        With ``lengths``, ``rows`` and ``scores`` are those of runs; see ``ScoredRuns``.
        """
        if self._follows:
            self._uses.adopt(self.number, rows, scores, lengths)

    def use_up(self) -> None:
        """Stop evicting by a ranking, until there is another one."""
        if self._follows:
            self._uses.use_up(self.number)

    def found(self, rows: Rows, keys: Keys) -> int:
        """Return how many of these blocks are held, from the first on without a gap."""
        return self._uses.found(rows, keys)[self.number]

    def use(self, rows: Rows, keys: Keys) -> None:
        """Note that a request takes these blocks, or gives them back: int32 ``[n]``, a chain from
        its start; the first counts as used last: it is evicted after the others.
        """
        self._uses.use(rows, keys)

    def follow(self, walks: Sequence[Walk], keys: Keys) -> list[int]:
        """``found`` up to its reach of each walk that begins, -1 of one that ends; and ``use``, one
        walk after the other. ``keys`` are those of all rows. A pool that follows nothing has no
        place here.
        """
        return self._uses.follow(walks, keys, self.number)
