"""Prefix chains: which block follows which, at what depth, and who walked the link."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tables.tables import Tables
from ..types import NO_ROW, Rows

Flags = npt.NDArray[np.bool_]
_COMPARED: Final = 512  # rows that are compared together; chosen
_COMPARED_PAIRS: Final = 1 << 15  # chosen
_REPAIR_PASSES: Final = 64  # over links whose parent became deeper, at most; chosen


class ChainLinker:
    """Sets ``parent`` and ``depth``; keeps every parent strictly shallower than its child.

    This invariant makes a cycle impossible, whatever an engine or an attacker sends: a link that
    cannot hold it is cut and counted.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.cut_links = 0

    def extend(self, rows: Rows, new: Flags, before: Rows, counts: npt.NDArray[np.int64]) -> None:
        """Link runs of consecutive blocks that were stored, each run behind a block of its own.

        Args:
            rows: int32 ``[n]``, run after run.
            new: bool ``[n]``: whether the row was created for this.
            before: int32 ``[runs]``: the row before each run, ``NO_ROW`` at the start of a chain.
            counts: int64 ``[runs]``: blocks in each run, at least one.
        """
        depth = self._tables.blocks.depth
        starts = np.cumsum(counts) - counts
        parents = np.empty_like(rows)
        parents[1:] = rows[:-1]
        parents[starts] = before
        starts, before, counts = _joined(rows, starts, before)
        if _holds_any(rows, before):
            self._deepen_in_order(rows, new, before, starts, counts)
            depths = depth[rows]
        else:
            base = np.where(before == NO_ROW, 0, depth[before] + 1)
            within = np.arange(len(rows)) - np.repeat(starts, counts)
            depths = np.where(new, np.repeat(base, counts) + within, depth[rows])
        self._link(rows, new, parents, depths)

    def lay(self, rows: Rows, new: Flags, counts: npt.NDArray[np.int64]) -> None:
        """Link whole chains from their start: the ``i``-th row of each has depth ``i``.

        Args:
            rows: int32 ``[n]``, chain after chain.
            new: bool ``[n]``: whether the row was created for this.
            counts: int64 ``[chains]``: blocks in each.
        """
        starts = np.cumsum(counts) - counts
        parents = np.empty_like(rows)
        parents[1:] = rows[:-1]
        parents[starts[counts > 0]] = NO_ROW
        self._link(rows, new, parents, np.arange(len(rows)) - np.repeat(starts, counts))

    def ancestors(self, row: int, until: Rows) -> Rows:
        """int32: ``row`` and its ancestors, up to the first that is in the chain ``until``.

        Args:
            until: int32 ``[n]``: a chain by depth (``until[d]`` has depth ``d``).
        """
        blocks, path = self._tables.blocks, []
        while row != NO_ROW:
            depth = int(blocks.depth[row])
            if depth < len(until) and until[depth] == row:
                break
            path.append(row)
            row = int(blocks.parent[row])
        return np.array(path, dtype=np.int32)

    def from_root(self, row: int, length: int) -> Rows:
        """int32 ``[length]``: the chain that ends with ``row``; empty if it is not known to be so
        long.

        Blocks that came together stand in consecutive rows, and are compared together.
        """
        blocks, chain, at = self._tables.blocks, np.empty(length, dtype=np.int32), length
        while row != NO_ROW and at:
            first = max(0, row - min(at, _COMPARED) + 1)
            linked = blocks.parent[first + 1 : row + 1] == np.arange(first, row)
            count = 1 + _trailing(linked)
            chain[at - count : at] = np.arange(row - count + 1, row + 1)
            at -= count
            row = int(blocks.parent[row - count + 1])
        return chain if row == NO_ROW and not at else chain[:0]

    def _deepen_in_order(
        self,
        rows: Rows,
        new: Flags,
        before: Rows,
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
    ) -> None:
        """Set depths where a run continues another run of the same batch."""
        depth = self._tables.blocks.depth
        for start, count, row in zip(
            starts.tolist(), counts.tolist(), before.tolist(), strict=True
        ):
            base = 0 if row == NO_ROW else int(depth[row]) + 1
            run = rows[start : start + count]
            fresh = np.arange(base, base + count, dtype=np.int32)
            depth[run] = np.where(new[start : start + count], fresh, depth[run])

    def _link(self, rows: Rows, new: Flags, parents: Rows, depths: npt.NDArray[Any]) -> None:
        """Give parents to rows that have none, and all of them their depth."""
        blocks = self._tables.blocks
        moved = blocks.depth[rows] != depths
        blocks.depth[rows[moved]] = depths[moved]
        orphan = (blocks.parent[rows] == NO_ROW) & (parents != NO_ROW) & (parents != rows)
        if orphan.any():
            self._tables.links.link(rows[orphan], parents[orphan])
        elif not moved.any():
            return  # all of it was known, as of most chains
        parents = blocks.parent[rows]
        upside_down = (parents != NO_ROW) & (blocks.depth[parents] >= blocks.depth[rows])
        if (moved & ~new).any() or upside_down.any():  # rare: an old row may have children
            self._repair_depths()

    def _repair_depths(self) -> None:
        """Push children below parents that became deeper; cut what does not settle."""
        blocks = self._tables.blocks
        size = blocks.size
        for _ in range(_REPAIR_PASSES):
            sunk = self._too_shallow(size)
            if sunk.size == 0:
                return
            blocks.depth[sunk] = blocks.depth[blocks.parent[sunk]] + 1
        self._cut(self._too_shallow(size))

    def _too_shallow(self, size: int) -> Rows:
        blocks = self._tables.blocks
        parent = blocks.parent[:size]
        bad = (parent != NO_ROW) & (blocks.depth[:size] <= blocks.depth[parent])
        return np.flatnonzero(bad & blocks.alive[:size]).astype(np.int32)

    def _cut(self, rows: Rows) -> None:
        self._tables.links.cut(rows)
        self.cut_links += len(rows)


def _holds_any(rows: Rows, some: Rows) -> bool:
    """Whether one of ``some`` is among ``rows``; of few, comparing all costs less than sorting."""
    if len(rows) * len(some) <= _COMPARED_PAIRS:
        return bool((rows[:, None] == some).any())
    return bool(np.isin(some, rows).any())


def _trailing(linked: Flags) -> int:
    """How many are true behind the last that is not."""
    return int(linked[::-1].argmin()) if not linked.all() else len(linked)


def _joined(
    rows: Rows, starts: npt.NDArray[np.int64], before: Rows
) -> tuple[npt.NDArray[np.int64], Rows, npt.NDArray[np.int64]]:
    """The runs, with those joined that continue exactly where the one before them stopped."""
    opens = np.ones(len(starts), dtype=np.bool_)
    opens[1:] = before[1:] != rows[starts[1:] - 1]
    starts = starts[opens]
    return starts, before[opens], np.diff(starts, append=len(rows))
