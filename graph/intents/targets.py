"""Which block rows a target means, from the start of their chains on."""

from __future__ import annotations

import numpy as np

from ..errors import GraphError
from ..memories.memory_blocks import blocks_of_memory
from ..queries.lookup import row_of
from ..tables.tables import Tables
from ..types import NO_ROW, Rows
from .intent import Target


def target_rows(tables: Tables, target: Target) -> Rows:
    """int32 ``[n]``: the rows that are meant, those nearest to the start of their chains first.

    Rows of other tenants than the target's are left out.

    Raises:
        GraphError: The target names none or several things, or no such block is known.
    """
    if target.named != 1:
        raise GraphError(
            "a target names one of block, session, identity and memory_id; "
            f"{target.named} of them were named"
        )
    rows = _named(tables, target)
    blocks = tables.blocks
    tenant = NO_ROW if target.tenant is None else tables.tenants.find(target.tenant)
    rows = rows[blocks.tenant[rows] == tenant]
    ordered: Rows = rows[np.argsort(blocks.depth[rows], kind="stable")]
    return ordered


def _named(tables: Tables, target: Target) -> Rows:
    if target.block is not None:
        return chain_of(tables, row_of(tables, target.block))
    if target.session is not None:
        return _of_session(tables, target.session, target.tenant)
    if target.identity is not None:
        return _of_identity(tables, target.identity)
    assert target.memory_id is not None
    return _of_memory(tables, target.memory_id)


def chain_of(tables: Tables, row: int) -> Rows:
    """int32 ``[n]``: a block and all before it in its chain."""
    parent, chain = tables.blocks.parent, []
    while row != NO_ROW:
        chain.append(row)
        row = int(parent[row])
    return np.array(chain, dtype=np.int32)


def _of_session(tables: Tables, name: str, tenant: str | None) -> Rows:
    number = NO_ROW if tenant is None else tables.tenants.find(tenant)
    row = tables.sessions.find(name, number)
    return chain_of(tables, NO_ROW if row == NO_ROW else int(tables.sessions.tip[row]))


def _of_identity(tables: Tables, name: str) -> Rows:
    """The blocks of a segment; or the one that ``explain`` shows as ``name#0``."""
    number, chunk, blocks = tables.segment_names.find(name), "", tables.blocks
    if number == NO_ROW:
        name, _, chunk = name.rpartition("#")
        number = tables.segment_names.find(name)
    if number == NO_ROW or (chunk and not chunk.isdecimal()):
        return np.empty(0, dtype=np.int32)
    of_name = (blocks.identity[: blocks.size] == number) & blocks.alive[: blocks.size]
    if chunk:
        of_name &= blocks.chunk[: blocks.size] == int(chunk)
    return np.flatnonzero(of_name).astype(np.int32)


def _of_memory(tables: Tables, name: str) -> Rows:
    number = tables.memories.find(name)
    return blocks_of_memory(tables.edges, number)
