"""How this traffic differs from the traffic that the prior was learned from: in pace and in
size."""

from __future__ import annotations

import math
from typing import Final

from .hazard import Floats

_STRENGTH: Final = 30.0  # values that the prior's mean counts for; chosen
_MEMORY: Final = 2000.0  # values over which the mean moves on; chosen


class Drift:
    """Difference of a mean logarithm from the prior's: one factor by which a measure is scaled.

    A fleet that goes fourteen times as fast looks the same to the model: ages and pauses are
    multiplied by the ``exp(shift)`` of pauses, and numbers of tokens by that of prompts.

    Args:
        usual: The mean where the prior was learned.
        slack: Differences up to this are not scaled away, and of larger ones only what exceeds it:
            scaling removes what the measure itself would tell.
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
        """Take in new values; float64 ``[n]``."""
        if not len(logarithms):
            return
        self._seen = min(self._seen + len(logarithms), max(_MEMORY, len(logarithms)))
        self._mean += (float(logarithms.mean()) - self._mean) * len(logarithms) / self._seen
