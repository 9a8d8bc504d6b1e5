"""Edges of all six types: those of the store, and those that follow from columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvgraph.graph import snapshot
from kvgraph.graph.errors import SnapshotError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import EdgeType, as_keys
from kvgraph.graph.wire.events import (
    BlocksAttended,
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    RequestStarted,
    Segment,
)
from wire_keys import pack

TEMPORAL = EdgeType.TEMPORAL


def busy_graph() -> KVCacheGraph:
    """A graph with edges of five types."""
    graph = KVCacheGraph(clock=lambda: 50.0)
    memory = Segment(5, 0, 16, None, None, "m")
    for request in "rq":
        started = RequestStarted(request, pack(1, 2, 3), 49, 0, 16, request, None, (memory,))
        graph.apply("e", [started, BlocksStored(pack(1, 2, 3), None, 16)])
    mass = np.ones(2, dtype="<f4").tobytes()
    graph.apply("e", [BlocksAttended(pack(1, 3), mass)] * 3)
    graph.apply("e", [BlocksSpilled(pack(2, 3), 2, 100), BlocksSpilled(pack(3), 4, 100)])
    return graph


def test_edges_that_follow_from_columns_are_not_stored_and_seen_all_the_same() -> None:
    graph = busy_graph()
    assert graph.stats().edges == {
        "prefix_share": 3,
        "co_attend": 1,
        "semantic": 0,
        "temporal": 2,
        "spill_link": 3,
        "memory_ref": 1,
    }
    assert len(graph.tables.edges) == 2
    graph.check_integrity()
    assert sorted((each["type"], each["weight"]) for each in graph.neighbors(3)) == [
        ("co_attend", 3.0),
        ("prefix_share", 2.0),
        ("spill_link", 1.0),
        ("spill_link", 1.0),
        ("temporal", 1.0),
    ]
    graph.apply("e", [CopiesDropped(pack(3), 4)])
    assert graph.stats().edges["spill_link"] == 2


def test_the_sums_at_a_block_are_those_of_its_edges() -> None:
    graph = busy_graph()
    everything = graph.tables.all_edges
    for row in graph.tables.blocks.live_rows().tolist():
        only = Selection(graph.tables.blocks, np.array([row], dtype=np.int32))
        at = everything.touching(only.rows)
        for kind in EdgeType:
            weights = at.weight[at.kind == int(kind)]
            assert everything.degree(kind, only).tolist() == [len(weights)], kind
            assert everything.weight(kind, only).tolist() == [weights.sum()], kind


@pytest.mark.parametrize(("walked", "linked"), [((1, 2), [2, 7, 8]), ((), [5, 6, 7, 8])])
def test_links_of_blocks_that_were_forgotten_are_gone(
    walked: tuple[int, ...], linked: list[int]
) -> None:
    """Three blocks of a chain are forgotten, the longest unused: from its start, or behind it."""
    now = [0.0]
    graph = KVCacheGraph(limits=GraphLimits(max_ghosts=8), clock=lambda: now[0])
    keys = tuple(range(1, 9))
    for request in "rq":
        graph.apply("e", [RequestStarted(request, pack(*keys), 128, 0, 16, request)])
    now[0] = 1.0
    if walked:
        graph.apply("e", [RequestStarted("w", pack(*walked), 32, 0, 16, "w")])
    graph.apply("e", [BlocksStored(pack(9), None, 16), BlocksRemoved(pack(9))])
    graph.check_integrity()
    assert len(graph.tables.blocks) == 6
    followed = [edge.target for edge in graph.tables.all_edges.all() if edge.kind == TEMPORAL]
    assert sorted(graph.tables.blocks.keys[followed].tolist()) == linked
    assert graph.stats().edges["prefix_share"] == len(linked) + len(walked) // 2


def test_a_snapshot_that_stored_derived_edges_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.snap"
    snapshot.save(busy_graph(), path)
    current = path.read_bytes()
    path.write_bytes(b"KVGSNAP\x07" + current[8:])
    with pytest.raises(SnapshotError, match="not a snapshot of this version"):
        snapshot.load(KVCacheGraph(), path)
    path.write_bytes(current)
    back = KVCacheGraph(clock=lambda: 7.0)
    snapshot.load(back, path)
    before = busy_graph().stats().edges
    assert back.stats().edges == {**before, "spill_link": 0}, "copies are an engine's to announce"


def shares(graph: KVCacheGraph, key: int) -> list[tuple[str, str, float]]:
    """The PREFIX_SHARE edges at a block: direction, other node, weight."""
    at = [each for each in graph.neighbors(key) if each["type"] == "prefix_share"]
    return [(each["direction"], each["node"], each["weight"]) for each in at]


def test_the_first_block_of_a_chain_is_linked_to_the_root_once_two_walked_it() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [RequestStarted("r", pack(1), 17, 0, 16, "s")])
    assert shares(graph, 1) == []
    graph.apply("e", [RequestStarted("q", pack(1), 17, 0, 16, "t")])
    assert shares(graph, 1) == [("in", "root", 2.0)]
    first = Selection(graph.tables.blocks, graph.tables.blocks.find(as_keys([1])))
    assert graph.tables.all_edges.degree(EdgeType.PREFIX_SHARE, first).tolist() == [1]
    assert graph.tables.all_edges.weight(EdgeType.PREFIX_SHARE, first).tolist() == [2]
    part = graph.subgraph(1)
    assert [(edge["source"], edge["target"]) for edge in part["edges"]] == [("root", f"{1:#018x}")]
    assert {"id": "root", "kind": "root"} in part["nodes"]
    graph.check_integrity()


def test_a_block_that_was_told_as_a_first_one_stays_one() -> None:
    """Its hash is of all that stands before it: who says something else later contradicts it."""
    graph = KVCacheGraph()
    for request in "rq":
        graph.apply("e", [RequestStarted(request, pack(1), 17, 0, 16, request)])
    graph.apply("e", [BlocksStored(pack(1), 9, 16)])
    graph.check_integrity()
    assert shares(graph, 1) == [("in", "root", 2.0)]
    assert graph.counters["links_refused"] == 1


def test_copies_and_memories_are_not_taken_for_the_root() -> None:
    """Their numbers may be equal to the row that they are of."""
    graph = KVCacheGraph()
    memory = Segment(5, 0, 16, None, None, "m")
    graph.apply("e", [RequestStarted("r", pack(1), 17, 0, 16, "s", None, (memory,))])
    graph.apply("e", [BlocksSpilled(pack(1), 2, 100)])
    found = {(each["direction"], each["node"]) for each in graph.neighbors(1)}
    assert found == {("out", "memory:m"), ("out", f"copy:warm:{1:#018x}")}
