"""Who ranks an engine's blocks, and how the policy does beside LRU: in words."""

from __future__ import annotations

from typing import Final

from ...graph.ranking.formulas import LruPolicy

LATELY: Final = "over the last requests"


def ranker(ranked_by: str) -> str:
    """Who ranks, as sentences name it.

    Args:
        ranked_by: The policy's name, or ``lru``.
    """
    return "LRU" if ranked_by == LruPolicy.name else ranked_by


def beside_lru(ahead: float) -> str:
    """How a policy does beside LRU, after "it is".

    Args:
        ahead: Blocks that it found more than LRU; negative if LRU found more.
    """
    blocks = round(abs(ahead))
    if blocks == 0:
        return "level with LRU"
    count = "1 block" if blocks == 1 else f"{blocks:,} blocks"
    return f"{count} {'ahead of' if ahead > 0 else 'behind'} LRU"


def beside_lru_lately(ahead: float) -> str:
    """The same, with the time that it is true of."""
    return f"{beside_lru(ahead)} {LATELY}"
