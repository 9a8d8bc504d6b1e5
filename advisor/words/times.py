"""Formats durations and times for people."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(value: float) -> str:
    """Format a duration with a fitting unit: ``850 ms``, ``4.2 s``, ``17 min``."""
    if 0 < value < 0.95:
        return f"{max(1, round(1000 * value))} ms"
    if value < 90:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def time_of_day(at: float) -> str:
    """Format Unix seconds in this machine's time zone, as ``17:05:59``."""
    return time.strftime("%H:%M:%S", time.localtime(at))


Unix = Callable[[float], float]  # a time of the graph's clock → Unix seconds


class UnixTime:
    """Converts times of a monotonic clock to Unix seconds, rounded to milliseconds."""

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall

    def __call__(self, moment: float) -> float:
        return round(self._wall() - (self._clock() - moment), 3)

    def now(self) -> float:
        return self._wall()
