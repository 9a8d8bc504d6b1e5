"""What sampled decode steps teach the graph, and what it says of it."""

from __future__ import annotations

import numpy as np
import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import (
    BlocksAttended,
    BlocksEmbedded,
    BlocksSpilled,
    BlocksStored,
    ConfidenceSampled,
    RequestStarted,
    Segment,
)
from wire_keys import pack


@pytest.fixture
def graph() -> KVCacheGraph:
    """Two requests of two sessions walked three blocks, one of which holds a memory."""
    graph = KVCacheGraph(clock=lambda: 50.0)
    memory = Segment(5, 0, 16, None, None, "m")
    for request, segments in (("r", (memory,)), ("q", ())):
        started = RequestStarted(request, pack(1, 2, 3), 49, 0, 16, request, None, segments)
        graph.apply("e", [started, BlocksStored(pack(1, 2, 3), None, 16)])
    return graph


def test_a_session_has_the_mean_of_what_was_sampled_of_it(graph: KVCacheGraph) -> None:
    assert graph.explain_session("r", None)["confidence"] is None
    said = [ConfidenceSampled(pack(3), sure, "r", "r", None) for sure in (1.0, 0.0)]
    graph.apply("e", said)
    assert graph.explain_session("r", None)["confidence"] == pytest.approx(0.8)
    assert graph.explain_session("q", None)["confidence"] is None
    graph.apply("e", [ConfidenceSampled(pack(3), 0.5, "x", "nobody", "no tenant")])
    assert graph.explain_session("r", None)["confidence"] == pytest.approx(0.8)


def test_the_mean_of_a_block_begins_with_its_first_sample(graph: KVCacheGraph) -> None:
    graph.apply("e", [ConfidenceSampled(pack(3), 0.25, "r", "r", None)])
    assert graph.explain(3)["confidence"] == pytest.approx(0.25)
    graph.apply("e", [ConfidenceSampled(pack(3), 0.75, "r", "r", None)])
    assert graph.explain(3)["confidence"] == pytest.approx(0.35)


def test_a_session_that_nobody_named_is_found_by_its_request(graph: KVCacheGraph) -> None:
    graph.apply("e", [RequestStarted("u", pack(7, 8), 33, 0, 16, None, None, ())])
    graph.apply("e", [ConfidenceSampled(pack(8), 0.25, "u")])
    sessions = graph.tables.sessions
    known = {sessions.names[n]: float(sessions.confidence[n]) for n in range(sessions.size)}
    assert [sure for name, sure in known.items() if name.endswith("/u")] == [0.25]


def test_importance_grows_where_attention_goes_unless_it_was_stated(graph: KVCacheGraph) -> None:
    blocks, mass = graph.tables.blocks, np.array([0.05, 0.05, 0.9], dtype="<f4").tobytes()
    stated = Segment(4, 16, 32, 0.25, None, None, authority=1)
    graph.apply("e", [RequestStarted("s", pack(1, 2, 3), 49, 0, 16, "s", None, (stated,))])
    before = blocks.importance[:3].copy()
    strong = np.array([0.05, 0.9, 0.05], dtype="<f4").tobytes()
    graph.apply("e", [BlocksAttended(pack(1, 2, 3), mass)] * 50)
    graph.apply("e", [BlocksAttended(pack(1, 2, 3), strong)] * 50)
    rows = blocks.find(np.array([1, 2, 3], np.uint64), graph.tables.salt(0))
    assert blocks.importance[rows[2]] > before[2]
    assert blocks.importance[rows].max() <= 0.8
    assert blocks.importance[rows[1]] == np.float32(0.25), "a caller stated it"


def test_each_edge_is_explained_in_words(graph: KVCacheGraph) -> None:
    mass = np.full(2, 0.5, dtype="<f4").tobytes()
    graph.apply("e", [BlocksAttended(pack(1, 3), mass)] * 3)
    alike = np.ones((2, 4), dtype="<f2").tobytes()
    graph.apply("e", [BlocksEmbedded(pack(1, 3), 4, alike), BlocksSpilled(pack(1), 2, 100)])
    told = graph.explain(1)
    because = {edge["type"]: edge["because"] for edge in told["edges"]}
    assert because["co_attend"].startswith("both were among the most attended in sampled steps, 3")
    assert "cosine of 1.00" in because["semantic"]
    assert because["prefix_share"] == "2 requests went this way"
    assert len(because) == 6
    assert any("holds what is remembered as m" in each for each in told["believes"])
    assert any("of their attention" in each for each in told["believes"])
