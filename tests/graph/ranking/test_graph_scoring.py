"""What a ranking means: the formula, and the three rules."""

from __future__ import annotations

import numpy as np
import pytest
from hand_clock import Clock
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import Rules, Weights
from kvgraph.graph.types import EdgeType, SourceLayer
from kvgraph.graph.wire.events import (
    BlocksStored,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from wire_keys import pack

SIZE = 16


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def graph(clock: Clock) -> KVCacheGraph:
    return KVCacheGraph(clock=clock)


def turn(
    graph: KVCacheGraph,
    session: str,
    *keys: int,
    cached: int = 0,
    segments: tuple[Segment, ...] = (),
    **signals: object,
) -> None:
    """A request whose whole prompt is these blocks starts, is stored and finishes."""
    packed, tokens = pack(*keys), len(keys) * SIZE
    graph.apply(
        "e",
        [
            RequestStarted(session, packed, tokens, cached, SIZE, session, None, segments),
            BlocksStored(packed, None, SIZE, session),
            RequestFinished(session, packed, tokens, tokens, "stop", session, **signals),
        ],
    )


def layer(which: SourceLayer, blocks: int, start: int = 0) -> Segment:
    return Segment(int(which), start * SIZE, (start + blocks) * SIZE)


def order(graph: KVCacheGraph) -> list[int]:
    return [int(key) for key in graph.rank("e", 100).order]


def test_the_score_is_the_documented_sum(graph: KVCacheGraph, clock: Clock) -> None:
    turn(graph, "a", 1, 2, segments=(layer(SourceLayer.CONTEXT, 2),))
    turn(graph, "b", 1, 2, cached=2 * SIZE, segments=(layer(SourceLayer.CONTEXT, 2),))
    clock.now += 500
    terms = graph.explain(1)["terms"]
    weights = graph.rules.edge_types
    prefix, temporal = weights[EdgeType.PREFIX_SHARE], weights[EdgeType.TEMPORAL]
    assert terms["age"] == pytest.approx(0.01 * 500)
    # Two walked the link from the root to the first block, and the one from there to the second.
    assert terms["degree"] == pytest.approx(-5 * (2 * prefix + temporal))
    assert terms["edge_weight"] == pytest.approx(-2 * (2 * 2 * prefix + temporal))
    assert terms["importance"] == pytest.approx(-20 * 0.5)
    assert terms["hit_count"] == pytest.approx(-3)
    assert graph.explain(1)["score"] == pytest.approx(sum(terms.values()), abs=1e-3)


def test_every_weight_and_edge_weight_counts(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1, 2)
    before = graph.explain(2)["terms"]
    graph.policy = ClassicPolicy(Weights(importance=-40.0))
    graph.configure(Rules(edge_types={EdgeType.TEMPORAL: 0.2}))
    after = graph.explain(2)["terms"]
    assert after["importance"] == pytest.approx(2 * before["importance"])
    assert after["degree"] == pytest.approx(2 * before["degree"])


def test_the_idle_go_before_the_busy_and_the_old_before_the_young(
    graph: KVCacheGraph, clock: Clock
) -> None:
    turn(graph, "old", 1)
    clock.now += 100
    turn(graph, "young", 2)
    assert order(graph) == [1, 2]


def test_protected_blocks_go_only_when_nothing_else_is_left(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1, 2, 3, segments=(layer(SourceLayer.RULES, 1),))
    ranking = graph.rank("e", 100)
    assert ranking.order.tolist() == [3, 2]
    assert ranking.protected.tolist() == [1]
    assert graph.suggest_eviction(2) == [3, 2]
    assert graph.suggest_eviction(3) == [3, 2, 1]


def test_an_unprotected_parent_of_a_protected_block_is_protected_with_it(
    graph: KVCacheGraph,
) -> None:
    turn(graph, "a", 1, 2, 3, segments=(layer(SourceLayer.RULES, 1, start=1),))
    ranking = graph.rank("e", 100)
    assert ranking.order.tolist() == [3]
    assert ranking.protected.tolist() == [2, 1]


def test_protection_is_configuration(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1, segments=(layer(SourceLayer.RULES, 1),))
    graph.configure(Rules(protected_layers=frozenset({SourceLayer.AXIOMS})))
    assert order(graph) == [1]


def test_a_chain_goes_tail_first_whatever_its_scores_say(graph: KVCacheGraph) -> None:
    keys = list(range(1, 200))
    turn(graph, "a", *keys)
    blocks = graph.tables.blocks
    blocks.hit_count[: blocks.size] = np.random.default_rng(1).integers(0, 50, blocks.size)
    assert order(graph) == keys[:98:-1]  # the first hundred of the ranking


def test_an_abandoned_branch_goes_first_and_its_stem_stays(graph: KVCacheGraph) -> None:
    turn(graph, "quiet", 50)
    turn(graph, "a", 1, 2, 3, 4)
    turn(graph, "a", 1, 2, 5)  # the history was edited: 3 and 4 are nobody's
    assert order(graph)[:2] == [4, 3]
    assert graph.explain(3)["standing"] == ["superseded"]
    assert graph.explain(2)["standing"] == []


def test_a_branch_that_another_session_shares_is_not_abandoned(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1, 2, 3)
    turn(graph, "b", 1, 2, 3)
    turn(graph, "a", 1, 4)
    assert not graph.explain(3)["superseded"]


def test_returning_to_a_branch_restores_it(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1, 2)
    turn(graph, "a", 1, 3)
    turn(graph, "a", 1, 2, 4)
    assert not graph.explain(2)["superseded"]
    assert graph.explain(3)["superseded"]


def test_what_an_ended_session_leaves_goes_before_what_a_waiting_one_needs(
    graph: KVCacheGraph, clock: Clock
) -> None:
    turn(graph, "waits", 1, waiting_for_tool=True, expected_return_s=60.0)
    clock.now += 30
    turn(graph, "ended", 2, session_ended=True)
    assert order(graph) == [2, 1]
    assert graph.explain(2)["standing"] == ["session_over"]


def test_a_waiting_session_keeps_its_claim_until_well_past_its_return(
    graph: KVCacheGraph, clock: Clock
) -> None:
    turn(graph, "waits", 1, waiting_for_tool=True, expected_return_s=60.0)
    clock.now += 119
    assert graph.explain_session("waits")["credit"] == 1.0
    clock.now += 600
    assert graph.explain_session("waits")["credit"] < 0.2


def test_a_signal_outside_of_a_request_ends_a_session(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1)
    graph.apply("e", [SessionSignal("a", ended=True)])
    assert graph.explain_session("a")["state"] == "ended"


def test_only_what_is_resident_on_that_engine_is_ranked(graph: KVCacheGraph) -> None:
    turn(graph, "a", 1)
    graph.apply("other", [BlocksStored(pack(2), None, SIZE)])
    assert order(graph) == [1]
    assert graph.rank("other", 10).order.tolist() == [2]
    assert graph.rank("stranger", 10).order.tolist() == []
