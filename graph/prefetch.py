"""Which spilled blocks are worth bringing back before anyone asks."""

from __future__ import annotations

from typing import Final

import numpy as np

from .edges import BLOCK_TO_BLOCK
from .scoring import ScoreProfile
from .tables import Tables
from .types import NEVER, EdgeType, Rows, SessionState, Tier

_HORIZON_S: Final = 5.0  # a session expected back within this is as good as here


def prefetch_candidates(
    tables: Tables, profile: ScoreProfile, active: Rows, n: int, now: float
) -> Rows:
    """int32 ``[≤ n]``: rows with a colder copy and no hot one, best first, chains head first.

    Drawn by edges to the ``active`` rows, and by sessions whose expected return is near.
    """
    blocks = tables.blocks
    held = np.bitwise_or.reduce(blocks.tiers[:, : blocks.size], axis=0)
    spilled = ((held & int(Tier.HOT)) == 0) & ((held & int(Tier.WARM | Tier.COLD)) != 0)
    pull = _neighbor_pull(tables, profile, active) + _return_pull(tables, now)
    rows = np.flatnonzero(spilled & (pull > 0)).astype(np.int32)
    order = np.lexsort((blocks.depth[rows], -pull[rows]))
    best: Rows = rows[order[: max(0, n)]]
    return best


def _neighbor_pull(
    tables: Tables, profile: ScoreProfile, active: Rows
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Weighted edges between each block and the active ones."""
    blocks, edges = tables.blocks, tables.edges
    pull = np.zeros(blocks.size)
    if not len(active):
        return pull
    is_active = np.zeros(blocks.size, dtype=np.bool_)
    is_active[active] = True
    for kind in EdgeType:
        weight = profile.edge_types.get(kind, 0.0)
        if kind not in BLOCK_TO_BLOCK or weight <= 0:
            continue
        links = edges.of_kind(kind)
        source, target = edges.source[links], edges.target[links]
        strength = weight * edges.weight[links]
        pull += np.bincount(target, strength * is_active[source], minlength=blocks.size)
        pull += np.bincount(source, strength * is_active[target], minlength=blocks.size)
    return pull


def _return_pull(tables: Tables, now: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One for each block of a session that is expected back soon."""
    sessions, blocks = tables.sessions, tables.blocks
    due = sessions.expected_return[: sessions.size]
    waiting = sessions.state[: sessions.size] == SessionState.WAITING_FOR_TOOL
    soon = np.zeros(sessions.size + 1)
    soon[:-1] = waiting & (due > NEVER) & (due - now <= _HORIZON_S)
    return soon[blocks.session[: blocks.size]]
