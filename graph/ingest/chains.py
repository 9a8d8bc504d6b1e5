"""Prefix chains: which block follows which, and at what depth."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tables.blocks import UNPLACED
from ..tables.columns import distinct
from ..tables.tables import Tables
from ..types import NO_ROW, Rows

Flags = npt.NDArray[np.bool_]
_COMPARED: Final = 512  # rows that are compared together; chosen
_COMPARED_PAIRS: Final = 1 << 15  # chosen
_MOST_RAISED: Final = 1 << 14  # rows above new links that one call looks at; chosen
_DEEPEST: Final = np.iinfo(np.int32).max


class ChainLinker:
    """Sets ``parent`` and ``depth``; keeps every parent strictly shallower than its child.

    This invariant makes cycles impossible, whatever an engine or an attacker sends: a link that
    would break it is not made, and is counted as ``links_refused``. A row's depth only ever
    decreases, so no link below it needs checking: blocks whose predecessors are unknown start deep
    (``UNPLACED``) and rise once these are reported.
    """

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters

    def extend(self, rows: Rows, new: Flags, before: Rows, counts: npt.NDArray[np.int64]) -> None:
        """Link runs of consecutive stored blocks, each run behind its own predecessor.

        Args:
            rows: int32 ``[n]``, run after run.
            new: bool ``[n]``: whether the row was just created.
            before: int32 ``[runs]``: the row before each run, ``NO_ROW`` at the start of a chain.
            counts: int64 ``[runs]``: blocks in each run, at least one.
        """
        starts = np.cumsum(counts) - counts
        parents = np.empty_like(rows)
        parents[1:] = rows[:-1]
        parents[starts] = before
        starts, before, counts = _joined(rows, starts, before)
        if _holds_any(rows, before):
            moved = self._place_in_order(rows, new, before, starts, counts)
        else:
            within = np.arange(len(rows)) - np.repeat(starts, counts)
            moved = self._place(rows, new, np.repeat(self._depth_after(before), counts) + within)
        self._link(rows, parents, moved)

    def lay(self, rows: Rows, new: Flags, counts: npt.NDArray[np.int64]) -> None:
        """Link whole chains from their start: the ``i``-th row of each has depth ``i``.

        Args:
            rows: int32 ``[n]``, chain after chain.
            new: bool ``[n]``: whether the row was just created.
            counts: int64 ``[chains]``: blocks in each.
        """
        starts = np.cumsum(counts) - counts
        parents = np.empty_like(rows)
        parents[1:] = rows[:-1]
        parents[starts[counts > 0]] = NO_ROW
        moved = self._place(rows, new, np.arange(len(rows)) - np.repeat(starts, counts))
        self._link(rows, parents, moved)

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
        """int32 ``[length]``: the chain that ends at ``row``; empty if its length differs or is
        unknown.

        Blocks stored together have consecutive rows, and are compared together.
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

    def _depth_after(self, before: Rows) -> npt.NDArray[np.int64]:
        """int64 ``[n]``: the depth after each row; 0 after ``NO_ROW``."""
        depth = self._tables.blocks.depth[before].astype(np.int64)
        return np.where(before == NO_ROW, 0, depth + 1)

    def _place(self, rows: Rows, new: Flags, depths: npt.NDArray[np.int64]) -> Flags:
        """Set the depths of new rows and of rows without a known place; returns which changed."""
        depth = self._tables.blocks.depth
        known = depth[rows]
        moved: Flags = new | ((known >= UNPLACED) & (depths < UNPLACED))
        moved &= known != depths
        depth[rows[moved]] = np.minimum(depths[moved], _DEEPEST)
        return moved

    def _place_in_order(
        self,
        rows: Rows,
        new: Flags,
        before: Rows,
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
    ) -> Flags:
        """``_place`` where a run continues another run of the same batch."""
        moved = np.empty(len(rows), dtype=np.bool_)
        for run, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            part = slice(start, start + count)
            base = self._depth_after(before[run : run + 1])
            moved[part] = self._place(rows[part], new[part], base + np.arange(count))
        return moved

    def _link(self, rows: Rows, parents: Rows, moved: Flags) -> None:
        """Give parents to rows that have none."""
        blocks, links = self._tables.blocks, self._tables.links
        if moved.any():
            above = blocks.parent[rows]
            astray = (above != NO_ROW) & (blocks.depth[above] >= blocks.depth[rows])
            if astray.any():  # the reported start of a chain contradicts earlier reports
                self._counters["links_refused"] += int(astray.sum())
                links.cut(distinct(rows[astray]))
        orphan = (blocks.parent[rows] == NO_ROW) & (parents != NO_ROW)
        if not orphan.any():
            return  # all of it was known, as of most chains
        rows, parents = rows[orphan], parents[orphan]
        fits = blocks.depth[parents] < blocks.depth[rows]
        links.link(rows[fits], parents[fits])
        if not fits.all():
            self._raise_all(rows[~fits], parents[~fits])

    def _raise_all(self, rows: Rows, parents: Rows) -> None:
        """Link rows to parents that must become shallower first, in order."""
        blocks, budget = self._tables.blocks, _MOST_RAISED
        for row, parent in zip(rows.tolist(), parents.tolist(), strict=True):
            if blocks.parent[row] != NO_ROW:
                continue  # it stands here twice
            path, can_rise = self._path_to_raise(row, parent, budget)
            budget -= len(path)
            if not can_rise:
                self._counters["links_refused"] += 1
                continue
            above = int(blocks.depth[row]) - 1
            blocks.depth[path] = np.arange(above, above - len(path), -1)
            link = np.array([row, parent], dtype=np.int32)
            self._tables.links.link(link[:1], link[1:])

    def _path_to_raise(self, row: int, parent: int, most: int) -> tuple[Rows, bool]:
        """``parent`` and its ancestors that are too deep for a link to ``row``, and whether they
        can rise.

        They cannot if one of them is ``row`` or has a known place, or if there are more than
        ``most``.
        """
        blocks, path, at = self._tables.blocks, list[int](), parent
        room = int(blocks.depth[row]) - 1
        least = UNPLACED if room >= UNPLACED else 0  # unknown depths stay distinct from known ones
        can_rise = True
        while can_rise and at != NO_ROW and (depth := int(blocks.depth[at])) > room:
            can_rise = at != row and depth >= UNPLACED and room >= least and len(path) < most
            path.append(at)
            at, room = int(blocks.parent[at]), room - 1
        return np.array(path, dtype=np.int32), can_rise


def _holds_any(rows: Rows, some: Rows) -> bool:
    """Whether one of ``some`` is among ``rows``; few are compared pairwise, cheaper than
    sorting."""
    if len(rows) * len(some) <= _COMPARED_PAIRS:
        return bool((rows[:, None] == some).any())
    return bool(np.isin(some, rows).any())


def _trailing(linked: Flags) -> int:
    """How many values at the end are true."""
    return int(linked[::-1].argmin()) if not linked.all() else len(linked)


def _joined(
    rows: Rows, starts: npt.NDArray[np.int64], before: Rows
) -> tuple[npt.NDArray[np.int64], Rows, npt.NDArray[np.int64]]:
    """Join runs that continue exactly where the previous one stopped."""
    opens = np.ones(len(starts), dtype=np.bool_)
    opens[1:] = before[1:] != rows[starts[1:] - 1]
    starts = starts[opens]
    return starts, before[opens], np.diff(starts, append=len(rows))
