"""The links of prefix chains: which block is whose parent, who walked a link, and running sums.

TEMPORAL and PREFIX_SHARE edges are these links, as ``all_edges`` shows them; the sums are columns
of the block table, so that a score never walks links.
"""

from __future__ import annotations

import numpy as np

from ..columns.row_pool import distinct
from ..types import NO_ROW, Rows
from .block_columns import Mask
from .blocks import BlockTable

_ONE = np.uint32(1)


class ChainLinks:
    """The one writer of ``parent``, ``walkers`` and the columns that sum them up."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks

    def link(self, rows: Rows, parents: Rows) -> None:
        """Give parents to rows that have none; if a row is given two, it gets the first."""
        parent = self._blocks.parent
        parent[rows[::-1]] = parents[::-1]
        if not (rows[1:] > rows[:-1]).all():
            rows = distinct(rows)
        self._count(rows, np.add)

    def cut(self, rows: Rows) -> None:
        """Remove the parents of rows that have one."""
        self._count(rows, np.subtract)
        self._blocks.parent[rows] = NO_ROW

    def walk(self, rows: Rows) -> None:
        """Note that one more request walked these rows, no row twice."""
        blocks = self._blocks
        walkers = blocks.walkers[rows] + _ONE
        blocks.walkers[rows] = walkers
        parents = blocks.parent[rows]
        shared = (walkers >= 2) & (parents != NO_ROW)
        if shared.any():
            walkers, parents = walkers[shared], parents[shared]
            second = walkers == 2  # the walk before it counts from now on, too
            np.add.at(blocks.children_walks, parents, second + _ONE)
            if second.any():
                np.add.at(blocks.shared_children, parents[second], _ONE)

    def release(self, gone: Mask) -> None:
        """Remove all links of the rows of which ``gone``, bool ``[blocks.size]``, is true, and
        which are about to be reused."""
        blocks = self._blocks
        rows = np.flatnonzero(gone).astype(np.int32)
        if blocks.children[rows].any():
            lost = np.append(gone, False)  # the last one stands for NO_ROW
            blocks.parent[: blocks.size][lost[blocks.parent[: blocks.size]]] = NO_ROW
            for sums in (blocks.children, blocks.shared_children, blocks.children_walks):
                sums[rows] = 0
        self.cut(rows[blocks.parent[rows] != NO_ROW])

    def _count(self, rows: Rows, step: np.ufunc) -> None:
        """Add linked rows (no row twice) to the sums at their parents, or subtract them."""
        blocks = self._blocks
        parents, walkers = blocks.parent[rows], blocks.walkers[rows]
        step.at(blocks.children, parents, _ONE)
        shared = walkers >= 2
        if shared.any():
            step.at(blocks.shared_children, parents[shared], _ONE)
            step.at(blocks.children_walks, parents[shared], walkers[shared])
