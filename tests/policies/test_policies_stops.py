"""What a policy is told of answers' ends, finds on traffic of other kinds, and by other weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.page.shadows import ShadowView, shadows_view
from kvgraph.advisor.policies.waits import FEATURES, features
from kvgraph.advisor.replay.arms import Settings, run_arm
from kvgraph.advisor.replay.trace import Trace
from kvgraph.advisor.shadows.pools import OTHERWISE, OtherWeights
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import Weights
from kvgraph.graph.types import NO_ROW, SessionState, StopReason
from kvgraph.graph.wire.events import CUT_AT_A_LENGTH, EngineHello, RequestFinished, RequestStarted
from live_shadows import Live
from made_traffic import Maker, agents, chats, made, recent, turned


@pytest.mark.parametrize(
    ("reason", "waiting", "stop", "state"),
    [
        ("finished_stopped", True, StopReason.TOOL_CALL, SessionState.WAITING_FOR_TOOL),
        ("finished_stopped", False, StopReason.END_OF_TURN, SessionState.IDLE),
        ("finished_stopped", None, StopReason.UNKNOWN, SessionState.IDLE),
        ("finished_aborted", None, StopReason.UNKNOWN, SessionState.IDLE),
        (CUT_AT_A_LENGTH, None, StopReason.TRUNCATED, SessionState.IDLE),
        (CUT_AT_A_LENGTH, True, StopReason.TOOL_CALL, SessionState.WAITING_FOR_TOOL),
        (CUT_AT_A_LENGTH, False, StopReason.END_OF_TURN, SessionState.IDLE),
    ],
)
def test_what_is_said_stands_over_what_a_length_shows(
    reason: str, waiting: bool | None, stop: StopReason, state: int
) -> None:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    end = RequestFinished("r", b"", 8, 16, reason, "s", waiting_for_tool=waiting)
    graph.apply("e", [RequestStarted("r", b"", 8, 0, 16, "s"), end])
    sessions = graph.tables.sessions
    row = sessions.find("s", NO_ROW)
    assert sessions.stop[row] == stop
    assert sessions.state[row] == state


def test_to_the_policy_a_cut_answer_is_one_of_which_nothing_is_said() -> None:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    for name, reason in (("cut", CUT_AT_A_LENGTH), ("silent", "finished_stopped")):
        end = RequestFinished(name, b"", 8, 16, reason, name)
        graph.apply("e", [RequestStarted(name, b"", 8, 0, 16, name), end])
    cut, silent = features(graph.tables.sessions, np.array([0, 1]))
    np.testing.assert_array_equal(cut, silent)
    assert np.isnan(cut[FEATURES.index("stop")])


SIMPLE = ("lru", "lfu-history", "session-ttl")
CAPACITY = 400


def rate(trace: Trace, arm: str) -> float:
    return float(run_arm(arm, trace, CAPACITY, Settings()).sum()) / trace.prompt_blocks


MAKERS: dict[str, Maker] = {
    "chats": chats,
    "slow chats": partial(chats, pace=5.0),
    "fast chats": partial(chats, pace=0.2),
    "agents": agents,
    "turned": turned,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_it_is_never_worse_than_simple_policies(tmp_path: Path, kind: str) -> None:
    trace = made(tmp_path, MAKERS[kind](np.random.default_rng(11)))
    best = max(rate(trace, arm) for arm in SIMPLE)
    assert rate(trace, "lifecycle") >= best - 0.002


@pytest.mark.large  # one such traffic is in test_policies_conformance.py
@pytest.mark.parametrize("seed", [1, 2])
def test_it_stays_with_lru_where_recency_is_all_there_is_to_know(tmp_path: Path, seed: int) -> None:
    trace = made(tmp_path, recent(np.random.default_rng(seed)))
    assert rate(trace, "lifecycle") >= rate(trace, "lru") - 0.005


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


def test_other_weights_find_something_else_and_those_after_them_begin_anew(live: Live) -> None:
    before = live.graph.policy.weights
    other = replace(OtherWeights.in_force(live.graph, "nonsense"), weights=NEWEST_FIRST)
    live.runner.weigh_otherwise(other)
    live.play()
    shown = views(live)
    assert shown[OTHERWISE].found < shown["classic"].found
    assert live.graph.policy.weights is before
    live.now = (live.now // 10.0 + 1) * 10.0
    live.runner.weigh_otherwise(OtherWeights.in_force(live.graph, "these"))
    assert [pool.name for pool in live.set.pools].count(OTHERWISE) == 1
    fresh = views(live)[OTHERWISE]
    assert fresh.sentence.endswith("these")
    assert (fresh.asked, fresh.hit_rate, fresh.ours) == (0, None, None)
    live.ask(hit=3)
    live.runner.tick()
    told, ours = views(live)[OTHERWISE], views(live)["ours"]
    assert 0 < told.asked < ours.asked
    assert told.ours == pytest.approx(3 / told.asked, abs=1e-4)
    assert [share for share in told.history if share is not None] == [told.hit_rate]
    assert [share for share in ours.history if share is not None] != [ours.hit_rate]


def test_an_engine_that_comes_later_has_them_too(live: Live) -> None:
    live.runner.weigh_otherwise(OtherWeights.in_force(live.graph, "these"))
    live.graph.apply("f", [EngineHello("host", "", live.trace.block_size, 41, "")])
    live.runner.tick()
    assert [pool.name for pool in live.runner.sets["f"].pools].count(OTHERWISE) == 1
