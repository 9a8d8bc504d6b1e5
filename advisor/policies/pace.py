"""How fast sessions go here, beside those that the prior was learned from."""

from __future__ import annotations

from typing import Final

import numpy as np

from .hazard import Floats

_STRENGTH: Final = 30.0  # pauses that the prior's pace counts for; chosen
_MEMORY: Final = 2000.0  # pauses over which the mean moves on; chosen
_LEAST_S: Final = 0.01


class Pace:
    """The mean logarithm of pauses: one number by which a clock is stretched.

    A fleet that goes fourteen times as fast is the same fleet: ages and pauses times
    ``exp(log_speed)`` are what they would be at the prior's pace.

    Args:
        usual: The mean of ln(pause / s) where the prior was learned.
    """

    def __init__(self, usual: float) -> None:
        self._usual = usual
        self._mean = usual
        self._seen = _STRENGTH

    @property
    def log_speed(self) -> float:
        """What is added to a logarithm of seconds."""
        return self._usual - self._mean

    def note(self, lasted: Floats) -> None:
        """These pauses ended; float64 ``[n]``, seconds."""
        if not len(lasted):
            return
        self._seen = min(self._seen + len(lasted), max(_MEMORY, len(lasted)))
        found = float(np.log(np.maximum(lasted, _LEAST_S)).mean())
        self._mean += (found - self._mean) * len(lasted) / self._seen
