"""What an engine's pool would hold under another order: counted, not stored. As in vLLM's pool, the
blocks of a request are in use from its start, and join the free queue tail first at its end.

``core.LruStack`` is pools of several sizes under LRU, exactly: one stack, cut at each size (Mattson
et al., 1970). ``core.RankedPools`` has the last use of each block, and which of several ranked
pools hold it: pools that follow the same requests share one, so that a request costs little more
for many pools than for one. What both take in memory grows with their pools, not with the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.compiled import core
from ...graph.ranking.policy import Scores
from ...graph.tables.blocks import Places
from ...graph.tables.tables import Tables
from ...graph.tables.walks import Walk
from ...graph.types import Keys, Rows


def newest_first(uses: core.RankedPools, rows: Rows) -> Rows:
    """The same rows, the last used first."""
    used = np.empty(len(rows), dtype=np.int64)
    uses.used(rows, used)
    ordered: Rows = rows[np.argsort(-used, kind="stable")]
    return ordered


def newest_resident(tables: Tables, engine: int) -> Rows:
    """int32: the blocks of an engine's pool, the last used first."""
    resident = tables.blocks.holding(engine)
    return resident.rows[np.argsort(-resident.last_used(), kind="stable")]


class RankedShadow:
    """A pool that evicts by rankings; a block that was used after a ranking was made is exempt from
    it.

    When a ranking is used up, the longest unused block goes. Of a full pool, a 512th is emptied
    ahead: a policy is judged by a pool that is smaller by half of that on average, never by a
    larger one. Pools of fewer blocks are exact.

    What it follows are ``uses``, if others follow that too; at most 16 do.
    """

    def __init__(self, capacity: int, uses: core.RankedPools | None = None) -> None:
        self._capacity = capacity
        self._uses = uses or core.RankedPools()
        self.number = self._uses.join(capacity)  # by which `uses` knows it
        self._follows = True

    @property
    def capacity(self) -> int:
        """Blocks that it has room for; another number counts from the next use on."""
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
        """Hold these blocks from now on, the last used first: those of the engine's own pool."""
        self.leave()
        self.number, self._follows = self._uses.join(self._capacity), True
        most = self._capacity
        self._uses.seed(self.number, resident[:most], keys[:most])

    def leave(self) -> None:
        """Follow nothing any more, and hold nothing, until ``restart``."""
        if self._follows:
            self._uses.leave(self.number)
            self._follows = False

    def rows(self, keys: Keys) -> Rows:
        """int32, ascending: the rows of the blocks that are held."""
        if not self._follows:
            return np.empty(0, dtype=np.int32)
        return np.frombuffer(self._uses.rows(self.number, keys), dtype=np.int32)

    def adopt(self, rows: Rows, scores: Scores, lengths: Places | None = None) -> None:
        """Evict these from now on, the highest score first; of equals the first of them.

        With ``lengths``, ``rows`` and ``scores`` are those of runs; see ``ScoredRuns``.
        """
        if self._follows:
            self._uses.adopt(self.number, rows, scores, lengths)

    def use_up(self) -> None:
        """Evict by no ranking any more, until there is another one."""
        if self._follows:
            self._uses.use_up(self.number)

    def found(self, rows: Rows, keys: Keys) -> int:
        """How many of these blocks are held, from the first on without a gap."""
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
