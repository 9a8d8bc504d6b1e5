"""How much of some chains an engine still holds."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..tables.block_columns import known_depth
from ..tables.tables import Tables
from ..types import NO_ROW, Rows, Tier

EngineColumns = npt.NDArray[np.int8]
Mask = npt.NDArray[np.bool_]

_WINDOW: Final = 64  # rows that are looked at together; chosen
_MOST_WINDOWS: Final = 256
"""Of a chain, from its end on; of one that lost more, nothing is said. Chosen: it bounds what a
question costs, and blocks that came together stand in consecutive rows."""


class HeldChains(NamedTuple):
    """int32 ``[chains]`` each, in blocks.

    Attributes:
        length: Of the whole chain; 0: nobody knows it, or what is held of it.
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
    copied, given_up = _last_held(tables, tips, engines, int(Tier.HOT | Tier.WARM | Tier.COLD))
    pool, given_up_later = _last_held(tables, copied, engines, int(Tier.HOT))
    known &= ~(given_up | given_up_later)
    depth = tables.blocks.depth
    return HeldChains(*(
        np.where(known & (rows != NO_ROW), known_depth(depth[rows]) + 1, 0).astype(np.int32)
        for rows in (tips, pool, copied)
    ))  # fmt: skip


def shared_chains(tables: Tables, tips: Rows) -> Rows:
    """int32 ``[chains]``: how many of the first blocks of each are in a store that engines share,
    by what any engine told; 0 of a chain that is too long.

    Args:
        tips: As of ``held_chains``.
    """
    rows, given_up = _last_held(tables, tips, None, int(Tier.POOL))
    depth = known_depth(tables.blocks.depth[rows])
    return np.where(~given_up & (rows != NO_ROW), depth + 1, 0).astype(np.int32)


def _last_held(
    tables: Tables, tips: Rows, engines: EngineColumns | None, tiers: int
) -> tuple[Rows, Mask]:
    """The last block of each chain that is in any of these tiers, ``NO_ROW`` where none is; and
    which chains were given up.

    Args:
        engines: As of ``held_chains``; None: in a tier of any engine.
    """
    blocks, at = tables.blocks, tips.copy()
    open_ = np.flatnonzero(at != NO_ROW)
    for _ in range(_MOST_WINDOWS):
        if not len(open_):
            break
        rows = np.maximum(at[open_, None] - np.arange(_WINDOW, dtype=np.int32), 0)
        parents = blocks.parent[rows]
        linked = np.logical_and.accumulate(parents[:, :-1] == rows[:, 1:], axis=1)
        last = np.count_nonzero(linked, axis=1)  # place of the last that belongs to the chain
        there = (
            np.bitwise_or.reduce(blocks.tiers[:, rows], axis=0)
            if engines is None
            else blocks.tiers[engines[open_, None], rows]
        )
        held = (there & tiers) != 0
        first = held.argmax(axis=1)
        each = np.arange(len(open_))
        found = held[each, first] & (first <= last)
        at[open_] = np.where(found, rows[each, first], parents[each, last])
        open_ = open_[~found & (at[open_] != NO_ROW)]
    given_up = np.zeros(len(at), dtype=np.bool_)
    given_up[open_] = True
    return at, given_up
