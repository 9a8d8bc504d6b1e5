"""Sessions where a trace names none: a request that extends an earlier one's chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from .trace import Ints

_SHARED: Final = -2
_NOBODY: Final = -1


def infer_sessions(chains: Sequence[Sequence[int]], full: Sequence[int], num_blocks: int) -> Ints:
    """int32 ``[requests]``: the session each request continues, or a new one.

    A request continues a session if its chain holds every full block of one of that session's
    turns, the last of them walked by no other session: a system prompt that all share is the end
    of nobody's turn.

    Args:
        chains: Block ids a request, in order of arrival.
        full: Full prompt blocks a request; only they can be extended.
        num_blocks: Distinct block ids.
    """
    owner = [_NOBODY] * num_blocks  # the one session that walked a block, or _SHARED
    tip_of = [_NOBODY] * num_blocks  # the session one of whose turns ended here
    sessions = np.empty(len(chains), dtype=np.int32)
    count = 0
    for request, chain in enumerate(chains):
        session = next(
            (tip_of[b] for b in reversed(chain) if tip_of[b] != _NOBODY and owner[b] == tip_of[b]),
            count,
        )
        count += session == count
        sessions[request] = session
        for block in chain:
            if owner[block] != session:
                owner[block] = session if owner[block] == _NOBODY else _SHARED
        if full[request]:
            tip_of[chain[full[request] - 1]] = session
    return sessions
