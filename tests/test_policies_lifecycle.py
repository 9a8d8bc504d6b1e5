"""The lifecycle policy: what it learns of sessions, how it ranks, when it yields to LRU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kvgraph.advisor.config import PolicyConfig
from kvgraph.advisor.policies.guard import Guard
from kvgraph.advisor.policies.hazard import OLDEST, ReturnModel
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.graph.events import (
    BlocksRemoved,
    BlocksStored,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.scoring import ClassicPolicy, ScoreProfile
from kvgraph.graph.types import SourceLayer

SIZE = 16


class World:
    """A graph that the lifecycle policy ranks, with a clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.policy = LifecyclePolicy()
        self.graph = KVCacheGraph(policy=self.policy, clock=lambda: self.now)

    def turn(self, session: str, *keys: int, segments: tuple[Segment, ...] = (), **said: object) \
            -> None:  # fmt: skip
        packed, tokens = np.array(keys, dtype="<u8").tobytes(), len(keys) * SIZE
        self.graph.apply(
            "e",
            [
                RequestStarted(session, packed, tokens, 0, SIZE, session, None, segments),
                BlocksStored(packed, None, SIZE),
                RequestFinished(session, packed, tokens, tokens, "stop", session, **said),  # type: ignore[arg-type]
            ],
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.order()

    def order(self) -> list[int]:
        return self.graph.rank("e", 100_000).order.tolist()

    def teach(self, returns: Callable[[int], bool], sessions: int = 200) -> None:
        """Sessions of two turns or of one, told apart by the length of their prompts."""
        for number in range(sessions):
            first = 10_000 * (number + 1)
            length = 80 if returns(number) else 8
            self.turn(f"t{number}", *range(first, first + length))
            if returns(number):
                self.wait(20)
                self.turn(f"t{number}", *range(first, first + length + 1))
            self.wait(5)


def test_a_session_likely_to_return_outlives_a_fresher_one_that_is_not() -> None:
    world = World()
    world.teach(lambda number: number % 2 == 0)
    world.turn("long", *range(1, 81))
    world.wait(4)
    world.turn("short", *range(101, 109))
    order = world.order()
    assert order.index(101) < order.index(1)


def test_a_session_that_waited_past_all_known_gaps_is_given_up() -> None:
    world = World()
    world.teach(lambda number: True)
    world.turn("gone", *range(1, 81))
    world.wait(2000)
    world.turn("fresh", *range(101, 181))
    order = world.order()
    assert order.index(1) < order.index(180)


def test_the_rules_bind_it_like_any_policy() -> None:
    world = World()
    world.turn("a", 1, 2, 3, segments=(Segment(int(SourceLayer.RULES), 0, SIZE),))
    world.turn("b", 11, 12)
    world.turn("c", 21, 22)
    world.turn("c", 21, 23)
    world.graph.apply("e", [SessionSignal("b", ended=True)])
    ranking = world.graph.rank("e", 100)
    assert ranking.order.tolist()[:3] == [22, 12, 11], "superseded, then over, tail first"
    assert ranking.protected.tolist() == [1]


def test_a_tool_that_is_due_soon_keeps_its_session() -> None:
    world = World()
    world.turn("tool", 1, waiting_for_tool=True, expected_return_s=30.0)
    world.wait(20)
    world.turn("idle", 2)
    assert world.order() == [2, 1]


def test_a_stem_that_many_walk_outlives_each_of_them() -> None:
    world = World()
    for number in range(20):
        world.turn(f"s{number}", 1, 2, 100 + number)
        world.wait(10)
    world.turn("last", 999)
    assert world.order()[-2:] == [2, 1]


def test_a_query_teaches_nothing_and_terms_add_up() -> None:
    world = World()
    world.teach(lambda number: True, sessions=20)
    engine = world.graph.tables.engines["e"]
    key = 10_000
    everything = world.graph.tables.blocks.sample(1_000_000)
    before = world.policy.scores(world.graph.tables, engine, everything, world.now)
    explained = world.graph.explain(key)
    after = world.policy.scores(world.graph.tables, engine, everything, world.now)
    row = int(world.graph.tables.blocks.find(np.array([key], dtype=np.uint64))[0])
    assert np.array_equal(before, after)
    assert explained["policy"] == "lifecycle"
    assert explained["score"] == pytest.approx(float(before[row]), abs=0.1)


def test_scores_are_finite_for_blocks_that_nobody_claims() -> None:
    world = World()
    keys = np.arange(1, 50, dtype="<u8").tobytes()
    world.graph.apply("e", [BlocksStored(keys, None, SIZE)])
    assert world.order() == list(range(49, 0, -1))
    world.now += 10 * OLDEST
    everything = world.graph.tables.blocks.sample(1_000_000)
    scores = world.policy.scores(world.graph.tables, 0, everything, world.now)
    assert np.isfinite(scores).all()
    assert np.abs(scores).max() < 1e7


def test_a_model_learns_the_rate_that_it_is_shown() -> None:
    rng = np.random.default_rng(7)
    kind = rng.integers(0, 2, (4000, 1)).astype(np.float32)
    wait = rng.exponential(1.0, 4000) / np.where(kind[:, 0], 0.02, 0.002)
    model = ReturnModel((np.array([0.0, 1.0]),))
    model.learn(kind, np.minimum(wait, 100.0), wait < 100.0, np.ones(4000), 600)
    found = model.index(np.array([[0], [1]], dtype=np.float32), np.array([50.0, 50.0]))
    assert found == pytest.approx([0.002, 0.02], rel=0.25)


def test_a_model_learns_what_two_features_mean_only_together() -> None:
    rng = np.random.default_rng(7)
    kinds = rng.integers(0, 2, (4000, 2)).astype(np.float32)
    often = kinds[:, 0] != kinds[:, 1]
    wait = rng.exponential(1.0, 4000) / np.where(often, 0.02, 0.002)
    model = ReturnModel((np.array([0.0, 1.0]),) * 2)
    model.learn(kinds, np.minimum(wait, 100.0), wait < 100.0, np.ones(4000), 600)
    cases = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.float32)
    found = model.index(cases, np.full(4, 50.0))
    assert found == pytest.approx([0.002, 0.02, 0.02, 0.002], rel=0.4)


