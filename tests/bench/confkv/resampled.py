"""Intervals by resampling whole texts: arms are compared on the same ones."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

DRAWS: Final = 2_000
_SEED: Final = 18

Floats = NDArray[np.float64]


def gap_closed(window: Floats, arm: Floats, full: Floats) -> Floats:
    """Share of the way from the window to the full cache, resampled; each [texts], mean nats."""
    index = _draws(len(full))
    lost = window[index].mean(1) - full[index].mean(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        closed = (window[index].mean(1) - arm[index].mean(1)) / lost
    return np.where(lost > 0, closed, np.nan)


def difference(one: Floats, other: Floats) -> Floats:
    """Mean of ``one`` less that of ``other``, resampled in pairs; [DRAWS]."""
    index = _draws(len(one))
    return np.asarray((one - other)[index].mean(1))


def apart(one: Floats, other: Floats) -> bool:
    """Whether ``one`` is greater, and not by chance: 95 of 100 resampled pairs agree."""
    return bool(np.quantile(difference(one, other), 0.05) > 0.0)


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson."""
    z = 1.959964
    share, spread = right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return middle - half, middle + half


def _draws(texts: int) -> NDArray[np.int64]:
    return np.random.default_rng(_SEED).integers(0, texts, size=(DRAWS, texts))
