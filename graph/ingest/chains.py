"""Prefix chains: which block follows which, and at what depth."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..tables.tables import Tables
from ..types import NO_ROW, Rows

Flags = npt.NDArray[np.bool_]
_MOST_RAISED: Final = 1 << 14  # rows above new links that one call visits; chosen


class ChainLinker:
    """Sets ``parent`` and ``depth``; keeps every parent strictly shallower than its child.

    This makes cycles impossible, whatever an engine or an attacker sends: a link that would break
    it is not made, and is counted as ``links_refused``. A row's depth only ever decreases, so links
    below it need no check: blocks whose predecessors are unknown start deep (``UNPLACED``) and move
    up once these are reported.
    """

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters

    def extend(self, rows: Rows, new: Flags, follows: bytes, counts: npt.NDArray[np.int64]) -> None:
        """Link runs of consecutive stored blocks, each after its own predecessor. ``rows``, int32
        ``[n]``, has ``counts[i]`` rows of run ``i``, some of them ``new``, followed by the
        predecessors of the runs that have one according to ``follows``, bool ``[runs]``.
        """
        self._told(core.extend(self._tables.blocks, rows, new, follows, counts))

    def lay(self, rows: Rows, new: Flags | None, counts: list[int], now: float) -> None:
        """Link whole chains of ``counts[i]`` blocks, int32 ``[n]`` rows of which some are ``new``
        (None: none is), from their start, and note that they were read now. The ``i``-th row of
        each chain has depth ``i``.
        """
        self._told(core.lay(self._tables.blocks, rows, new, counts, now))

    def from_root(self, row: int, length: int) -> Rows:
        """Return the chain that ends at ``row``, int32 ``[length]``; empty if its length differs or
        is unknown.
        """
        if row == NO_ROW:
            return np.empty(0, dtype=np.int32)
        return np.frombuffer(core.chain(self._tables.blocks, row, length), dtype=np.int32)

    def _told(self, unlinked: tuple[int, bytes, bytes] | None) -> None:
        """See to what could not be linked: the reported start of a chain contradicts earlier
        reports, or parents must become shallower first.
        """
        if unlinked is not None:
            cut, rows, parents = unlinked
            self._counters["links_refused"] += cut
            self._raise_all(np.frombuffer(rows, np.int32), np.frombuffer(parents, np.int32))

    def _raise_all(self, rows: Rows, parents: Rows) -> None:
        """Link rows to parents that must become shallower first, in order."""
        blocks, budget = self._tables.blocks, _MOST_RAISED
        for row, parent in zip(rows.tolist(), parents.tolist(), strict=True):
            if blocks.parent[row] != NO_ROW:
                continue  # it stands here twice
            looked, raised = core.to_raise(blocks, row, parent, budget)
            budget -= looked
            if raised is None:
                self._counters["links_refused"] += 1
                continue
            path = np.frombuffer(raised, dtype=np.int32)
            above = int(blocks.depth[row]) - 1
            blocks.depth[path] = np.arange(above, above - len(path), -1)
            link = np.array([row, parent], dtype=np.int32)
            self._tables.links.link(link[:1], link[1:])
