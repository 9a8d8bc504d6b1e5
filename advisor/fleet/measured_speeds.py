"""``MeasuredSpeeds``: how long engines take for a token of a prompt, learned from noisy timings."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

_KEPT: Final = 16  # latest timings of an engine, and of the fleet; chosen
_PRIOR_VARIANCE: Final = 0.5  # of the logarithm of one engine's timings, until it is known; chosen
_PRIOR_TIMINGS: Final = 8.0  # for so many it counts; chosen
_SLOWEST: Final = 4.0  # times the fastest engine's time per token; chosen: machines are alike
_OF_MEDIAN: Final = np.pi / 2  # variance of a median over that of a mean, of normal noise
_NO_MEDIAN: Final = 2  # timings up to which the median is the mean

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class MeasuredSpeeds:
    """The median of an engine's latest timings, drawn towards the mean of all engines.

    Timings count by how far they are from the fleet's level of that time, since load slows all
    engines. One says little: a prompt shared its step with others', or waited for a compiler. An
    engine that is taken to be fast by mistake gets most requests, and one taken to be slow gets too
    few to be timed again. So engines count as alike as far as their medians differ by no more than
    timings of one engine would make them: a model of random effects in logarithms, whose variance
    between engines is estimated by moments (Hedges 1983). None is taken to be slower than
    ``_SLOWEST`` times the fastest.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_KEPT)  # of the fleet, less the engine's effect
        self._timings = np.empty((0, _KEPT))  # logarithms, above the level
        self._medians, self._squares, self._effects = (np.empty(0) for _ in range(3))
        self._counts = np.empty(0, dtype=np.int64)

    @property
    def timed(self) -> Mask:
        """bool ``[engines]``: whether an engine was timed."""
        return self._counts > 0

    def add(self) -> None:
        """Add an engine."""
        self._timings = np.pad(self._timings, ((0, 1), (0, 0)))
        for name in ("_medians", "_squares", "_effects", "_counts"):
            setattr(self, name, np.pad(getattr(self, name), (0, 1)))

    def note(self, engine: int, seconds_per_token: float) -> None:
        """Note a timing of an engine."""
        timing = float(np.log(seconds_per_token))
        level = float(np.median(self._latest)) if self._latest else timing
        self._timings[engine, self._counts[engine] % _KEPT] = timing - level
        self._counts[engine] += 1
        kept = self._timings[engine, : self._counts[engine]]
        self._medians[engine], self._squares[engine] = np.median(kept), kept.var() * len(kept)
        self._latest.append(timing - float(self._effects[engine]))
        self._effects = self._shrunk()

    def seconds(self) -> Floats | None:
        """float64 ``[engines]``: seconds per token of each; those never timed are as the mean.

        None before any was timed.
        """
        if not self._latest:
            return None
        speeds: Floats = np.exp(np.median(self._latest) + self._effects)
        bounded: Floats = np.minimum(speeds, _SLOWEST * speeds.min())
        return bounded

    def _shrunk(self) -> Floats:
        """float64 ``[engines]``: how far each is from the mean."""
        counts, timed = np.minimum(self._counts, _KEPT), self.timed
        medians = self._medians[timed]
        mean = np.average(medians, weights=counts[timed])  # as timings weigh in the level
        freedom = _PRIOR_TIMINGS + float((counts[timed] - 1).sum())
        variance = (_PRIOR_TIMINGS * _PRIOR_VARIANCE + float(self._squares.sum())) / freedom
        by_chance = (
            variance * np.where(counts > _NO_MEDIAN, _OF_MEDIAN, 1.0) / np.maximum(counts, 1)
        )
        spread = medians.var(ddof=1) if len(medians) > 1 else 0.0
        between = max(0.0, float(spread - by_chance[timed].mean()))
        belief = np.where(timed, between / (between + by_chance), 0.0)
        effects: Floats = belief * (self._medians - mean)
        return effects
