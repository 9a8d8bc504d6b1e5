"""Weights that are not in force, in a shadow of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.page.shadows import ShadowView, shadows_view
from kvgraph.advisor.replay.trace import Trace
from kvgraph.advisor.shadows.pools import OTHERWISE, OtherWeights
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import Weights
from kvgraph.graph.wire.events import EngineHello
from live_shadows import Live
from made_traffic import agents, made

SMALL = 80  # blocks: much of the trace is lost
NEWEST_FIRST = Weights(age=-1.0, degree=0.0, hit_count=50.0)


@pytest.fixture
def live(tmp_path: Path) -> Live:
    trace: Trace = made(tmp_path, agents(np.random.default_rng(1)))
    live = Live(trace, SMALL, cpu=lambda: 0.0)
    live.graph.policy = ClassicPolicy()
    live.graph.forget_engine("e")
    live.runner.tick()
    live.hello()
    return live


def views(live: Live) -> dict[str, ShadowView]:
    shown = shadows_view(live.runner, None, live.now, float, str).shadows
    return {each.name: each for each in shown}


def test_the_weights_in_force_find_what_the_live_policys_shadow_finds(live: Live) -> None:
    live.runner.weigh_otherwise(OtherWeights.in_force(live.graph, "the same weights"))
    live.play()
    same, classic = views(live)[OTHERWISE], views(live)["classic"]
    assert (same.found, same.asked, same.hit_rate) == (
        classic.found,
        classic.asked,
        classic.hit_rate,
    )
    assert same.sentence == "the policy classic with the same weights"


def test_other_weights_find_something_else_and_change_nothing(live: Live) -> None:
    before = live.graph.policy.weights
    other = replace(OtherWeights.in_force(live.graph, "nonsense"), weights=NEWEST_FIRST)
    live.runner.weigh_otherwise(other)
    live.play()
    shown = views(live)
    assert shown[OTHERWISE].found < shown["classic"].found
    assert live.graph.policy.weights is before


def test_what_began_later_is_told_of_its_own_time_alone(live: Live) -> None:
    live.play()
    live.now = (live.now // 10.0 + 1) * 10.0
    live.runner.weigh_otherwise(OtherWeights.in_force(live.graph, "these"))
    fresh = views(live)[OTHERWISE]
    assert (fresh.asked, fresh.hit_rate, fresh.ours) == (0, None, None)
    live.ask(hit=3)
    live.runner.tick()
    told, ours = views(live)[OTHERWISE], views(live)["ours"]
    assert 0 < told.asked < ours.asked
    assert told.ours == pytest.approx(3 / told.asked, abs=1e-4)
    assert [share for share in told.history if share is not None] == [told.hit_rate]
    assert [share for share in ours.history if share is not None] != [ours.hit_rate]


def test_the_last_ones_replace_those_before(live: Live) -> None:
    weights = OtherWeights.in_force(live.graph, "the first")
    live.runner.weigh_otherwise(weights)
    live.runner.weigh_otherwise(replace(weights, said="the second"))
    assert views(live)[OTHERWISE].sentence.endswith("the second")
    assert [pool.name for pool in live.set.pools].count(OTHERWISE) == 1


def test_an_engine_that_comes_later_has_them_too(live: Live) -> None:
    live.runner.weigh_otherwise(OtherWeights.in_force(live.graph, "these"))
    live.graph.apply("f", [EngineHello("host", "", live.trace.block_size, 41, "")])
    live.runner.tick()
    assert [pool.name for pool in live.runner.sets["f"].pools].count(OTHERWISE) == 1
