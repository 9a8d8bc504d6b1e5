"""Intervals by resampling whole texts: arms are compared on the same ones."""

from __future__ import annotations

import math
from itertools import pairwise
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


def pearson(x: Floats, y: Floats) -> tuple[float, float]:
    """Correlation, and the chance of one as strong where there is none (normal approximation)."""
    r = float(np.corrcoef(x, y)[0, 1])
    z = math.atanh(max(-0.999999, min(0.999999, r))) * math.sqrt(len(x) - 3)
    return r, math.erfc(abs(z) / math.sqrt(2.0))


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson."""
    z = 1.959964
    share, spread = right / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return middle - half, middle + half


def falls_over_bins(x: Floats, y: Floats, bins: int = 5) -> bool:
    """Whether the mean of y falls from each fifth of x to the next."""
    parts = np.array_split(y[np.argsort(x, kind="stable")], bins)
    means = [float(part.mean()) for part in parts]
    return all(later < earlier for earlier, later in pairwise(means))


def _draws(texts: int) -> NDArray[np.int64]:
    return np.random.default_rng(_SEED).integers(0, texts, size=(DRAWS, texts))
