"""Whether a prompt goes on with its session, or asks once more what was asked before."""

from __future__ import annotations

from typing import Final

from .sessions import SessionTable

_GROWS: Final = 2
"""Turns, each longer than the one before, behind which another longer one goes on with its session,
whether or not it has a block more. Of four texts of any lengths, one in 24 rises so. Chosen."""


def goes_on_from(sessions: SessionTable, row: int, engine: int, blocks: int, tokens: int) -> int:
    """Full blocks of the session's last prompt, if this engine served it and the next one is it and
    more; 0 otherwise. Only depth is compared; call it before the turn begins.

    More is a block. Where a turn adds less than one, it is more tokens, if the session's turns
    before were longer each, too: questions about a text have lengths that rise and fall. A corpus
    that is asked again and again does not go on, though each text may look like a session: a prompt
    that comes again is no longer than it was.

    Args:
        blocks: Full blocks of the next prompt.
        tokens: Of the next prompt.
    """
    before = int(sessions.reach[row]) if sessions.turns[row] else 0
    if sessions.engine[row] != engine or not 0 < before <= blocks:
        return 0
    grew = not sessions.running[row] and sessions.longer[row] >= _GROWS
    more = blocks > before or (grew and tokens > sessions.asked[row])
    return before if more else 0
