"""``HeldRows``: the rows that one engine holds, found without scanning all rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import Rows
from .columns import grown

_PAGE: Final = 64  # rows; as in ``core/graph/held.hpp``


class HeldRows:
    """The rows that an engine holds, according to its tier bits.

    The tier bits are authoritative. Pages of rows are noted here when rows in them are marked, and
    forgotten at the next query once they contain no marked row. So a query costs what the engine
    holds, plus what others hold in the same pages. Several queries may follow between two changes,
    for one ranking; only the first of them scans.
    """

    def __init__(self) -> None:
        self._pages = np.zeros(0, dtype=np.uint8)
        self._found: dict[int, Rows] = {}  # since the last change, by the bits that were asked for

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes + sum(rows.nbytes for rows in self._found.values())

    def changed(self) -> None:
        """Note that the tier bits of some noted rows changed."""
        self._found.clear()

    def add(self, rows: npt.NDArray[Any], bits: npt.NDArray[np.uint8]) -> None:
        """Note rows that were marked in ``bits``, uint8 ``[capacity]``."""
        self.changed()
        pages = -(-len(bits) // _PAGE)
        if len(self._pages) < pages:
            self._pages = grown(self._pages, pages)
        core.note_held(self._pages, np.asarray(rows, dtype=np.int32))

    def marked(self, bits: npt.NDArray[np.uint8], tiers: int) -> Rows:
        """Return the rows that have any of the bits in ``tiers``, int32, ascending; read only."""
        found = self._found.get(tiers)
        if found is None:
            room = np.empty(_PAGE * np.count_nonzero(self._pages), dtype=np.int32)
            found = self._found[tiers] = room[: core.held_rows(self._pages, bits, tiers, room)]
            found.flags.writeable = False
        return found
