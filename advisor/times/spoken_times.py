"""Times as people say them."""

from __future__ import annotations

import time


def seconds(value: float) -> str:
    """A duration as people say it."""
    if 0 < value < 0.95:
        return f"{max(1, round(1000 * value))} ms"
    if value < 90:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def time_of_day(at: float) -> str:
    """A moment in Unix seconds, by this machine's clock: ``17:05:59``."""
    return time.strftime("%H:%M:%S", time.localtime(at))
