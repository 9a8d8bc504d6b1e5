"""Sums over steps of time: a ring of rows, one column a thing that is counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.int64]
_TOP: Final = np.iinfo(np.uint32).max


class StepSums:
    """Counts of the last ``steps`` steps, ``step_s`` seconds each.

    Args:
        columns: What is counted.
    """

    def __init__(self, columns: Sequence[str], step_s: float, steps: int) -> None:
        self.columns = tuple(columns)
        self.step_s = step_s
        self._steps = steps
        self._sums = np.zeros((0, len(self.columns)), dtype=np.uint32)
        self._step: int | None = None  # the newest
        self._begun = 0  # steps since the first that was counted
        self._open: int | None = None  # the step of what is not in ``_sums`` yet
        self._pending = [0] * len(self.columns)

    @property
    def nbytes(self) -> int:
        return int(self._sums.nbytes)

    def add(self, counts: Sequence[int], now: float) -> None:
        """Count in the step of ``now``; in the oldest that is remembered if that is older still."""
        self._begin(now)
        for place, count in enumerate(counts):
            self._pending[place] += count

    def add_to(self, place: int, count: int, now: float) -> None:
        """The same, in one column by its place."""
        self._begin(now)
        self._pending[place] += count

    def _begin(self, now: float) -> None:
        """Count in the step of ``now`` from here on."""
        step = int(now // self.step_s)
        if step != self._open:
            self._settle()
            self._open = step

    def _settle(self) -> None:
        """Add what was counted since the last time to the step that it is of."""
        step, self._open = self._open, None
        if step is None:
            return
        newest = self._advance(step)
        step = max(step, newest - self._steps + 1)
        self._begun = max(self._begun, newest - step + 1)
        # A few requests may claim as many tokens as a column holds: it stays at its top.
        sums = self._sums[step % self._steps]
        sums[:] = np.minimum(sums + np.array(self._pending, dtype=np.int64), _TOP)
        self._pending = [0] * len(self.columns)

    def last(self, seconds: float, now: float) -> dict[str, int]:
        """Sums over the steps that began within ``seconds`` before ``now``, by column."""
        starts, sums = self.series(now)
        total = sums[np.array(starts) > now - seconds].sum(axis=0) if starts else sums.sum(axis=0)
        return dict(zip(self.columns, total.tolist(), strict=True))

    def series(self, now: float) -> tuple[list[float], Sums]:
        """Return the starts and sums of every remembered step up to now, the oldest first."""
        self._settle()
        if self._step is None:
            return [], np.zeros((0, len(self.columns)), dtype=np.int64)
        newest = max(self._step, int(now // self.step_s))
        count = min(self._begun + newest - self._step, self._steps)
        steps = np.arange(newest - count + 1, newest + 1)
        sums = self._sums[steps % self._steps].astype(np.int64)
        sums[steps > self._step] = 0  # nothing was counted in them yet
        return (steps * self.step_s).tolist(), sums

    def series_by_name(self, now: float) -> tuple[list[float], dict[str, Sums]]:
        """The same, with the sums of each column by its name."""
        starts, sums = self.series(now)
        return starts, dict(zip(self.columns, sums.T, strict=True))

    def merged(self, now: float, most: int) -> tuple[float, list[float], dict[str, Sums]]:
        """Merge the steps of ``series_by_name`` by twos until about ``most`` are left.

        Returns:
            Seconds of a merged step; when each begins; its sums, by column.
        """
        starts, sums = self.series(now)
        many = 1 << (max(1, -(-len(starts) // most)) - 1).bit_length()
        step_s = many * self.step_s
        steps, firsts = np.unique(np.array(starts) // step_s, return_index=True)
        if len(starts):
            sums = np.add.reduceat(sums, firsts, axis=0)
        return step_s, (steps * step_s).tolist(), dict(zip(self.columns, sums.T, strict=True))

    def _advance(self, step: int) -> int:
        """Begin steps up to ``step``, each from zero; returns the newest."""
        if self._step is None:
            self._sums = np.zeros((self._steps, len(self.columns)), dtype=np.uint32)
            self._step, self._begun = step, 1
        fresh = min(step - self._step, self._steps)
        if fresh > 0:
            self._sums[np.arange(step - fresh + 1, step + 1) % self._steps] = 0
            self._begun += step - self._step
            self._step = step
        return self._step
