"""Which blocks refer to a memory."""

from __future__ import annotations

import numpy as np

from ..tables.edges import EdgeStore
from ..types import EdgeType, Rows


def blocks_of_memory(edges: EdgeStore, memory: int) -> Rows:
    """int32 ``[n]``: the blocks that refer to a memory."""
    if not edges.counts[EdgeType.MEMORY_REF]:
        return np.empty(0, dtype=np.int32)
    links = edges.of_kind(EdgeType.MEMORY_REF)
    return np.unique(edges.source[links[edges.target[links] == memory]]).astype(np.int32)
