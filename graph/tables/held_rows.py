"""``HeldRows``: the rows that one engine holds, found without a look at all others'."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import Rows

_MOST_ADDED: Final = 1 << 16  # rows that are noted before they are sorted in; chosen
_STALE_PARTS: Final = 4  # a list of which so large a part may be stale is looked through; chosen
_ANY: Final = 0xFF
_NONE: Final[Rows] = np.empty(0, dtype=np.int32)


class HeldRows:
    """Rows of which an engine's tier bits say that it holds them.

    The bits are the truth. Rows are noted here as they are marked, and those that were unmarked
    since are left out when somebody asks: so both cost nothing but what changed.
    """

    def __init__(self) -> None:
        self._rows = _NONE  # ascending, each once
        self._added: list[Rows] = []
        self._count = 0
        self._stale = 0  # rows that were added since all bits were looked at

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + 4 * self._count

    def add(self, rows: npt.NDArray[Any], bits: npt.NDArray[np.uint8]) -> None:
        """Note rows that were marked in ``bits``, uint8 ``[capacity]``."""
        rows = np.array(rows, dtype=np.int32, ndmin=1)  # a copy: it may be a part of many others'
        self._added.append(rows)
        self._count += len(rows)
        if self._count > _MOST_ADDED:
            self._sort_in(bits)

    def marked(self, bits: npt.NDArray[np.uint8], tiers: int) -> Rows:
        """int32, ascending: the rows that have any of the bits in ``tiers``; to be read only."""
        self._sort_in(bits)
        own = bits[self._rows]
        if not own.all():
            held = own != 0
            self._rows, own = self._rows[held], own[held]
        self._stale = 0
        asked = (own & tiers) != 0
        return self._rows if asked.all() else self._rows[asked]

    def candidates(self, bits: npt.NDArray[np.uint8]) -> Rows:
        """int32, ascending: the rows that have a bit, and some that had one lately: for whoever
        looks at the bits anyhow, without a look at all of them here."""
        if self._stale + self._count > len(self._rows) // _STALE_PARTS:
            return self.marked(bits, _ANY)
        self._sort_in(bits)
        return self._rows

    def _sort_in(self, bits: npt.NDArray[np.uint8]) -> None:
        """Put the added rows in their places."""
        if not self._added:
            return
        merged = core.merge(self._rows, np.concatenate(self._added), bits)
        self._rows = np.frombuffer(merged, dtype=np.int32)
        self._stale += self._count  # as much may have left
        self._added, self._count = [], 0
