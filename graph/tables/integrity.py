"""The invariants of the tables, checked one by one; for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import HELD, LAYER_NAMES, NO_ROW, STATE_NAMES, EdgeType, Rows
from .edges import BLOCK_TO_BLOCK, STORED
from .tables import Tables


def check_integrity(tables: Tables) -> None:
    """Raise ``AssertionError`` naming the first invariant that does not hold."""
    _check_index(tables)
    _check_references(tables)
    _check_chains(tables)
    _check_links(tables)
    _check_edges(tables)
    _check_sums(tables)
    _check_names(tables)


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


def _check_links(tables: Tables) -> None:
    """Check that the sums at parents are those of their children."""
    blocks = tables.blocks
    live = blocks.live_rows()
    children = live[blocks.parent[live] != NO_ROW]
    shared = children[blocks.walkers[children] >= 2]
    counted = _count(blocks.parent[children], blocks.size)
    assert (blocks.children[live] == counted[live]).all(), "a count of children is off"
    counted = _count(blocks.parent[shared], blocks.size)
    assert (blocks.shared_children[live] == counted[live]).all(), "a count of walked links is off"
    counted = _count(blocks.parent[shared], blocks.size, blocks.walkers[shared])
    assert (blocks.children_walks[live] == counted[live]).all(), "a sum of walks is off"


def _count(
    parents: Rows, size: int, weights: npt.NDArray[np.uint32] | None = None
) -> npt.NDArray[Any]:
    return np.bincount(parents, weights, minlength=size)


def _check_edges(tables: Tables) -> None:
    blocks, edges = tables.blocks, tables.edges
    live = np.flatnonzero(edges.alive[: edges.size])
    assert len(live) == len(edges), "live edges and indexed edges differ in number"
    assert np.isin(edges.kind[live], [int(kind) for kind in STORED]).all(), (
        "an edge is stored that a column implies"
    )
    assert blocks.alive[edges.source[live]].all(), "an edge leaves a block that is not in use"
    for kind in STORED:
        rows = edges.of_kind(kind)
        assert len(rows) == edges.counts[kind], f"count of {kind.name} edges is off"
        if kind in BLOCK_TO_BLOCK:
            targets = edges.target[rows]
            assert blocks.alive[targets].all(), f"a {kind.name} edge leads to a block not in use"
            assert (targets != edges.source[rows]).all(), f"a {kind.name} edge is a loop"


def _check_sums(tables: Tables) -> None:
    blocks, top = tables.blocks, np.iinfo(np.uint16).max
    live = blocks.live_rows()
    for kind in STORED:
        degree, weight = (total[live] for total in tables.edges.totals(kind))
        if kind not in blocks.sums:
            assert not degree.any(), f"{kind.name} edges are not summed up"
            continue
        kept = blocks.sums[kind].degree[live]
        assert ((kept == degree) | (kept == top)).all(), "a degree is off"
        close = np.isclose(blocks.sums[kind].weight[live], weight, rtol=1e-3, atol=1e-2)
        assert close.all(), "an edge weight sum is off"


def _check_references(tables: Tables) -> None:
    blocks, sessions = tables.blocks, tables.sessions
    live = blocks.live_rows()
    tips = sessions.tip[: sessions.size]
    for what, rows in (
        ("parent", blocks.parent[live]),
        ("session", blocks.session[live]),
        ("session that stated a layer", blocks.raised_by[live]),
        ("tip", tips),
        ("tool", sessions.tool[: sessions.size]),
    ):
        assert (rows >= NO_ROW).all(), f"a {what} is below the first row"
    assert (blocks.layer[live] < len(LAYER_NAMES)).all(), "a block's layer is none"
    assert (sessions.state[: sessions.size] < len(STATE_NAMES)).all(), "a session's state is none"
    assert (blocks.session[live] < sessions.size).all(), "a block's session is none"
    assert (blocks.raised_by[live] < sessions.size).all(), "a layer's session is none"
    assert (sessions.tool[: sessions.size] < len(sessions.tools)).all(), "a session's tool is none"
    assert (sessions.turns[: sessions.size] >= 0).all(), "a session has fewer than no turns"
    assert blocks.alive[tips[tips != NO_ROW]].all(), "a session's tip is not in use"
    assert not blocks.tiers[:, : blocks.size][:, ~blocks.alive[: blocks.size]].any(), (
        "a row not in use is resident"
    )
    for engine, bits in enumerate(blocks.tiers[:, : blocks.size]):
        held = np.flatnonzero(bits & HELD)
        assert np.array_equal(blocks.holding(engine, HELD).rows, held), (
            "what an engine holds is not what its tier bits say"
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
