"""Admission to the colder tiers: which blocks are worth a copy before the engine loses them."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..sessions.sessions import SessionTable
from ..tables.tables import Tables
from ..types import NO_ROW, BlockFlag, Keys, Rows, SessionState, Tier

Mask = npt.NDArray[np.bool_]
Outlooks = npt.NDArray[np.uint8]

COPIES: Final = int(Tier.WARM | Tier.COLD)
_UNLIKELY, _OVER = 1, 2
# A session whose return is less probable is not worth copies of blocks that were never hit. Both
# chosen: recorded agents who say nothing find more with .1 than with .5 in the replay lab.
_LIKELY: Final = 0.1
_RETURN_MEMORY_S: Final = 300.0  # seconds of silence over which a return becomes unlikely; chosen


def worth_spilling(tables: Tables, rows: Rows, now: float) -> Mask:
    """bool ``[len(rows)]``: whether these blocks are likely to be asked for again.

    A block of which nothing is known is worth a copy: where the graph knows nothing, an engine does
    what it would do without it.
    """
    superseded, over, unlikely = not_worth(tables, rows, now).values()
    superseded |= over
    superseded |= unlikely
    return np.invert(superseded, out=superseded)


def not_worth(tables: Tables, rows: Rows, now: float) -> dict[str, Mask]:
    """Reasons against a copy, each with a bool ``[len(rows)]`` that says where it applies.

    A block that several sessions share outlives any of them. A block that was never hit is kept for
    a session that runs, waits for a tool or otherwise probably returns: its last output is part of
    its next prompt.
    """
    blocks = tables.blocks
    flags = np.take(blocks.flags, rows)
    session = np.take(blocks.session, rows)
    outlook = _outlooks(tables, session, now)
    outlook *= (flags & int(BlockFlag.SHARED)) == 0
    never_hit = np.take(blocks.hit_count, rows) == 0
    return {
        "superseded": (flags & int(BlockFlag.SUPERSEDED)) != 0,
        "session_over": outlook == _OVER,
        "not_likely_to_return": (outlook == _UNLIKELY) & never_hit,
    }


def without_copy(tables: Tables, engine: str, keys: Keys) -> Keys:
    """Those of an engine's blocks ``keys`` that have no copy, as far as was heard."""
    column = tables.engines.get(engine)
    if column is None:
        return keys[:0]
    rows = tables.blocks.find(keys, tables.salt(column))
    lacking: Keys = keys[(tables.blocks.tiers[column, rows] & COPIES) == 0]
    return lacking


def _outlooks(tables: Tables, wanted: Rows, now: float) -> Outlooks:
    """uint8 ``[len(wanted)]``: what is expected of these sessions; 0: a return.

    Nothing is known of blocks that no session walked (NO_ROW). Of few, only they are looked at: an
    eviction asks, too.
    """
    sessions = tables.sessions
    if 4 * len(wanted) < sessions.size:
        rows, place = np.unique(wanted, return_inverse=True)
        found = _expected(sessions, rows, now)
        found[rows == NO_ROW] = 0
        return np.asarray(found[place])
    rows = sessions.among(wanted)
    outlooks = np.zeros(sessions.size + 1, dtype=np.uint8)  # the last one stands for NO_ROW
    outlooks[rows] = _expected(sessions, rows, now)
    return np.take(outlooks, wanted, mode="wrap")


def _expected(sessions: SessionTable, rows: Rows, now: float) -> Outlooks:
    """uint8 ``[len(rows)]``: what is expected of each."""
    unlikely = sessions.credit(now, _RETURN_MEMORY_S, rows) < _LIKELY
    unlikely &= sessions.turns[rows] > 0  # of one that never began, as little
    outlooks = unlikely * np.uint8(_UNLIKELY)
    outlooks[sessions.state[rows] == SessionState.ENDED] = _OVER
    return np.asarray(outlooks)
