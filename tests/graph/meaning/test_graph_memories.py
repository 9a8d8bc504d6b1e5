"""Memories: recalled by sessions, dear to the graph, and explained to people."""

from __future__ import annotations

import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import RequestStarted, Segment
from small_world import pack


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
def graph(clock: list[float]) -> KVCacheGraph:
    return KVCacheGraph(clock=lambda: clock[0])


def ask(graph: KVCacheGraph, session: str, *keys: int, memory: str = "m-17") -> None:
    segment = Segment(5, 0, 32, memory_id=memory)
    graph.apply("e", [RequestStarted(session + str(keys), pack(*keys), 16 * len(keys), 0, 16,
                                     session, None, (segment,))])  # fmt: skip


def test_a_memory_is_explained(graph: KVCacheGraph, clock: list[float]) -> None:
    ask(graph, "a", 1, 2, 3)
    clock[0] += 60
    ask(graph, "b", 1, 2, 4)
    told = graph.explain_memory("m-17")
    assert (told["recalls"], told["blocks"], told["sessions"]) == (2, 2, ["a", "b"])
    assert told["layers"] == {"memories": 2}
    assert told["known_for_s"] == 60
    assert told["last_recalled_s_ago"] == 0
    assert told["held_by"] == [f"{1:#018x}", f"{2:#018x}"]


def test_each_recall_by_another_makes_its_blocks_dearer(graph: KVCacheGraph) -> None:
    ask(graph, "a", 1, 2, 3)
    before = graph.explain_memory("m-17")["importance"]
    ask(graph, "a", 1, 2, 3)
    assert graph.explain_memory("m-17")["importance"] == before, "it is carried along"
    ask(graph, "b", 5, 6, 7)
    once = graph.explain_memory("m-17")
    assert once["importance"] > before
    assert once["blocks"] == 4


def test_of_an_unknown_memory_that_is_told(graph: KVCacheGraph) -> None:
    with pytest.raises(GraphError, match="no memory of that name"):
        graph.explain_memory("m-18")
