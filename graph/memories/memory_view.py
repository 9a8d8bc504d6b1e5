"""What the graph knows of a memory, for people."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..errors import GraphError
from ..queries.views import block_name
from ..ranking.view import View
from ..sessions.memory_facts import MemoryFacts
from ..types import LAYER_NAMES, NO_ROW, Tier
from .memory_blocks import blocks_of_memory

_SHOWN: Final = 16  # blocks


def explain_memory(view: View, name: str) -> dict[str, Any]:
    """A memory's properties, and the blocks that hold it.

    Raises:
        GraphError: No block ever named it.
    """
    tables, blocks = view.tables, view.tables.blocks
    memory = tables.memories.find(name)
    if memory == NO_ROW:
        raise GraphError("no memory of that name is known: no request's segment named it")
    rows = blocks_of_memory(tables.edges, memory)
    facts = tables.memory_facts.get(memory) or MemoryFacts(view.now)
    tiers = np.bitwise_or.reduce(blocks.tiers[:, rows], axis=0) if len(rows) else rows
    layers = np.bincount(blocks.layer[rows], minlength=len(LAYER_NAMES))
    return {
        "memory": name,
        "recalls": facts.recalls,
        "known_for_s": round(view.now - facts.first_seen, 3),
        "last_recalled_s_ago": round(view.now - facts.last_recalled, 3),
        "sessions": [tables.sessions.names[row] for row in facts.sessions if row != NO_ROW],
        "blocks": len(rows),
        "blocks_hot": int(((tiers & int(Tier.HOT)) != 0).sum()),
        "importance": round(float(blocks.importance[rows].mean()), 4) if len(rows) else None,
        "layers": {LAYER_NAMES[n]: int(layers[n]) for n in np.flatnonzero(layers)},
        "held_by": [block_name(int(key)) for key in blocks.wire_keys(rows[:_SHOWN])],
    }
