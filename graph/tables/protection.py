"""``ProtectionBudget``: how much of a pool is kept whatever the scores are, and its price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..types import MOST_SHARE

_FIRST_SHARE: Final = 1 / 16  # share of a pool kept before its price is known; chosen
_FIRST_BLOCKS: Final = 8  # but at least this many blocks, for small pools; chosen


def first_share(pool_blocks: int) -> float:
    """Return the share of a pool that may be kept before its price is known."""
    return max(_FIRST_SHARE, min(MOST_SHARE, _FIRST_BLOCKS / max(1, pool_blocks)))


@dataclass(frozen=True, slots=True)
class ProtectionBudget:
    """How much of an engine's pool is kept whatever the scores are, and what that costs there.

    The price is in points: hundredths of the requested prompt blocks, which would have been found
    if nothing were kept.
    """

    share: float  # share of the pool that may be kept
    points: float | None = None  # recent price; None: not known yet, or no block is to be kept
    points_ever: float | None = None  # price since the first block was to be kept
    # price of keeping all blocks that should be kept, up to half of the pool; None: all of them are
    # kept, or the price is not known yet
    more_points: float | None = None
