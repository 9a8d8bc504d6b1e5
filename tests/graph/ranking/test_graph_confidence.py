"""How sure the model is of a session's answers, in a score: while it doubts, more is kept."""

from __future__ import annotations

import pytest
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import Policy, Weights
from kvgraph.graph.wire.events import ConfidenceSampled
from small_world import World, pack


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
def test_blocks_of_a_session_that_the_model_is_sure_of_go_first(
    world: World, policy: Policy
) -> None:
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
