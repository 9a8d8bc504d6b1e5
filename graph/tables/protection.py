"""``ProtectionBudget``: how much of a pool is kept whatever scores say; its price is measured by
``advisor/policies/protection_price.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..types import MOST_SHARE

_FIRST_SHARE: Final = 1 / 16  # of a pool, that is kept before its price is known; chosen
_FIRST_BLOCKS: Final = 8  # … but at least this many, for small pools; chosen


def first_share(pool_blocks: int) -> float:
    """The share of a pool that may be kept whatever scores say, before its price is known."""
    return max(_FIRST_SHARE, min(MOST_SHARE, _FIRST_BLOCKS / max(1, pool_blocks)))


@dataclass(frozen=True, slots=True)
class ProtectionBudget:
    """How much of an engine's pool is kept whatever scores say, and what that costs there.

    A price is in points: hundredths of the prompt blocks that were asked for, which would have been
    found if nothing were kept.

    Attributes:
        share: Of the pool.
        points: What keeping costs lately; None: it is not known yet, or nothing is named.
        points_ever: The same since the first block was named.
        more_points: What it would cost to keep all that is named, up to half of the pool; None:
            all of it is kept, or nobody knows yet.
    """

    share: float
    points: float | None = None
    points_ever: float | None = None
    more_points: float | None = None
