"""An explanation says whose order an engine goes by, and where a block stands in that."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvgraph.graph.intents import Intent, IntentKind, Target, Verdict
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import LruPolicy
from kvgraph.graph.ranking.policy import Ruling, Scores, View
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.types import SessionState, SourceLayer, as_keys
from kvgraph.graph.wire.events import BlocksStored, RequestFinished, RequestStarted, Segment

SIZE = 16
PROTECTED, OLD, OVER, FRESH = range(1, 5)


class Doubtful:
    """A referee that trusts the policy on no engine, or on all of them."""

    def __init__(self, trusting: bool) -> None:
        self.trusting = trusting

    def watch(self, view: View, scores: Callable[[Selection], Scores]) -> None:
        pass

    def trusts(self, engine: int) -> bool:
        return self.trusting

    def forget(self, engine: int) -> None:
        pass

    def rulings(self) -> dict[int, Ruling]:
        return {0: Ruling(self.trusting, 0.0, 0)}


@pytest.fixture
def graph() -> KVCacheGraph:
    """Four sessions of one block each, one after the other; the third is over."""
    now = iter(range(1_000_000))
    graph = KVCacheGraph(clock=lambda: float(next(now)))
    for key in range(1, 5):
        packed, name = np.array([key], dtype="<u8").tobytes(), f"s{key}"
        layer = SourceLayer.RULES if key == PROTECTED else SourceLayer.CONTEXT
        started = RequestStarted(
            name, packed, SIZE, 0, SIZE, name, None, (Segment(int(layer), 0, SIZE),)
        )
        ended = RequestFinished(name, packed, SIZE, SIZE, "stop", name, session_ended=key == OVER)
        graph.apply("e", [started, BlocksStored(packed, None, SIZE, name), ended])
    assert SessionState.ENDED in graph.tables.sessions.state[:4]
    return graph


def placed(graph: KVCacheGraph, key: int) -> dict[str, object]:
    ranks: dict[str, dict[str, object]] = graph.explain(key)["ranks"]
    return ranks["e"]


def test_while_lru_rules_a_rank_is_lrus(graph: KVCacheGraph) -> None:
    graph.referee = Doubtful(trusting=False)
    assert not graph.rank("e", 10).order.size
    assert [placed(graph, key)["rank"] for key in (OLD, OVER, FRESH, PROTECTED)] == [0, 1, 2, 3]
    told = placed(graph, OVER)
    assert (told["ranked_by"], told["policy_rank"]) == ("lru", 0)
    sentence = graph.explain(OVER)["who_ranks"]
    assert sentence.startswith("LRU on e:")
    assert "what classic would say" in sentence


def test_while_lru_rules_a_lease_holds_all_the_same(graph: KVCacheGraph) -> None:
    graph.referee = Doubtful(trusting=False)
    answer = graph.intents.apply(Intent(IntentKind.PIN, Target(session=f"s{OLD}"), seconds=60.0))
    assert answer.verdict is Verdict.ACCEPTED
    ranking = graph.rank("e", 10)
    assert not ranking.order.size, "LRU's order is the engine's own"
    assert ranking.protected.tolist() == [OLD, PROTECTED], "the least precious first"
    assert [placed(graph, key)["rank"] for key in (OVER, FRESH, OLD)] == [0, 1, 2]


def test_a_lease_keeps_what_stands_before_it(graph: KVCacheGraph) -> None:
    graph.referee = Doubtful(trusting=False)
    packed = np.array([11, 12, 13], dtype="<u8").tobytes()
    started = RequestStarted("c", packed, 3 * SIZE, 0, SIZE, "c")
    ended = RequestFinished("c", packed, 3 * SIZE, 3 * SIZE, "stop", "c")
    graph.apply("e", [started, BlocksStored(packed, None, SIZE, "c"), ended])
    blocks = graph.tables.blocks
    second = blocks.find(as_keys([12]), graph.tables.salt(0))
    blocks.for_writing("pinned_until")[second] = 1e6
    assert graph.rank("e", 10).protected.tolist() == [12, 11, PROTECTED]


def test_while_the_policy_rules_a_rank_is_its_own(graph: KVCacheGraph) -> None:
    graph.referee = Doubtful(trusting=True)
    assert placed(graph, OVER) == {"ranked_by": "classic", "rank": 0, "of": 4}
    assert graph.explain(OVER)["who_ranks"] == "classic"


def test_the_policy_lru_is_not_said_to_be_overruled(graph: KVCacheGraph) -> None:
    graph.policy = LruPolicy()
    assert placed(graph, OLD) == {"ranked_by": "lru", "rank": 0, "of": 4}
    assert placed(graph, OVER)["rank"] == 1, "LRU sends nothing away for being over"
    assert graph.explain(OLD)["who_ranks"] == "lru"


def test_a_block_in_no_pool_has_no_rank(graph: KVCacheGraph) -> None:
    graph.referee = Doubtful(trusting=False)
    graph.forget_engine("e")
    told = graph.explain(OLD)
    assert (told["ranks"], told["who_ranks"]) == ({}, "classic")
