"""Durations in a byte, and times in four: what a log record can afford."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

_STEPS: Final = 12.0  # per doubling: 6 % apart; chosen
_UNIT_S: Final = 0.1  # shorter durations are alike; 255 steps reach to 2.9 days; chosen
_TICK_S: Final = 0.01  # of a time; 2**32 of them are 497 days; chosen

Bytes = npt.NDArray[np.uint8]


def as_byte(seconds: npt.NDArray[np.float64]) -> Bytes:
    """uint8: durations on a logarithmic scale, 1 for none at all; see ``seconds_of``."""
    steps = 1 + _STEPS * np.log2(1.0 + np.maximum(seconds, 0.0) / _UNIT_S)
    found: Bytes = np.minimum(np.rint(steps), 255).astype(np.uint8)
    return found


def seconds_of(byte: int) -> float | None:
    """What ``as_byte`` kept, to about 3 %; None for 0, which it never gives."""
    return None if not byte else float(_UNIT_S * (2 ** ((int(byte) - 1) / _STEPS) - 1))


class Origin:
    """The moment from which a log counts: the first that it hears of."""

    def __init__(self) -> None:
        self._first: float | None = None

    def ticks(self, now: float) -> int:
        """Hundredths of a second since then."""
        if self._first is None:
            self._first = now
        return int((now - self._first) / _TICK_S) & 0xFFFFFFFF

    def time(self, ticks: Any) -> float:
        """The time of so many ticks, in the clock's seconds."""
        return (self._first or 0.0) + float(ticks) * _TICK_S

    def times(self, ticks: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
        """float64 ``[n]``: ``time`` of each."""
        return np.asarray((self._first or 0.0) + self.seconds(ticks))

    @staticmethod
    def seconds(ticks: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """float64 ``[n]``: how long so many ticks take."""
        return np.asarray(ticks.astype(np.float64) * _TICK_S)
