"""How many blocks of an engine's pool its live sessions want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.sessions.sessions import SessionTable
from ...graph.tables.block_columns import known_depth
from ...graph.tables.tables import Tables
from ...graph.types import SessionState

Rows = npt.NDArray[np.intp]
Floats = npt.NDArray[np.float64]

LIVE_S: Final = 600.0
"""A session that was silent for longer is not live; chosen: its user turned to something else."""

_FADE_S: Final = 300.0  # over which silence makes a return unlikely (to 1/e); chosen
_OF_A_PAUSE: Final = 2.0  # a tool may take so many times what was expected of it; chosen


@dataclass(frozen=True, slots=True)
class Demand:
    """What live sessions want of one engine's pool, in blocks.

    Attributes:
        live: Sessions that run, or were heard of within ``LIVE_S`` and are not over.
        warm: Those of which half the context or more is cached.
        blocks: Blocks of the warm contexts, each times the probability of a return soon.
        usual: Mean context of a warm session, in blocks; at least 1.
    """

    live: int
    warm: int
    blocks: int
    usual: int


def demand(tables: Tables, engine: int, now: float) -> Demand:
    """The demand now; vectors over the columns of sessions and of the engine's own blocks."""
    sessions = tables.sessions
    live, reached = _is_live(sessions, engine, now), _reached(tables, engine)
    rows = np.flatnonzero((2 * reached >= sessions.reach[: sessions.size]) & (reached > 0) & live)
    context = sessions.reach[rows]
    wanted = float(context @ _chance(sessions, rows, now))
    usual = round(float(context.mean())) if len(rows) else 1
    return Demand(int(np.count_nonzero(live)), len(rows), round(wanted), max(1, usual))


def _is_live(sessions: SessionTable, engine: int, now: float) -> npt.NDArray[np.bool_]:
    size = sessions.size
    live = sessions.last_seen[:size] > now - LIVE_S
    live |= sessions.running[:size] > 0
    live &= sessions.engine[:size] == engine
    live &= sessions.state[:size] != SessionState.ENDED
    return np.asarray(live)


def _reached(tables: Tables, engine: int) -> npt.NDArray[np.int32]:
    """``[sessions]``: how deep into each session's context the pool holds blocks of it.

    What several sessions share counts for the last one that walked it, and is not deep.
    """
    blocks = tables.blocks
    resident = blocks.pick(blocks.resident(engine))
    reached = np.zeros(tables.sessions.size + 1, dtype=np.int32)  # the last stands for NO_ROW
    np.maximum.at(reached, resident.of(blocks.session), known_depth(resident.of(blocks.depth)) + 1)
    return reached[:-1]


def _chance(sessions: SessionTable, rows: Rows, now: float) -> Floats:
    """float64 ``[n]``: of a return soon; 1 while it runs, or a tool may still do so."""
    seen = sessions.last_seen[rows]
    waiting = sessions.state[rows] == SessionState.WAITING_FOR_TOOL
    pause = np.where(waiting, np.maximum(sessions.expected_return[rows] - seen, 0.0), 0.0)
    overdue = np.maximum(0.0, now - seen - _OF_A_PAUSE * pause)
    chance = np.exp(-overdue / _FADE_S)
    chance[sessions.running[rows] > 0] = 1.0
    return np.asarray(chance)
