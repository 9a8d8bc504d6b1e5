"""``FallingOrder``: rows by their scores, sorted only as far as somebody asks."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...graph.ranking.policy import Scores
from ...graph.types import Rows

_PARTS: Final = 16  # in which the order is sorted, one after the other; chosen
_LEAST: Final = 1024  # rows of a part; chosen
_FEW: Final = 64  # rows that are given however few are asked for; chosen
_TIMES: Final = 2  # as many rows as are asked for: some are passed over; chosen


class FallingOrder:
    """Rows from the highest score to the lowest; of equals the one that was given first.

    Args:
        rows: int32 ``[n]``.
        scores: float64 ``[n]``, theirs; no NaN.
    """

    def __init__(self, rows: Rows, scores: Scores) -> None:
        self._rows, self._scores = rows, scores  # not sorted yet
        self._part = max(_LEAST, len(rows) // _PARTS)
        self._sorted = rows[:0]
        self._at = 0  # in ``_sorted``

    @classmethod
    def empty(cls) -> FallingOrder:
        """One without a row."""
        return cls(np.empty(0, dtype=np.int32), np.empty(0))

    def peek(self, count: int) -> Rows:
        """int32: the next rows: about twice ``count`` at most, at least one if any is left."""
        if self._at == len(self._sorted):
            self._sort()
        return self._sorted[self._at : self._at + max(_FEW, _TIMES * count)]

    def skip(self, count: int) -> None:
        """Go on behind the first ``count`` of the next rows."""
        self._at += count

    def _sort(self) -> None:
        """Sort the highest part of what is left."""
        rows, scores = self._rows, self._scores
        if len(rows) > 2 * self._part:
            high = scores >= np.partition(scores, len(scores) - self._part)[-self._part]
            self._rows, self._scores = rows[~high], scores[~high]
            rows, scores = rows[high], scores[high]
        else:
            self._rows, self._scores = rows[:0], scores[:0]
        self._sorted, self._at = rows[np.argsort(-scores, kind="stable")], 0
