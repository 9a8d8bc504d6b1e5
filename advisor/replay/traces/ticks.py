"""Arrival times that a file knows only by a coarse clock."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...policies.hazard import Floats

_COARSE_S: Final = 1.0  # ticks at least so long are spread; chosen
_LEAST_TICKS: Final = 16  # fewer tell nothing about a clock; chosen
_REGULAR: Final = 0.95  # share of the gaps between time stamps that are whole ticks; chosen


def spread_over_ticks(at: Floats) -> Floats:
    """Arrivals in the same order, those of one tick of a coarse clock spread evenly over it.

    The Mooncake traces were exported with a clock of 3 s: ten requests share a time stamp. Taken
    literally, this is a burst every 3 s and silence in between, in which no ranking could know a
    request before the next nine. Times finer than a second, or at which requests do not pile up,
    stay as they are.

    Args:
        at: float64 ``[requests]``, seconds, rising.
    """
    stamps, first, count = np.unique(at, return_index=True, return_counts=True)
    if len(stamps) < _LEAST_TICKS or len(at) < 2 * len(stamps):
        return at
    gaps = np.diff(stamps)
    tick = float(np.median(gaps))
    off_beat = np.abs(gaps / tick - np.round(gaps / tick))
    if tick < _COARSE_S or np.mean(off_beat < 0.01) < _REGULAR:
        return at
    room = np.minimum(np.append(gaps, tick), tick)
    place = np.arange(len(at)) - np.repeat(first, count)
    return np.asarray(at + place * np.repeat(room / count, count))
