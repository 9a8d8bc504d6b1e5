"""Room that is kept for sessions with several turns: up to so many blocks of each pool."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Selection
from ..types import NO_ROW, BlockFlag, SessionState
from .view import View

Mask = npt.NDArray[np.bool_]

_CHANCE: Final = 0.05
"""Of a return, below which a session holds no room any more. Chosen: with the chances that
conversations teach, a session has it for ten minutes after its second turn."""


def is_reserved(view: View, picked: Selection) -> Mask:
    """bool ``[len(picked)]``: whether the block's session has room reserved in the view's engine.

    Sessions that came back before have, those that were heard of last first, as long as the blocks
    of their last prompts together stay within ``Rules.reserved``. Ended ones have none, nor do
    those that have outlived their chance of another return, nor branches that were left behind.
    """
    view = _of_an_engine(view, picked)
    room = _room(view)
    if room <= 0:
        return np.zeros(len(picked), dtype=np.bool_)
    held = np.append(_sessions_with_room(view, room), False)  # the last one stands for NO_ROW
    left = (picked.of(view.blocks.flags) & int(BlockFlag.SUPERSEDED)) != 0
    return np.asarray(np.take(held, picked.of(view.blocks.session), mode="wrap") & ~left)


def _of_an_engine(view: View, picked: Selection) -> View:
    """The view itself; for a question about a block and no engine, of its session's engine."""
    session = int(picked.of(view.blocks.session)[0]) if len(picked) else NO_ROW
    if view.engine != NO_ROW or session == NO_ROW:
        return view
    return view.of(int(view.sessions.engine[session]))


def _room(view: View) -> float:
    """Blocks that may be reserved: below 1, ``Rules.reserved`` is a share of the pool."""
    reserved = view.rules.reserved
    return reserved if reserved >= 1 else reserved * view.tables.pool_blocks.get(view.engine, 0)


def _sessions_with_room(view: View, room: float) -> Mask:
    """bool ``[sessions]``, those whose last contexts fit ``room`` blocks together."""
    sessions = view.sessions
    size = sessions.size
    rows = np.flatnonzero(
        (sessions.engine[:size] == view.engine)
        & (sessions.turns[:size] > 1)
        & (sessions.state[:size] != SessionState.ENDED)
    ).astype(np.int32)
    rows = rows[sessions.credit(view.now, view.rules.session_memory_s, rows) >= _CHANCE]
    rows = rows[np.argsort(-sessions.last_seen[rows], kind="stable")]
    held = np.zeros(size, dtype=np.bool_)
    held[rows[np.cumsum(sessions.reach[rows]) <= room]] = True
    return held
