"""Which session a request continues if no caller names one: inferred from its blocks alone."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..tables.blocks import BlockTable
from ..types import NO_ROW, BlockFlag, Rows

SHARED: Final = -2
"""The owner of a block that several sessions walked: nobody."""

# All chosen, with recorded agents' sessions in sight.
_NEAR_FULL: Final = 0.75  # of the longest prompt: from here on histories are compacted
_SETTLED: Final = 5  # turns from which a session has a history to compact
_TAIL: Final = 1  # blocks at a prompt's end that may differ in the next turn's; Mooncake's do
_SUMMARY: Final = 0.05  # of the history that it stands for, at least; others start with less


def continued(owners: Rows, first_reach: Rows, reach: Rows, turns: Rows) -> int:
    """The session that a prompt continues; ``NO_ROW``: it begins one.

    It continues a session if the deepest block that was seen before was walked by that session
    alone (a system prompt that many share is nobody's), and if it keeps more than half of that
    session's last prompt, or is the summary of it: see ``_compacts``. If it shares a part of that
    session's first prompt alone, it begins a session of its own: two chats with one system prompt
    look like that. A last block that differs shows nothing.

    Args:
        owners: int32 ``[n]``: who walked each block, from the start of its chain; ``NO_ROW``
            where nobody did, ``SHARED`` where several did.
        first_reach: int32 ``[sessions]``: full blocks of each session's first prompt.
        reach: int32 ``[sessions]``: full blocks of each session's last prompt.
        turns: int32 ``[sessions]``: how many each had.
    """
    session, known = deepest(owners)
    if session < 0:
        return NO_ROW
    before = int(reach[session])
    goes_on = known >= before - _TAIL or known > first_reach[session]
    if 2 * known > before and goes_on:
        return session
    settled = turns[session] >= _SETTLED
    compacts = settled and _compacts(known, len(owners), before, int(reach.max()))
    return session if compacts else NO_ROW


def deepest(owners: Rows) -> tuple[int, int]:
    """Who walked the deepest block that was seen before, ``NO_ROW`` for nobody and ``SHARED`` for
    several; and how many blocks were seen before. ``owners``: see ``continued``."""
    unseen = np.flatnonzero(owners == NO_ROW)
    known = int(unseen[0]) if len(unseen) else len(owners)
    return int(owners[known - 1]) if known else NO_ROW, known


def _compacts(known: int, blocks: int, before: int, longest: int) -> bool:
    """Whether a prompt that keeps little of a history is a summary of it.

    That is so if the history was nearly full. A prompt that begins beside a session, with its
    system prompt, is no summary: it is too short.

    Args:
        known: Blocks that it keeps.
        blocks: Blocks of the prompt.
        before: Blocks of the history.
        longest: Blocks of the longest prompt of all sessions.
    """
    summarised = before >= _NEAR_FULL * longest and 2 * blocks <= before
    return summarised and blocks - known >= _SUMMARY * before


def owners(blocks: BlockTable, rows: Rows) -> Rows:
    """int32 ``[len(rows)]``: the sessions that alone walked each block row; see ``continued``."""
    shared = blocks.flagged(rows, BlockFlag.SHARED)
    return np.where(shared, np.int32(SHARED), blocks.session[rows])
