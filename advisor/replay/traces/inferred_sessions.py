"""Sessions where a trace names none: a request that extends an earlier one's chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....graph.ingest.lineage import SHARED, continued
from ....graph.types import NO_ROW
from .trace import Ints


def infer_sessions(chains: Sequence[Sequence[int]], full: Sequence[int], num_blocks: int) -> Ints:
    """int32 ``[requests]``: the session each request continues, or a new one.

    By the rule of the live graph, ``lineage.continued``, of which a trace can tell all but what
    runs at the same time.

    Args:
        chains: Block ids a request, in order of arrival.
        full: Full prompt blocks a request; only they can be extended.
        num_blocks: Distinct block ids.
    """
    owner = np.full(num_blocks, NO_ROW, dtype=np.int32)
    reach, turns = np.zeros((2, len(chains)), dtype=np.int32)
    sessions = np.empty(len(chains), dtype=np.int32)
    begun = 0
    for request, chain in enumerate(chains):
        walked = owner[np.asarray(chain, dtype=np.int64)]
        session = continued(walked, reach, turns)
        if session == NO_ROW:
            session, begun = begun, begun + 1
        reach[session] = full[request]
        turns[session] += 1
        sessions[request] = session
        owner[chain] = np.where((walked == NO_ROW) | (walked == session), session, SHARED)
    return sessions
