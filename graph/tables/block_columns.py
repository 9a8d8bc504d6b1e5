"""The properties of a block, one column each, and of the stored edges at it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..columns.columns import Columns, column
from ..types import DEFAULT_IMPORTANCE, NEVER, NO_ROW, Keys, Rows, SourceLayer
from .identity import NO_SALT

Mask = npt.NDArray[np.bool_]
Times = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint32]

DEFAULT_LAYER: Final = SourceLayer.USER_TURN
UNPLACED: Final = 1 << 20
"""Depths from here on are of blocks of which nobody said how many stand before them, counted from
where their chain is known. Chosen: deeper than chains are, and worth little as a tie of scores."""
FIRST_KNOWN: Final = UNPLACED + (1 << 16)  # room above it for blocks that are told later; chosen


class BlockColumns(Columns):
    """One row per block; its methods are those of ``BlockTable``."""

    alive: Mask = column(np.bool_, True)
    parent: Rows = column(np.int32, NO_ROW)
    depth: Rows = column(np.int32, FIRST_KNOWN)  # blocks before this one in its chain
    layer: npt.NDArray[np.uint8] = column(np.uint8, int(DEFAULT_LAYER))
    flags: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.BlockFlag
    stated: npt.NDArray[np.uint8] = column(np.uint8, 0)  # types.Authority: who stated the layer
    raised_by: Rows = column(np.int32, NO_ROW)  # the session that stated it
    importance: npt.NDArray[np.float32] = column(
        np.float32, float(DEFAULT_IMPORTANCE[DEFAULT_LAYER])
    )
    # In this block: its range is [depth * tokens, (depth + 1) * tokens).
    tokens: npt.NDArray[np.uint16] = column(np.uint16, 0)
    tenant: npt.NDArray[np.int64] = column(np.int64, NO_ROW)
    session: Rows = column(np.int32, NO_ROW)  # the last session that walked it
    created: Times = column(np.float64, 0.0, time=True)
    last_attended: Times = column(np.float64, 0.0, time=True)
    last_hit: Times = column(np.float64, NEVER, time=True)
    hit_count: Counts = column(np.uint32, 0)
    walkers: Counts = column(np.uint32, 0)  # distinct requests that walked the link to this block
    children: Counts = column(np.uint32, 0)  # blocks that it is the parent of
    shared_children: Counts = column(np.uint32, 0)  # of these: walked twice or more
    children_walks: Counts = column(np.uint32, 0)  # the walkers of those, summed
    pinned_until: Times = column(np.float64, NEVER, time=True, rare=True)
    # Somebody said that it will be asked for until then: its copy is brought back.
    wanted_until: Times = column(np.float64, NEVER, time=True, rare=True)
    confidence: npt.NDArray[np.float32] = column(np.float32, 1.0, rare=True)  # 1: never sampled
    attention: npt.NDArray[np.float32] = column(np.float32, 0.0, rare=True)
    identity: Rows = column(np.int32, NO_ROW)  # interned segment name
    chunk: npt.NDArray[np.uint16] = column(np.uint16, 0)  # which block of that segment
    salt: Keys = column(np.uint64, NO_SALT)  # what its model adds to its key


class EdgeSums(Columns):
    """What the stored edges of one type at each block sum up to, so that a score walks none."""

    degree: npt.NDArray[np.uint16] = column(np.uint16, 0)  # a count that reached the top stays
    weight: npt.NDArray[np.float32] = column(np.float32, 0.0)


def known_depth(depth: Rows) -> Rows:
    """int32 ``[n]``: how many blocks stand before each, as far as its chain is known.

    Args:
        depth: int32 ``[n]``, of the column.
    """
    beyond = np.maximum(depth - FIRST_KNOWN, 0)
    return np.where(depth < UNPLACED, depth, beyond).astype(np.int32)
