"""``MeasuredSpeeds``: how long engines take for a token of a prompt, learned from noisy timings."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_NEWEST: Final = 0.1  # weight of the newest timing in the fleet's level; chosen
_KEPT: Final = 16  # timings of an engine; chosen: their median moves once half of them changed
_SPREAD: Final = 0.5  # variance of the logarithm of timings of one engine until it is known; chosen
_BELIEF: Final = 8.0  # timings that it counts for; chosen
_SLOWEST: Final = 4.0  # times the fastest engine's time per token; chosen: machines are alike

Floats = npt.NDArray[np.float64]


class MeasuredSpeeds:
    """The median of an engine's latest timings, drawn towards the mean of all engines.

    Timings count by how far they are from the fleet's level of that time, since load slows all
    engines. One says little: a prompt shared its step with others', or waited for a compiler. An
    engine that is taken to be fast by mistake gets most requests, and one taken to be slow gets too
    few to be timed again. So engines count as alike as far as their medians differ by no more than
    timings of one engine would make them (a model of random effects, in logarithms), and none is
    taken to be slower than ``_SLOWEST`` times the fastest.
    """

    def __init__(self) -> None:
        self._level: float | None = None  # of timings, a logarithm
        self._timings = np.empty((0, _KEPT))  # logarithms, above the level
        self._medians, self._spreads = np.empty(0), np.empty(0)
        self._counts = np.empty(0, dtype=np.int64)

    def note(self, engine: int, seconds_per_token: float, engines: int) -> Floats:
        """Note a timing of one of so many engines.

        Returns:
            float64 ``[engines]``: seconds per token of each; those never timed are as the mean.
        """
        if (more := engines - len(self._counts)) > 0:
            self._timings = np.pad(self._timings, ((0, more), (0, 0)))
            self._medians, self._spreads, self._counts = (
                np.pad(each, (0, more)) for each in (self._medians, self._spreads, self._counts)
            )
        timing = float(np.log(seconds_per_token))
        level = timing if self._level is None else self._level
        self._timings[engine, self._counts[engine] % _KEPT] = timing - level
        self._level = level + _NEWEST * (timing - level)
        self._counts[engine] += 1
        kept = self._timings[engine, : self._counts[engine]]
        self._medians[engine], self._spreads[engine] = np.median(kept), kept.var() * len(kept)
        return self._speeds(self._level)

    def _speeds(self, level: float) -> Floats:
        counts = np.minimum(self._counts, _KEPT)
        timed = counts > 0
        medians, mean = self._medians[timed], self._medians[timed].mean()
        freedom = _BELIEF + float((counts[timed] - 1).sum())
        spread = (_BELIEF * _SPREAD + float(self._spreads.sum())) / freedom
        by_chance = spread / np.maximum(counts, 1)
        apart = max(0.0, medians.var(ddof=min(1, len(medians) - 1)) - by_chance[timed].mean())
        own = np.where(timed, apart / (apart + by_chance), 0.0)
        speeds: Floats = np.exp(level + own * (self._medians - mean))
        return np.minimum(speeds, _SLOWEST * speeds.min())
