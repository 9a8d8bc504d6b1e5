"""Which session rows are reused next: those of the sessions quiet for longest."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import Rows

_BATCHES: Final = 256  # in which a whole table is chosen; chosen
_NONE: Final[Rows] = np.empty(0, dtype=np.int32)


class QuietRows:
    """Chooses rows in batches, since choosing reads every session, and clearing reads every
    block."""

    def __init__(self) -> None:
        self._chosen: list[tuple[int, float]] = []  # and when each was last seen; the next one last

    def take(self, running: Rows, last_seen: npt.NDArray[np.float64]) -> tuple[int, Rows]:
        """The next row to reuse, and the rows that were chosen with it, if a new batch was: it is
        among them.

        A row whose session was heard of after it was chosen is left alone.

        Args:
            running: int32 ``[n]``, requests of each session inside an engine; a running session is
                taken only if all run.
            last_seen: float64 ``[n]``, monotonic seconds.
        """
        while self._chosen:
            row, seen = self._chosen.pop()
            if not running[row] and last_seen[row] == seen:
                return row, _NONE
        quiet = np.where(running > 0, np.inf, last_seen)
        count = max(1, len(quiet) // _BATCHES)
        rows = np.argpartition(quiet, count - 1)[:count]
        rows = rows[np.argsort(quiet[rows], kind="stable")]
        self._chosen = [(int(row), float(last_seen[row])) for row in rows[:0:-1]]
        return int(rows[0]), np.asarray(rows, dtype=np.int32)
