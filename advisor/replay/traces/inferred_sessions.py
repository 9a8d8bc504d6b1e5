"""Infers sessions if a trace names none: a request continues a session whose chain it extends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ....graph.ingest.lineage import SHARED, continued
from ....graph.types import NO_ROW
from .trace import Ints


def infer_sessions(chains: Sequence[Sequence[int]], full: Sequence[int], num_blocks: int) -> Ints:
    """int32 ``[requests]``: the session that each request continues, or a new one.

    By the rules of the live graph, as far as a trace tells: ``lineage.continued``, and that nothing
    continues a branch that its session left behind. A trace does not tell what runs at the same
    time.

    Args:
        chains: Block ids of each request, in order of arrival.
        full: Full prompt blocks of each request; only they can be extended.
        num_blocks: Distinct block ids.
    """
    owner = np.full(num_blocks, NO_ROW, dtype=np.int32)
    left = np.zeros(num_blocks, dtype=np.bool_)  # behind by its session
    first, reach, turns = np.zeros((3, len(chains)), dtype=np.int32)
    sessions = np.empty(len(chains), dtype=np.int32)
    last: list[npt.NDArray[np.int64]] = []  # blocks of each session's last request
    for request, blocks in enumerate(chains):
        chain = np.asarray(blocks, dtype=np.int64)
        walked, behind = owner[chain], left[chain]
        session = continued(walked, first, reach, turns)
        if session == NO_ROW or behind.any():
            session = len(last)
            last.append(chain[:0])
            first[session] = full[request]
        left[last[session][owner[last[session]] == session]] = True
        left[chain] = False
        last[session], reach[session] = chain, full[request]
        turns[session] += 1
        sessions[request] = session
        own = (walked == NO_ROW) | (walked == session) | behind
        owner[chain] = np.where(own, session, SHARED)
    return sessions
