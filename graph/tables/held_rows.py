"""``HeldRows``: the rows that one engine holds, found without a look at all others'."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import Rows
from .columns import grown

_PAGE: Final = 64  # rows; as in ``core/held.hpp``


class HeldRows:
    """Rows of which an engine's tier bits say that it holds them.

    The bits are the truth. Pages of rows are noted here as some are marked, and those that have
    none any more are forgotten at the next query: so a query costs what the engine holds, and what
    others hold in the same pages. Between two changes several ask, for a ranking and what goes with
    it: only the first of them looks.
    """

    def __init__(self) -> None:
        self._pages = np.zeros(0, dtype=np.uint8)
        self._found: dict[int, Rows] = {}  # since the last change, by the bits that were asked for

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes + sum(rows.nbytes for rows in self._found.values())

    def changed(self) -> None:
        """Note that the bits of some rows changed that are noted here."""
        self._found.clear()

    def add(self, rows: npt.NDArray[Any], bits: npt.NDArray[np.uint8]) -> None:
        """Note rows that were marked in ``bits``, uint8 ``[capacity]``."""
        self.changed()
        pages = -(-len(bits) // _PAGE)
        if len(self._pages) < pages:
            self._pages = grown(self._pages, pages)
        core.note_held(self._pages, np.asarray(rows, dtype=np.int32))

    def marked(self, bits: npt.NDArray[np.uint8], tiers: int) -> Rows:
        """int32, ascending: the rows that have any of the bits in ``tiers``; read only."""
        found = self._found.get(tiers)
        if found is None:
            room = np.empty(_PAGE * np.count_nonzero(self._pages), dtype=np.int32)
            found = self._found[tiers] = room[: core.held_rows(self._pages, bits, tiers, room)]
            found.flags.writeable = False
        return found