def test_a_model_survives_features_that_are_absent_or_far_out() -> None:
    model = ReturnModel((np.array([0.0, 1.0]), np.array([0.0, 1.0, 5.0])))
    wild = np.array([[1e30, -1e30], [np.nan, np.nan], [0.5, np.inf]], dtype=np.float32)
    model.learn(wild, np.array([0.0, 1e9, 3.0]), np.array([True, False, True]), np.ones(3), 50)
    found = model.index(wild, np.array([0.0, 10.0, 1e9]))
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_the_guard_yields_to_lru_when_the_policy_loses_what_lru_would_hold() -> None:
    world = World()
    guard = Guard()
    for number in range(40):
        world.turn(f"s{number}", 100 + number, 1000 + number)
    tables = world.graph.tables
    lost = np.arange(100, 140, dtype="<u8")
    world.graph.apply("e", [BlocksRemoved(lost.tobytes()), BlocksRemoved((lost + 900).tobytes())])
    for number in range(40):
        world.turn(f"old{number}", 5000 + 2 * number, 5001 + 2 * number)
    tables.blocks.last_attended[tables.blocks.resident(0).nonzero()[0]] -= 500.0
    sample = tables.blocks.sample(1_000_000)
    on_chain = np.ones(len(sample), dtype=np.bool_)
    guard.look(tables, 0, sample, on_chain, world.now)
    assert not guard.yields(world.now)
    guard.note(np.arange(40))
    guard.look(tables, 0, sample, on_chain, world.now)
    assert guard.yields(world.now)
    assert not guard.yields(world.now + 3600.0)


def test_while_it_yields_the_order_is_by_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.teach(lambda number: number % 2 == 0, sessions=20)
    monkeypatch.setattr(Guard, "yields", lambda self, now: True)
    blocks = world.graph.tables.blocks
    order = world.graph.rank("e", 100_000).order
    used = np.maximum(blocks.last_attended, blocks.last_hit)[blocks.find(order)]
    assert (np.diff(used) >= 0).all()


def test_configuration_names_the_policy() -> None:
    weights = ScoreProfile(hit_count=-7.0)
    classic = PolicyConfig(name="classic").policy(weights)
    assert isinstance(classic, ClassicPolicy)
    assert classic.profile is weights
    assert PolicyConfig(name="lifecycle").policy(weights).name == "lifecycle"
