"""``GhostKeeper``: forgets the longest unused ghosts once there are too many."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final

import numpy as np

from ..tables.block_columns import Mask, Times
from ..tables.blocks import BlockTable
from ..tables.tables import Tables
from ..types import HELD, Rows
from .oldest import oldest

_PART: Final = 1 << 13  # rows that are released in one slice; chosen
_EDGES: Final = 1 << 16  # edges that are looked at in one slice; chosen
_AT_ONCE: Final = 1 << 17  # released after one batch of events, the others after the next; chosen
_NONE: Final[Rows] = np.empty(0, dtype=np.int32)


class GhostKeeper:
    """Releases rows of blocks that no engine holds any more.

    Args:
        forget_all: Each is told once of all rows that are about to be reused, as a bool
            ``[blocks.size]``.
        forget_some: Each is told of the rows of a slice, int32, before they are released.
    """

    def __init__(
        self,
        tables: Tables,
        forget_all: tuple[Callable[[Mask], None], ...],
        forget_some: tuple[Callable[[Rows], None], ...],
    ) -> None:
        self._tables = tables
        self._forget_all = forget_all
        self._forget_some = forget_some
        self._limits = tables.limits
        self._above = self._most()  # blocks, from which on ghosts are counted

    def releasing(self) -> Iterator[None]:
        """Release ghosts beyond the limit, slice by slice; no event may be applied meanwhile.

        First they lose all that refers to them, then their rows.
        """
        rows = yield from self._surplus()
        if not len(rows):
            return
        yield
        gone = np.zeros(self._tables.blocks.size, dtype=np.bool_)
        gone[rows] = True
        yield from self._losing_edges(rows, gone)
        for forget in (*self._forget_all, self._tables.links.release):
            forget(gone)
        for start in range(0, len(rows), _PART):
            yield
            self._release(rows[start : start + _PART])

    def _losing_edges(self, rows: Rows, gone: Mask) -> Iterator[None]:
        """Remove the edges at ``rows``; a scan only if there is one."""
        edges, sums = self._tables.edges, self._tables.blocks.sums.values()
        if any(each.degree[rows].any() for each in sums):
            for start in range(0, edges.size, _EDGES):
                edges.remove(edges.at(gone, start, min(start + _EDGES, edges.size)))
                yield

    def _release(self, rows: Rows) -> None:
        for forget in self._forget_some:
            forget(rows)
        self._tables.blocks.release(rows)

    def _surplus(self) -> Generator[None, None, Rows]:
        """int32, ascending: the ghosts to release now; notes when to look again."""
        blocks, limit = self._tables.blocks, self._most()
        if self._limits is not self._tables.limits:
            self._limits, self._above = self._tables.limits, limit
        if len(blocks) <= self._above:
            return _NONE  # not when an engine leaves, either: it may be back in a moment
        ghosts, times = list[Rows](), list[Times]()
        for part in blocks.parts():
            ghosts.append(_unheld(blocks, part))
            times.append(blocks.last_used(ghosts[-1]))
            yield
        known = sum(map(len, ghosts))
        surplus = known - limit * 3 // 4 if known > limit else 0
        count = min(surplus, _AT_ONCE)
        left = len(blocks) - count
        self._above = left if count < surplus else max(limit, left + limit // 4)
        return oldest(ghosts, times, count)

    def _most(self) -> int:
        """Ghosts that are remembered: as many as the engines' pools hold, or more."""
        limits, pools = self._tables.limits, sum(self._tables.pool_blocks.values())
        return max(limits.max_ghosts, int(limits.ghost_share * pools))


def _unheld(blocks: BlockTable, part: slice) -> Rows:
    """int32, ascending: rows in use, from a part of the table, that no engine holds."""
    held = (np.bitwise_or.reduce(blocks.tiers[:, part], axis=0) & HELD) != 0
    rows: Rows = part.start + np.flatnonzero(blocks.alive[part] & ~held).astype(np.int32)
    return rows
