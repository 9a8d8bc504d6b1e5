"""How this traffic differs from what the prior was learned from: faster, smaller, …"""

from __future__ import annotations

import math
from typing import Final

from .hazard import Floats

_STRENGTH: Final = 30.0  # values that the prior's mean counts for; chosen
_MEMORY: Final = 2000.0  # values over which the mean moves on; chosen


class Drift:
    """The mean of a logarithm, beside the prior's: one factor by which a measure is stretched.

    A fleet that goes fourteen times as fast is the same fleet: ages and pauses times the pauses'
    ``exp(shift)`` are what they would be where the prior was learned. So are tokens by that of
    the prompts.

    Args:
        usual: The mean where the prior was learned.
        slack: How far off it may lie before anything is stretched, and then only what lies beyond:
            what a measure says by itself is lost by stretching.
    """

    def __init__(self, usual: float, slack: float = 0.0) -> None:
        self._usual = usual
        self._slack = slack
        self._mean = usual
        self._seen = _STRENGTH

    @property
    def shift(self) -> float:
        """What is added to a logarithm that was measured here."""
        off = self._usual - self._mean
        return math.copysign(max(0.0, abs(off) - self._slack), off)

    def note(self, logarithms: Floats) -> None:
        """Such values were seen; float64 ``[n]``."""
        if not len(logarithms):
            return
        self._seen = min(self._seen + len(logarithms), max(_MEMORY, len(logarithms)))
        self._mean += (float(logarithms.mean()) - self._mean) * len(logarithms) / self._seen
