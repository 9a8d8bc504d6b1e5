"""``BusyMeter``: which share of its time a loop works, and whether that is too much."""

from __future__ import annotations

import math
from typing import Final

_OVER_S: Final = 5.0  # over which the share is a mean; chosen
_TOO_BUSY: Final = 0.7  # from here on a loop is overloaded: bursts no longer fit; chosen
_EASED: Final = 0.4  # … until its share is below this; chosen


class BusyMeter:
    """Follows one loop, turn by turn.

    Args:
        now: Monotonic seconds; the loop begins now.

    Attributes:
        share: Of the last seconds, in [0, 1].
        overloaded: Whether the loop is too busy, or was and has hardly eased since.
        overloads: How often it became so.
    """

    def __init__(self, now: float) -> None:
        self.share = 0.0
        self.overloaded = False
        self.overloads = 0
        self._last = now

    def worked(self, began: float, ended: float) -> None:
        """Note a turn's work; since the turn before the loop waited."""
        span = ended - self._last
        if span <= 0.0:
            return
        self._last = ended
        kept = math.exp(-span / _OVER_S)
        self.share = kept * self.share + (1.0 - kept) * min(1.0, (ended - began) / span)
        if self.overloaded:
            self.overloaded = self.share > _EASED
        elif self.share > _TOO_BUSY:
            self.overloaded = True
            self.overloads += 1
