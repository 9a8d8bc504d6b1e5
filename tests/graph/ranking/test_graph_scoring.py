"""What a ranking means: the formula, and the three rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.graph.ranking.formulas import ClassicPolicy, LruPolicy
from kvgraph.graph.ranking.policy import Policy, Rules, Weights
from kvgraph.graph.types import EdgeType, SourceLayer
from kvgraph.graph.wire.events import ConfidenceSampled, Segment
from small_world import World
from turns import SIZE, Told, finished, started, stored
from wire_keys import pack


@pytest.fixture
def told() -> Told:
    return Told()


def layer(which: SourceLayer, blocks: int, start: int = 0) -> Segment:
    return Segment(int(which), start * SIZE, (start + blocks) * SIZE)


def test_the_score_is_the_documented_sum(told: Told) -> None:
    told.turn("a", 1, 2, segments=(layer(SourceLayer.CONTEXT, 2),))
    told.turn("b", 1, 2, found=2, segments=(layer(SourceLayer.CONTEXT, 2),))
    told.now += 500
    terms = told.graph.explain(1)["terms"]
    weights = told.graph.rules.edge_types
    prefix, temporal = weights[EdgeType.PREFIX_SHARE], weights[EdgeType.TEMPORAL]
    assert terms["age"] == pytest.approx(0.01 * 500)
    # Two walked the link from the root to the first block, and the one from there to the second.
    assert terms["degree"] == pytest.approx(-5 * (2 * prefix + temporal))
    assert terms["edge_weight"] == pytest.approx(-2 * (2 * 2 * prefix + temporal))
    assert terms["importance"] == pytest.approx(-20 * 0.5)
    assert terms["hit_count"] == pytest.approx(-3)
    assert told.graph.explain(1)["score"] == pytest.approx(sum(terms.values()), abs=1e-3)


def test_every_weight_and_edge_weight_counts(told: Told) -> None:
    told.turn("a", 1, 2)
    before = told.graph.explain(2)["terms"]
    told.graph.policy = ClassicPolicy(Weights(importance=-40.0))
    told.graph.configure(Rules(edge_types={EdgeType.TEMPORAL: 0.2}))
    after = told.graph.explain(2)["terms"]
    assert after["importance"] == pytest.approx(2 * before["importance"])
    assert after["degree"] == pytest.approx(2 * before["degree"])


def test_protected_blocks_go_only_when_nothing_else_is_left(told: Told) -> None:
    told.turn("a", 1, 2, 3, segments=(layer(SourceLayer.RULES, 1),))
    ranking = told.graph.rank("e", 100)
    assert ranking.order.tolist() == [3, 2]
    assert ranking.protected.tolist() == [1]
    assert told.graph.suggest_eviction(2) == [3, 2]
    assert told.graph.suggest_eviction(3) == [3, 2, 1]


@pytest.mark.parametrize("alone", [True, False])  # or in runs
@pytest.mark.parametrize("policy", [ClassicPolicy, LifecyclePolicy])
def test_blocks_that_a_running_request_reads_are_not_named(
    told: Told, policy: Callable[[], Policy], alone: bool
) -> None:
    """An engine cannot evict them, and looks at every block that is named."""
    told.graph.policy = policy()
    if alone:
        told.turn("kept", 21, segments=(layer(SourceLayer.RULES, 1),))
    told.turn("a", 1, 2, 3, 4)
    told.turn("b", 11, 12)
    told.now += 1
    told.tell(started("again", 1, 2, 5, found=2, session="a"), stored(5, behind=2))
    assert set(told.order()) == {3, 4, 11, 12}, "what it left behind can go"
    ranking = told.graph.rank("e", 2)
    assert len(ranking.order) == 2
    assert not {1, 2, 5}.intersection(ranking.order.tolist()), "they take nobody's place"
    told.tell(finished("again", 1, 2, 5, session="a"))
    assert set(told.order()) == {1, 2, 3, 4, 5, 11, 12}


def test_a_block_that_is_read_on_another_engine_can_go(told: Told) -> None:
    told.turn("a", 1, 2)
    told.now += 1
    told.tell(started("again", 1, 2, session="a"), stored(1, 2), engine="other")
    assert told.order() == [2, 1]
    assert told.order("other") == []


def test_blocks_that_a_running_request_reads_are_worth_copies(told: Told) -> None:
    """It may end, and they may go, before the next ranking."""
    told.turn("b", 11)
    told.tell(started("again", 1, 2, session="a"), stored(1, 2))
    assert told.graph.rank("e", 10).spill_first.tolist() == [11, 2, 1]


def test_an_unprotected_parent_of_a_protected_block_is_protected_with_it(told: Told) -> None:
    told.turn("a", 1, 2, 3, segments=(layer(SourceLayer.RULES, 1, start=1),))
    ranking = told.graph.rank("e", 100)
    assert ranking.order.tolist() == [3]
    assert ranking.protected.tolist() == [2, 1]


def test_protection_is_configuration(told: Told) -> None:
    told.turn("a", 1, segments=(layer(SourceLayer.RULES, 1),))
    told.graph.configure(Rules(protected_layers=frozenset({SourceLayer.AXIOMS})))
    assert told.order() == [1]


def test_a_chain_goes_tail_first_whatever_its_scores_say(told: Told) -> None:
    keys = list(range(1, 200))
    told.turn("a", *keys)
    blocks = told.graph.tables.blocks
    blocks.hit_count[: blocks.size] = np.random.default_rng(1).integers(0, 50, blocks.size)
    assert told.order() == keys[::-1]


def test_an_abandoned_branch_goes_first_and_its_stem_stays(told: Told) -> None:
    told.turn("quiet", 50)
    told.turn("a", 1, 2, 3, 4)
    told.turn("a", 1, 2, 5)  # the history was edited: 3 and 4 are nobody's
    assert told.order()[:2] == [4, 3]
    assert told.graph.explain(3)["standing"] == ["superseded"]
    assert told.graph.explain(2)["standing"] == []


def test_a_branch_that_is_shared_or_returned_to_is_not_abandoned(told: Told) -> None:
    told.turn("a", 1, 2, 3)
    told.turn("b", 1, 2, 3)
    told.turn("a", 1, 4)
    assert not told.graph.explain(3)["superseded"], "another session shares it"
    for chain in ((11, 12), (11, 13), (11, 12, 14)):
        told.turn("c", *chain)
    assert not told.graph.explain(12)["superseded"], "its session came back to it"
    assert told.graph.explain(13)["superseded"]


def test_what_an_ended_session_leaves_goes_before_what_a_waiting_one_needs(told: Told) -> None:
    told.turn("waits", 1, waiting_for_tool=True, expected_return_s=60.0)
    told.now += 30
    told.turn("ended", 2, session_ended=True)
    assert told.order() == [2, 1]
    assert told.graph.explain(2)["standing"] == ["session_over"]


def test_a_waiting_session_keeps_its_claim_until_well_past_its_return(told: Told) -> None:
    told.turn("waits", 1, waiting_for_tool=True, expected_return_s=60.0)
    told.now += 119
    assert told.graph.explain_session("waits")["credit"] == 1.0
    told.now += 600
    assert told.graph.explain_session("waits")["credit"] < 0.2


@pytest.fixture
def world() -> World:
    """Three sessions of three blocks, which came at once."""
    world = World()
    for number, session in enumerate(("sure", "doubting", "unsampled")):
        world.serve(*range(10 * number + 1, 10 * number + 4), session=session)
    return world


def sample(world: World, session: str, confidence: float, *keys: int) -> None:
    world.tell(ConfidenceSampled(pack(*keys), confidence, session=session))


def term(world: World, key: int) -> float:
    return float(world.graph.explain(key)["terms"]["confidence"])


def test_it_counts_against_the_mean_of_the_sampled(world: World) -> None:
    world.graph.policy = ClassicPolicy()
    assert term(world, 1) == 0.0, "nobody was sampled"
    sample(world, "sure", 0.9, 1)
    assert term(world, 1) == 0.0, "there is nobody to compare with"
    sample(world, "doubting", 0.5, 11)
    assert term(world, 1) == pytest.approx(20 * 0.2, abs=1e-3)
    assert term(world, 11) == pytest.approx(-20 * 0.2, abs=1e-3)
    assert term(world, 21) == 0.0, "nothing is known of it"


@pytest.mark.parametrize("policy", [ClassicPolicy(), LifecyclePolicy()])
def test_blocks_of_a_session_the_model_is_sure_of_go_first(world: World, policy: Policy) -> None:
    world.graph.policy = policy
    sample(world, "doubting", 0.2, 11)
    sample(world, "sure", 0.9, 1)
    world.serve(1, 2, 3, session="sure", found=3)
    world.serve(11, 12, 13, session="doubting", found=3)
    ends = {1: 3, 11: 13}
    scores = {key: world.graph.explain(end)["score"] for key, end in ends.items()}
    plain = type(policy)(Weights(confidence=0.0))
    world.graph.policy = plain
    before = {key: world.graph.explain(end)["score"] for key, end in ends.items()}
    assert scores[1] > before[1]
    assert scores[11] < before[11]


def test_it_is_bounded_in_the_default_policy(world: World) -> None:
    world.graph.policy = LifecyclePolicy(Weights(confidence=1e6))
    sample(world, "doubting", 0.0, 11)
    sample(world, "sure", 1.0, 1)
    steered = [world.graph.explain(key)["terms"]["graph"] for key in (1, 11)]
    assert all(abs(each) <= 351 for each in steered), "a factor of e^0.35 of the rate, either way"
    assert steered[0] > steered[1]


@pytest.fixture
def reserved_world() -> World:
    """Two sessions with two turns each, and then six with one."""
    reserved_world = World()
    reserved_world.graph.policy = LruPolicy()
    for session, first in (("old", 10), ("young", 20)):
        reserved_world.serve(first, first + 1, session=session)
        reserved_world.serve(first, first + 1, first + 2, found=2, session=session)
    for number in range(6):
        reserved_world.serve(100 + 2 * number, 101 + 2 * number, session=f"once {number}")
    return reserved_world


def reserved_order(reserved_world: World, reserved: float) -> list[int]:
    reserved_world.graph.configure(replace(Rules(), reserved=reserved))
    return reserved_world.graph.rank("a", 100).order.tolist()


@pytest.mark.parametrize(
    ("reserved", "first", "last"),
    [
        pytest.param(0.0, [], [], id="nothing reserved: the engine's own order"),
        pytest.param(6, [101, 100, 103, 102], [12, 11, 10, 22, 21, 20], id="room for both"),
        pytest.param(5, [12, 11, 10], [22, 21, 20], id="room for one: the last heard of"),
        pytest.param(0.031, [12, 11, 10], [22, 21, 20], id="below one it is a share of the pool"),
        pytest.param(0.029, [12, 11, 10], [111, 110], id="a share in which nobody fits"),
    ],
)
def test_sessions_that_came_back_go_last_as_far_as_room_is_reserved(
    reserved_world: World, reserved: float, first: list[int], last: list[int]
) -> None:
    ranked = reserved_order(reserved_world, reserved)
    assert ranked[: len(first)] == first
    assert ranked[len(ranked) - len(last) :] == last
    assert bool(ranked) == bool(reserved)
    standing = ["reserved"] if 10 in last else []
    assert reserved_world.graph.explain(10)["standing"] == standing


def test_the_room_is_of_each_engine(reserved_world: World) -> None:
    reserved_world.serve(10, 11, 12, 13, session="old", engine="b")
    ranked = reserved_order(reserved_world, 100)
    assert ranked[-3:] == [22, 21, 20]


def test_it_is_released_when_a_session_ends(reserved_world: World) -> None:
    name = reserved_world.start(20, 21, 22, found=3, session="young")
    end = finished(name, 20, 21, 22, more=5, session="young", session_ended=True)
    reserved_world.tell(end)
    ranked = reserved_order(reserved_world, 100)
    assert ranked[:3] == [22, 21, 20]
    assert ranked[-3:] == [12, 11, 10]


def test_it_is_released_for_a_branch_that_was_left_behind(reserved_world: World) -> None:
    reserved_world.tell(started("edited", 20, 31, found=1, session="young"))
    reserved_world.tell(finished("edited", 20, 31, session="young"))
    ranked = reserved_order(reserved_world, 100)
    assert ranked[:2] == [22, 21]
    assert ranked[-1] == 20


def test_it_is_released_when_a_return_is_no_longer_likely(reserved_world: World) -> None:
    assert reserved_order(reserved_world, 100)[-3:] == [22, 21, 20]
    reserved_world.now += 3600
    assert reserved_order(reserved_world, 100)[:3] == [12, 11, 10]
