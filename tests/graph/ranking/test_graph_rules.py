"""The rules hold against whatever a policy scores, and explanations know all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.order import resident_scores
from kvgraph.graph.ranking.policy import Scores, Terms, View, Weights
from kvgraph.graph.ranking.rules import RULES
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.types import BlockFlag, SessionState, SourceLayer, Tier
from kvgraph.graph.wire.events import BlocksStored, RequestFinished, RequestStarted, Segment
from wire_keys import pack

SIZE = 16
NOW = 1000.0
PROTECTED, SUPERSEDED, OVER, PINNED, DUE, PLAIN = range(1, 7)


def turn(graph: KVCacheGraph, session: str, key: int, layer: SourceLayer) -> None:
    """A session of one block."""
    packed = pack(key)
    graph.apply(
        "e",
        [
            RequestStarted(
                session, packed, SIZE, 0, SIZE, session, None, (Segment(int(layer), 0, SIZE),)
            ),
            BlocksStored(packed, None, SIZE, session),
            RequestFinished(session, packed, SIZE, SIZE, "stop", session),
        ],
    )


def standings(graph: KVCacheGraph) -> None:
    """Give the blocks 1 … 5 the standing that each is named for; 6 has none."""
    for key in range(1, 7):
        turn(graph, str(key), key, SourceLayer.RULES if key == PROTECTED else SourceLayer.CONTEXT)
    blocks, sessions = graph.tables.blocks, graph.tables.sessions
    row = dict(zip(range(1, 7), blocks.find(np.arange(1, 7, dtype=np.uint64)), strict=True))
    blocks.flags[row[SUPERSEDED]] |= int(BlockFlag.SUPERSEDED)
    sessions.state[blocks.session[row[OVER]]] = SessionState.ENDED
    blocks.for_writing("pinned_until")[row[PINNED]] = NOW + 60
    sessions.wait(int(blocks.session[row[DUE]]), NOW + 1)
    blocks.mark(0, row[PLAIN], Tier.WARM)  # an engine with copies: who is due counts


@dataclass
class Told:
    """Scores each block of key ``k`` as the test says."""

    by_key: dict[int, float]
    name: str = "told"

    def observe(self, view: View) -> None:
        pass

    def scores(self, view: View, picked: Selection) -> Scores:
        return np.array([self.by_key[int(key)] for key in picked.of(view.blocks.keys)])

    def terms(self, view: View, picked: Selection) -> Terms:
        return {"told": self.scores(view, picked)}


@pytest.fixture
def graph() -> KVCacheGraph:
    graph = KVCacheGraph(clock=lambda: NOW)
    standings(graph)
    return graph


IN_ORDER = [SUPERSEDED, OVER, PLAIN, DUE, PINNED, PROTECTED]
LOUD = (1e9, 1e300, np.inf, -1e9, -np.inf, np.nan, 0.0)


@pytest.mark.parametrize("favourite", IN_ORDER)
@pytest.mark.parametrize("loud", LOUD)
def test_no_score_outvotes_a_rule(graph: KVCacheGraph, favourite: int, loud: float) -> None:
    graph.policy = Told({key: loud if key == favourite else 0.0 for key in range(1, 7)})
    assert graph.suggest_eviction(6) == IN_ORDER
    assert graph.rank("e", 10).protected.tolist() == [PROTECTED]


def test_no_weight_outvotes_a_rule(graph: KVCacheGraph) -> None:
    graph.policy = ClassicPolicy(Weights(age=1e6))
    last = graph.tables.blocks.last_attended
    last[graph.tables.blocks.find(np.array([PROTECTED], dtype=np.uint64))] = NOW - 1e6
    assert graph.suggest_eviction(6) == IN_ORDER
    assert graph.rank("e", 10).order.tolist() == IN_ORDER[:-1]


def test_the_weightiest_rule_by_which_two_blocks_differ_decides() -> None:
    weights = sorted((rule.weight for rule in RULES), key=abs)
    for place, weight in enumerate(weights):
        lighter = weights[:place]
        swing = sum(each for each in lighter if each > 0) - sum(w for w in lighter if w < 0)
        assert abs(weight) > swing


def test_a_pin_holds_against_over_and_superseded_and_yields_to_protected(
    graph: KVCacheGraph,
) -> None:
    blocks = graph.tables.blocks
    rows = blocks.find(np.array([SUPERSEDED, OVER], dtype=np.uint64))
    blocks.for_writing("pinned_until")[rows] = NOW + 60
    graph.policy = Told(dict.fromkeys(range(1, 7), 0.0))
    ranking = graph.rank("e", 10)
    assert set(ranking.order[:2].tolist()) == {PLAIN, DUE}
    assert ranking.order[2:].tolist() == [SUPERSEDED, OVER, PINNED]
    assert ranking.protected.tolist() == [PROTECTED]
    assert graph.explain(SUPERSEDED)["standing"] == ["superseded", "pinned"]


def test_a_score_that_is_no_number_counts_as_the_middle_of_the_others() -> None:
    graph = KVCacheGraph(clock=lambda: NOW)
    for key in range(1, 6):
        turn(graph, str(key), key, SourceLayer.CONTEXT)
    graph.policy = Told({1: 100.0, 2: 300.0, 3: np.nan, 4: 200.0, 5: 50.0})
    assert graph.rank("e", 10).order.tolist() == [2, 4, 3, 1, 5]
    graph.policy = Told(dict.fromkeys(range(1, 6), np.nan))
    assert sorted(graph.rank("e", 10).order.tolist()) == [1, 2, 3, 4, 5]


def test_scores_in_range_are_not_rounded(graph: KVCacheGraph) -> None:
    """Blocks of one standing keep the policy's order down to a millionth of a point."""
    blocks = graph.tables.blocks
    blocks.layer[: blocks.size] = SourceLayer.RULES
    blocks.flags[: blocks.size] = 0
    graph.policy = Told({key: 1e7 - 1e-6 * key for key in range(1, 7)})
    rows, scores = resident_scores(View(graph.tables, graph.rules, 0, NOW), graph.policy)
    assert len(set(scores.tolist())) == len(rows)


def test_the_rules_leave_the_graph_as_it_is(graph: KVCacheGraph) -> None:
    """A policy may give back a view of a column."""

    class Column(Told):
        def scores(self, view: View, picked: Selection) -> Scores:
            return picked.of(view.blocks.last_attended)

    before = graph.tables.blocks.last_attended.copy()
    graph.policy = Column({})
    graph.rank("e", 10)
    assert (graph.tables.blocks.last_attended == before).all()


def test_a_policy_that_scores_other_blocks_is_refused(graph: KVCacheGraph) -> None:
    class Short(Told):
        def scores(self, view: View, picked: Selection) -> Scores:
            return np.zeros(1)

    graph.policy = Short({}, name="short")
    with pytest.raises(GraphError, match="'short' gave 1 scores for 6 blocks"):
        graph.rank("e", 10)


def test_every_rule_is_explained(graph: KVCacheGraph) -> None:
    named = {key: graph.explain(key)["standing"] for key in range(1, 7)}
    assert named == {
        PROTECTED: ["protected_layer"],
        SUPERSEDED: ["superseded"],
        OVER: ["session_over"],
        PINNED: ["pinned"],
        DUE: ["due"],
        PLAIN: [],
    }
