"""The lifecycle policy: what it learns of sessions, how it ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from kvgraph.advisor.config.sections import PolicyConfig
from kvgraph.advisor.policies.hazard import AGES, OLDEST, Cohort, Floats, ReturnModel, gittins
from kvgraph.advisor.policies.lifecycle import Drift, LifecyclePolicy, Returns, Waiting
from kvgraph.advisor.policies.waits import FEATURES, fitted
from kvgraph.advisor.replay.arms import Settings, new_orders
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.graph_order import GraphOrder
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.trace import Ints, Trace
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import ScoreProfile, View, Weights
from kvgraph.graph.tables.protection import ProtectionBudget
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire.events import AnyEvent, EngineHello, Segment
from kvgraph_bench.recorded.agents_requests import SESSIONS
from kvgraph_bench.recorded.lab_fleets import fleet, of_tenants
from turns import SIZE, Told, stored


class World(Told):
    """A graph that the lifecycle policy ranks, with a clock that tests move."""

    def __init__(self) -> None:
        self.returns = Returns()
        self.policy = LifecyclePolicy(returns=self.returns)
        super().__init__(policy=self.policy)

    def tell(self, *events: AnyEvent, engine: str = "e") -> None:
        self.graph.apply(engine, list(events))  # of which there are many

    def view(self) -> View:
        return View(self.graph.tables, self.graph.rules, 0, self.now)

    def scores(self) -> Floats:
        """Of all blocks."""
        blocks = self.graph.tables.blocks
        return self.policy.scores(self.view(), blocks.pick(blocks.alive[: blocks.size]))

    def ranked(self) -> list[int]:
        return self.order(limit=100_000)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ranked()

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
    order = world.ranked()
    assert order.index(101) < order.index(1)


def test_a_session_that_waited_past_all_known_gaps_is_given_up() -> None:
    world = World()
    world.teach(lambda number: True)
    world.turn("gone", *range(1, 81))
    world.wait(2000)
    world.turn("fresh", *range(101, 181))
    order = world.ranked()
    assert order.index(1) < order.index(180)


def test_a_tool_that_is_due_soon_keeps_its_session() -> None:
    world = World()
    world.turn("soon", 1, waiting_for_tool=True, expected_return_s=10.0)
    world.turn("late", 2, waiting_for_tool=True, expected_return_s=3000.0)
    assert world.ranked() == [2, 1]


def test_of_sessions_that_are_over_the_one_that_ended_first_goes_first() -> None:
    """As under LRU: whoever says it wrongly of all sessions changes nothing between them."""
    world = World()
    world.turn("early", 1, 2, session_ended=True)
    world.now += 60
    world.turn("late", 11, 12, 13, 14, session_ended=True)
    assert world.ranked() == [2, 1, 14, 13, 12, 11]


def test_a_stem_that_many_walk_outlives_each_of_them() -> None:
    world = World()
    for number in range(20):
        world.turn(f"s{number}", 1, 2, 100 + number)
        world.wait(10)
    world.turn("last", 999)
    assert world.ranked()[-2:] == [2, 1]


def test_scores_are_finite_for_blocks_that_nobody_claims() -> None:
    world = World()
    world.tell(stored(*range(1, 50)))
    assert world.ranked() == list(range(49, 0, -1))
    world.now += 10 * OLDEST
    assert np.isfinite(world.scores()).all()
    assert np.abs(world.scores()).max() < 1e7


def test_what_is_learned_is_what_was_seen_whatever_comes_before_it_is_learned() -> None:
    worlds = World(), World()
    views = list[View]()
    for world in worlds:
        for number in range(100):
            world.turn(f"s{number}", 1 + number)
            world.now += 1.0
        views.append(world.view())
    worlds[0].policy.observe(views[0])
    learn = worlds[1].policy.look(views[1])
    for number in range(300):
        worlds[1].turn(f"s{number}", 1 + number, 1_000 + number)
    worlds[1].policy.look(views[1])
    learn()
    one, other = (world.returns.stranger_rates() for world in worlds)
    assert np.array_equal(one, other)
    assert not np.array_equal(one, Returns().stranger_rates())


def test_rounds_of_many_engines_learn_no_faster_than_those_of_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = list[int]()
    monkeypatch.setattr(ReturnModel, "take", lambda _, drawn, waits: taken.append(len(drawn.age)))
    world = World()

    def rounds(first: int) -> int:
        for number in range(first, first + 600):
            world.turn(f"s{number}", 1 + number, 10_000 + number)
            view = View(world.graph.tables, world.graph.rules, 0, world.now)
            world.policy.observe(view)
        return sum(taken) // 256

    in_a_moment = rounds(0)
    world.now += 0.5
    assert 0 < in_a_moment <= 64
    assert in_a_moment < rounds(600) <= in_a_moment + 32


def model(kinds: int) -> ReturnModel:
    scales = np.stack([np.full(kinds, 0.5), np.full(kinds, 0.5)]).astype(np.float32)
    return ReturnModel(scales, step=3e-3, pull=1.0)


@pytest.mark.parametrize(
    ("kinds", "often", "rounds", "within"),
    [
        pytest.param(1, lambda kind: kind[:, 0] == 1, 600, 0.4, id="the rate that it is shown"),
        pytest.param(
            2, lambda kind: kind[:, 0] != kind[:, 1], 900, 0.5, id="what two mean only together"
        ),
    ],
)
def test_a_model_learns(
    kinds: int, often: Callable[[Floats], Floats], rounds: int, within: float
) -> None:
    rng = np.random.default_rng(7)
    kind = rng.integers(0, 2, (4000, kinds)).astype(np.float32)
    wait = rng.exponential(1.0, 4000) / np.where(often(kind), 0.02, 0.002)
    learner = model(kinds)
    cohort = Cohort(kind.__getitem__, np.minimum(wait, 100.0), wait < 100.0, np.ones(4000))
    learner.learn(cohort, rounds)
    cases = np.array(list(itertools.product((0, 1), repeat=kinds)), dtype=np.float32)
    at_50 = np.exp(learner.log_rates(cases)[:, np.searchsorted(AGES, 50.0) - 1])
    assert at_50 == pytest.approx(np.where(often(cases), 0.02, 0.002), rel=within)


def test_a_model_survives_features_that_are_absent_or_far_out() -> None:
    learner = model(2)
    wild = np.array([[1e6, -1e6], [np.nan, np.nan], [0.5, 1e4]], dtype=np.float32)
    age, returned = np.array([0.0, 1e9, 3.0]), np.array([True, False, True])
    learner.learn(Cohort(wild.__getitem__, age, returned, np.ones(3)), 50)
    found = Waiting(learner.log_rates(wild), np.array([0.0, 10.0, 1e9])).rates()
    assert np.isfinite(found).all()
    assert (found > 0).all()


def test_the_index_is_the_best_rate_of_all_that_one_may_wait() -> None:
    rng = np.random.default_rng(11)
    rates, borders = np.exp(rng.uniform(-9, 0, (40, len(AGES) - 1))), AGES[:-1]
    found = gittins(rates, borders[rng.integers(0, len(borders), 40)])
    rng = np.random.default_rng(11)
    rng.uniform(-9, 0, rates.shape)
    for rate, now, index in zip(rates, rng.integers(0, len(borders), 40), found, strict=True):
        left, spent, best = 1.0, 0.0, 0.0
        for each, width in zip(rate[now:], np.diff(AGES)[now:], strict=True):
            stays = np.exp(-each * width)
            spent += left * (1.0 - stays) / each
            left *= stays
            best = max(best, (1.0 - left) / spent)
        assert index == pytest.approx(best)


def test_who_waits_longer_than_all_ages_is_given_up_not_kept() -> None:
    """In the last bin the rate has nowhere to move on to."""
    rates = np.full((3, len(AGES) - 1), 1e-3)
    found = gittins(rates, np.array([OLDEST / 2 + 1, 0.9 * OLDEST, OLDEST - 1e-3]))
    assert found == pytest.approx([1e-3] * 3, rel=1e-3)


@pytest.mark.parametrize("speed", [1.0, 14.0, 1 / 14.0])
def test_the_clock_is_relative(speed: float) -> None:
    """The same sessions, faster or slower, are ranked alike."""
    world = World()
    rng = np.random.default_rng(3)
    for number in range(150):
        first = 10_000 * (number + 1)
        for turn in range(int(rng.integers(1, 6))):
            world.turn(f"t{number}", *range(first, first + 10 + turn))
            world.wait(float(rng.lognormal(3.1, 1.0)) / speed)
    assert world.returns.speed == pytest.approx(speed, rel=0.35)


@pytest.mark.parametrize("size", [1.0, 64.0, 1 / 8.0])
def test_sizes_are_relative(size: float) -> None:
    """What was learned of long contexts is said of short ones, where all are short."""
    places = [FEATURES.index(name) for name in ("prompt", "written", "mean_written", "grown")]
    tokens = np.array([64_000, 640, 1280, -6400])

    def logarithms(tokens: Floats) -> Floats:
        grown = np.sign(tokens[3]) * np.log1p(abs(tokens[3]) / 10)
        return np.array([np.log(tokens[0]), *np.log1p(tokens[1:3]), grown])

    known = np.full((1, len(FEATURES)), np.nan, dtype=np.float32)
    known[0, places] = logarithms(tokens / size)
    drift = Drift(np.log(64_000))  # without slack
    drift.note(np.full(10_000, np.log(64_000 / size)))
    found = fitted(known, 0.0, drift.shift)[0, places]
    assert found == pytest.approx(logarithms(tokens), rel=2e-3)


def test_only_what_lies_beyond_the_slack_is_stretched() -> None:
    for mean, shift in ((10.0, 0.0), (11.4, 0.0), (8.6, 0.0), (13.0, -1.5), (7.0, 1.5)):
        drift = Drift(10.0, slack=1.5)
        drift.note(np.full(100_000, mean))
        assert drift.shift == pytest.approx(shift, abs=0.01)


def test_configuration_names_the_policy() -> None:
    weights = Weights(hit_count=-7.0)
    classic = PolicyConfig(name="classic").policy(weights)
    assert isinstance(classic, ClassicPolicy)
    assert classic.weights is weights
    assert PolicyConfig(name="lifecycle").policy(weights).name == "lifecycle"


def test_weights_steer_and_cannot_drown_time() -> None:
    """Importance decides between equals, by the configured weight; never against who returns."""
    world = World()
    low, high = (Segment(int(SourceLayer.CONTEXT), 0, SIZE, worth) for worth in (0.0, 1.0))
    world.turn("a", 1, segments=(high,))
    world.turn("b", 2, segments=(low,))
    assert world.ranked() == [2, 1]
    world.policy.weights = Weights(importance=20.0)
    assert world.ranked() == [1, 2]
    world.policy.weights = Weights(importance=-1e6)
    world.wait(3000)
    world.turn("fresh", 3, segments=(low,))
    assert world.ranked()[-1] == 3


CAPACITY = 1000
USERS, HOURS = 20, 0.7
BARE = ScoreProfile(protected_layers=frozenset())


class Found(NamedTuple):
    hits: Ints
    budget: ProtectionBudget | None


def play(trace: Trace, profile: ScoreProfile | None = None, arm: str = "default+hints") -> Found:
    (order,) = new_orders(arm, trace, Settings(profile=profile), 1)
    assert isinstance(order, GraphOrder)
    hits = simulate(trace, [Instance(CAPACITY, order)]).hits
    return Found(hits, order.sidecar.graph.tables.budgets.get(0))


@cache
def recorded(signals: Signals, with_layers: bool) -> Trace:
    sessions = read_sessions(SESSIONS)
    return fleet("f", sessions, USERS, HOURS, signals, with_layers=with_layers)


@cache
def unprotected(signals: Signals) -> Found:
    return play(recorded(signals, True), BARE)


def points(hits: Ints, trace: Trace) -> float:
    return float(100.0 * hits.sum() / trace.prompt_blocks)


@pytest.mark.parametrize("signals", [Signals.ALL, Signals.NONE])
def test_naming_rules_costs_little_and_the_price_is_known(signals: Signals) -> None:
    trace = recorded(signals, True)
    kept, bare = play(trace), unprotected(signals)
    cost = points(bare.hits, trace) - points(kept.hits, trace)
    assert cost <= 0.8, "half a point, and what it takes to find out"
    assert kept.budget.points_ever == pytest.approx(cost, abs=0.3)


def test_without_a_price_the_same_words_cost_points() -> None:
    """Else these recorded agents could not tell that protection costs anything."""
    trace = recorded(Signals.ALL, True)
    hard = play(trace, ScoreProfile(protected_share=0.5))
    bare = unprotected(Signals.ALL)
    assert points(bare.hits, trace) - points(hard.hits, trace) > 1.0
    assert hard.budget.share == 0.5
    assert hard.budget.points_ever is not None
    assert hard.budget.points_ever > 0.7, "and an operator is told so"


def test_a_tenant_that_calls_everything_an_axiom_takes_next_to_nothing_from_others() -> None:
    told = recorded(Signals.ALL, False)
    lost = []
    for hostile in (False, True):
        trace = of_tenants(told, "t", hostile=hostile)
        others = trace.said.tenant != 0
        hits = play(trace).hits
        lost.append(100.0 * hits[others].sum() / np.asarray(trace.prompts)[others].sum())
    assert lost[0] - lost[1] <= 0.5


def test_what_no_share_would_keep_is_no_reason_to_keep_more() -> None:
    """Many heads that nobody named are kept by no share: a trial of more would try nothing."""
    trace = recorded(Signals.NONE, True)
    found = play(trace, ScoreProfile(inferred_share=0.001), "default+layers")
    assert found.budget.share <= 1 / 16


def test_lru_as_the_policy_pays_nothing_for_protection() -> None:
    trace = recorded(Signals.NONE, True)
    found = play(trace, None, "lru+hints")
    assert found.budget.share < 1 / 16, "what it kept at first had a price"


def test_an_emptied_engine_begins_with_a_budget_of_no_evidence() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [EngineHello("e", "m", 16, 1001, "v")])
    column = graph.tables.engines["e"]
    graph.tables.budgets[column] = ProtectionBudget(0.5)
    graph.tables.emptied(column, graph.clock())
    assert graph.tables.kept_share(column) == 1 / 16
