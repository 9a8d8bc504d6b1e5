"""Row numbers of a table: handed out, given back, reused."""

from __future__ import annotations

import numpy as np

from ..types import NO_ROW, Rows


class RowPool:
    """Hands out row numbers; those that were given back first.

    Attributes:
        size: Rows below this were handed out at some time.
    """

    def __init__(self) -> None:
        self.size = 0
        self._free: Rows = np.empty(0, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        return self._free.nbytes

    def take(self, count: int) -> Rows:
        """int32 ``[count]``: unused rows; the table makes room for ``size`` of them."""
        reused, self._free = self._free[:count], self._free[count:]
        fresh = np.arange(self.size, self.size + count - len(reused), dtype=np.int32)
        self.size += len(fresh)
        return np.concatenate([reused, fresh], dtype=np.int32)

    def give_back(self, rows: Rows) -> None:
        """Take these rows out of use."""
        self._free = np.concatenate([self._free, rows])

    def restore(self, size: int, free: Rows) -> None:
        """Take the state of a pool that handed out ``size`` rows, of which ``free`` came back."""
        self.size, self._free = size, free


def distinct(rows: Rows) -> Rows:
    """Rows in ascending order, each once, without ``NO_ROW``."""
    rows = np.sort(rows)
    return np.asarray(rows[np.diff(rows, prepend=NO_ROW) != 0])
