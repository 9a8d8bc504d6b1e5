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

    A request continues a session if the deepest block that it shares with earlier ones was walked
    by that session alone (a system prompt that all share is nobody's), and if it keeps more than
    half of the full blocks of that session's last turn: histories are edited and cut short.

    Args:
        chains: Block ids a request, in order of arrival.
        full: Full prompt blocks a request; only they can be extended.
        num_blocks: Distinct block ids.
    """
    owner = [_NOBODY] * num_blocks  # the one session that walked a block, or _SHARED
    last_full: list[int] = []  # full blocks of each session's last turn
    sessions = np.empty(len(chains), dtype=np.int32)
    for request, chain in enumerate(chains):
        known = next((i for i, b in enumerate(chain) if owner[b] == _NOBODY), len(chain))
        session = owner[chain[known - 1]] if known else _NOBODY
        if session < 0 or 2 * known <= last_full[session]:
            session = len(last_full)
            last_full.append(0)
        last_full[session] = full[request]
        sessions[request] = session
        for block in chain:
            if owner[block] != session:
                owner[block] = session if owner[block] == _NOBODY else _SHARED
    return sessions
