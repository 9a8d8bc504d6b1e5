"""The invariants of the tables, checked one by one. For tests, and for `kvgraph doctor`."""

from __future__ import annotations

import numpy as np

from ..types import NO_ROW, EdgeType, Tier
from .edges import BLOCK_TO_BLOCK, copy_id
from .tables import Tables


def check_integrity(tables: Tables) -> None:
    """Raise ``AssertionError`` naming the first invariant that does not hold."""
    _check_index(tables)
    _check_chains(tables)
    _check_edges(tables)
    _check_aggregates(tables)
    _check_references(tables)
    _check_names(tables)
    _check_copies(tables)


def _check_index(tables: Tables) -> None:
    blocks = tables.blocks
    live = blocks.live_rows()
    assert len(live) == len(blocks), "alive rows and indexed keys differ in number"
    assert (blocks.find(blocks.keys[live]) == live).all(), "a key does not lead to its row"


def _check_chains(tables: Tables) -> None:
    blocks = tables.blocks
    live = blocks.live_rows()
    children = live[blocks.parent[live] != NO_ROW]
    parents = blocks.parent[children]
    assert blocks.alive[parents].all(), "a parent is not in use"
    assert (blocks.depth[parents] < blocks.depth[children]).all(), "a parent is not shallower"


def _check_edges(tables: Tables) -> None:
    blocks, edges = tables.blocks, tables.edges
    live = np.flatnonzero(edges.alive[: edges.size])
    assert len(live) == len(edges), "live edges and indexed edges differ in number"
    assert blocks.alive[edges.source[live]].all(), "an edge leaves a block that is not in use"
    for kind in EdgeType:
        rows = edges.of_kind(kind)
        assert len(rows) == edges.counts[kind], f"count of {kind.name} edges is off"
        if kind in BLOCK_TO_BLOCK:
            targets = edges.target[rows]
            assert blocks.alive[targets].all(), f"a {kind.name} edge leads to a block not in use"
            loops = targets[targets == edges.source[rows]]
            rooted = kind is EdgeType.PREFIX_SHARE and (blocks.parent[loops] == NO_ROW).all()
            assert rooted or not len(loops), f"a {kind.name} edge is a loop"


def _check_aggregates(tables: Tables) -> None:
    blocks = tables.blocks
    degree, weight = tables.edges.aggregates()
    live = blocks.live_rows()
    top = np.iinfo(np.uint16).max
    kept = blocks.degree[:, live]
    assert ((kept == degree[:, live]) | (kept == top)).all(), "a degree is off"
    close = np.isclose(blocks.edge_weight[:, live], weight[:, live], rtol=1e-3, atol=1e-2)
    assert close.all(), "an edge weight sum is off"


def _check_references(tables: Tables) -> None:
    blocks, sessions = tables.blocks, tables.sessions
    live = blocks.live_rows()
    assert (blocks.session[live] < sessions.size).all(), "a block's session is none"
    tips = sessions.tip[: sessions.size]
    assert blocks.alive[tips[tips != NO_ROW]].all(), "a session's tip is not in use"
    assert not blocks.tiers[:, : blocks.size][:, ~blocks.alive[: blocks.size]].any(), (
        "a row not in use is resident"
    )


def _check_names(tables: Tables) -> None:
    blocks, sessions, edges = tables.blocks, tables.sessions, tables.edges
    live = blocks.live_rows()
    memories = edges.target[edges.of_kind(EdgeType.MEMORY_REF)]
    for what, numbers, names in (
        ("a block's identity", blocks.identity[live], tables.segment_names),
        ("a block's tenant", blocks.tenant[live], tables.tenants),
        ("a session's tenant", sessions.tenant[: sessions.size], tables.tenants),
        ("a MEMORY_REF edge", memories, tables.memories),
    ):
        assert (numbers < len(names)).all(), f"{what} is of no name"


def _check_copies(tables: Tables) -> None:
    blocks, edges = tables.blocks, tables.edges
    held = np.bitwise_or.reduce(blocks.tiers[:, : blocks.size], axis=0)
    linked = np.sort(edges.target[edges.of_kind(EdgeType.SPILL_LINK)])
    copies = [
        copy_id(np.flatnonzero(held & int(tier)).astype(np.int32), tier)
        for tier in (Tier.WARM, Tier.COLD)
    ]
    assert np.array_equal(linked, np.sort(np.concatenate(copies))), (
        "SPILL_LINK edges and copies are not the same"
    )
