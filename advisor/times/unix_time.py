"""``UnixTime``: turns times of a sidecar's own clock into those that people and tools know."""

from __future__ import annotations

import time
from collections.abc import Callable

Unix = Callable[[float], float]
"""Turns a time of the graph's clock into Unix seconds."""


class UnixTime:
    """Called with a time of the clock, it gives Unix seconds, to the millisecond.

    Args:
        clock: Monotonic seconds.
        wall: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall

    def __call__(self, moment: float) -> float:
        return round(self._wall() - (self._clock() - moment), 3)

    def now(self) -> float:
        """Unix seconds, now."""
        return self._wall()
