"""How much of some chains an engine still holds."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tables.tables import Tables
from ..types import NO_ROW, Rows, Tier

EngineColumns = npt.NDArray[np.int8]

_MOST_STEPS: Final = 2048
"""Blocks that are looked at from a chain's end on; a chain that lost more counts as lost. Chosen:
it bounds what a question costs; a session that lost so much is computed again wherever it goes."""


class HeldChains(NamedTuple):
    """int32 ``[chains]`` each, in blocks.

    Attributes:
        length: Of the whole chain; 0: nobody knows it.
        pool: How many of its first blocks are in the engine's pool.
        copied: How many are there or in its tiers below.
    """

    length: Rows
    pool: Rows
    copied: Rows


def held_chains(tables: Tables, tips: Rows, engines: EngineColumns) -> HeldChains:
    """What engines hold of the chains that end at some blocks.

    Chains are evicted from their tail, so that all before the last block that is there counts.

    Args:
        tips: int32 ``[chains]``, block rows; ``NO_ROW``: no chain.
        engines: int8 ``[chains]``, the residency column of each one's engine; below 0: none.
    """
    known = (tips != NO_ROW) & (engines >= 0)
    tips = np.where(known, tips, NO_ROW).astype(np.int32)
    pool = _reached(tables, tips, engines, int(Tier.HOT))
    copied = _reached(tables, tips, engines, int(Tier.HOT | Tier.WARM | Tier.COLD))
    length = np.where(known, tables.blocks.depth[tips] + 1, 0).astype(np.int32)
    return HeldChains(length, pool, copied)


def _reached(tables: Tables, tips: Rows, engines: EngineColumns, tiers: int) -> Rows:
    """Blocks up to the last one of each chain that is in any of these tiers."""
    blocks, at = tables.blocks, tips.copy()
    open_ = np.flatnonzero(at != NO_ROW)
    for _ in range(_MOST_STEPS):
        missing = (blocks.tiers[engines[open_], at[open_]] & tiers) == 0
        open_ = open_[missing]
        at[open_] = blocks.parent[at[open_]]
        open_ = open_[at[open_] != NO_ROW]
        if not len(open_):
            break
    at[open_] = NO_ROW
    return np.where(at != NO_ROW, blocks.depth[at] + 1, 0).astype(np.int32)
