"""Which row people mean when they name a block."""

from __future__ import annotations

import numpy as np

from ..errors import GraphError
from ..tables.tables import Tables
from ..types import BlockKey


def row_of(tables: Tables, key: BlockKey) -> int:
    """The block that engines call ``key``; among several models' blocks, a held one, the last used.

    Raises:
        GraphError: No such block is known, or ``key`` is no key.
    """
    if not 0 <= key < 1 << 64:
        raise GraphError(f"a block key is a number from 0 to 2**64 - 1, not {key}")
    blocks = tables.blocks
    every = np.s_[: blocks.size]
    named = blocks.pick((blocks.wire_keys(every) == np.uint64(key)) & blocks.alive[every])
    if not len(named):
        raise GraphError(f"no block {key} is known: never stored, or long forgotten")
    held = blocks.tiers[:, named.rows].any(axis=0)
    return int(named.rows[np.lexsort((named.last_used(), held))[-1]])
