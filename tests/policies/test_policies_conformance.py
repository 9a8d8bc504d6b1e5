"""What every registered policy keeps to, found by its name: a new one is tested by it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.policies.guard import Guard
from kvgraph.advisor.policies.registry import POLICIES, new_policy, set_weights
from kvgraph.advisor.replay.arms import Settings, run_arm
from kvgraph.advisor.replay.graph_order import GraphOrder
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.graph.ranking.policy import Policy, View, Weights
from kvgraph.graph.ranking.rules import SCORE_BOUND
from kvgraph.graph.types import NO_ROW, SourceLayer, as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import (
    EngineHello,
    Segment,
    SessionSignal,
)
from made_traffic import made, recent
from turns import SIZE, Told, finished, removed, spilled, started, stored

POOL = 400
LAYERS = (SourceLayer.RULES, SourceLayer.CONTEXT, SourceLayer.TOOL_RESULT)
NONSENSE = (np.nan, np.inf, -np.inf, 1e300)


class Traffic(Told):
    """Sessions that grow, wait, end or are edited, on one engine; the same seed, the same story."""

    def __init__(self, policy: Policy, seed: int = 1) -> None:
        super().__init__(EngineHello("e", "model", SIZE, POOL, "vllm"), policy=policy)
        self._dice = random.Random(seed)
        self._chains: dict[str, list[int]] = {}
        self._fresh = itertools.count(2)

    def turns(self, count: int) -> None:
        for number in range(count):
            self._turn(number)
            self.now += self._dice.choice((0.3, 2.0, 40.0))
            self.graph.rank("e", 8)  # as live: it learns from round to round

    def everything(self) -> EvictionRanking:
        return self.graph.rank("e", 10_000)

    def view(self) -> View:
        return View(self.graph.tables, self.graph.rules, 0, self.now)

    def _turn(self, number: int) -> None:
        dice = self._dice
        session = f"s{dice.randrange(12)}"
        chain = self._chains.setdefault(session, [1])
        if dice.random() < 0.1:
            del chain[dice.randrange(1, len(chain) + 1) :]  # an edited history
        found = len(chain)
        chain += [next(self._fresh) for _ in range(dice.randrange(1, 5))]
        segment = Segment(int(dice.choice(LAYERS)), 0, SIZE * len(chain), dice.random())
        name, said = f"r{number}", {"waiting_for_tool": dice.choice((True, False, None))}
        self.tell(
            started(name, *chain, found=found, session=session, segments=(segment,)),
            stored(*chain[found:], behind=chain[found - 1]),
            finished(
                name, *chain, session=session, **said, expected_return_s=dice.choice((5.0, None))
            ),
        )
        self._aside(session, chain)

    def _aside(self, session: str, chain: list[int]) -> None:
        """What else happens: copies, evictions, an end."""
        match self._dice.randrange(8):
            case 0:
                self.tell(spilled(chain[-1]))
            case 1 if len(chain) > 1:
                self.tell(removed(chain[-1]))
                del chain[-1]
            case 2:
                self.tell(SessionSignal(session, ended=True))
                del self._chains[session]


@pytest.fixture(params=POLICIES, scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def played(name: str, seed: int = 1) -> Traffic:
    traffic = Traffic(new_policy(name), seed)
    traffic.turns(120)
    return traffic


@pytest.fixture(scope="module")
def traffic(name: str) -> Traffic:
    """It is looked at only."""
    return played(name)


@pytest.fixture
def unguarded(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """It names an order also where that is the engine's own."""
    monkeypatch.setattr(traffic.graph, "policy", Renamed(traffic.graph.policy))
    return traffic


def ranked(ranking: EvictionRanking) -> list[int]:
    both: list[int] = np.concatenate([ranking.order, ranking.protected]).tolist()
    return both


def held(traffic: Traffic) -> set[int]:
    blocks = traffic.graph.tables.blocks
    return set(blocks.wire_keys(np.flatnonzero(blocks.resident(0)).astype(np.int32)).tolist())


def assert_ruled(traffic: Traffic, ranking: EvictionRanking) -> None:
    """All that is held is ranked once, and protected blocks last."""
    assert sorted(ranked(ranking)) == sorted(held(traffic))
    blocks = traffic.graph.tables.blocks
    layers = [int(each) for each in traffic.graph.rules.protected_layers]
    assert not np.isin(blocks.layer[blocks.find(ranking.order)], layers).any()


def test_it_gives_a_number_for_each_block_within_the_bound(traffic: Traffic) -> None:
    view, policy = traffic.view(), traffic.graph.policy
    everything = view.blocks.pick(view.blocks.tiers[0, : view.blocks.size] != 0)
    scores = policy.scores(view, everything)
    assert scores.shape == (len(everything),)
    assert np.isfinite(scores).all()
    assert np.abs(scores).max() <= SCORE_BOUND
    assert policy.scores(view, view.blocks.pick(view.blocks.resident(0) & False)).shape == (0,)


def test_the_same_story_gives_the_same_ranking(name: str, traffic: Traffic) -> None:
    assert ranked(played(name).everything()) == ranked(traffic.everything())


def test_asking_teaches_it_nothing(traffic: Traffic) -> None:
    view, policy = traffic.view(), traffic.graph.policy
    everything = view.blocks.pick(view.blocks.resident(0))
    before = policy.scores(view, everything)
    anywhere = view.of(NO_ROW)
    terms = sum(policy.terms(anywhere, everything).values())
    assert np.array_equal(policy.scores(view, everything), before)
    assert terms == pytest.approx(before, abs=0.1), "an explanation adds up to the score"


def test_whatever_is_held_is_ranked_once_and_protected_blocks_last(name: str) -> None:
    traffic = Traffic(Renamed(new_policy(name)), seed=2)
    traffic.turns(120)
    assert_ruled(traffic, traffic.everything())


def test_no_block_goes_before_one_that_hangs_on_it(unguarded: Traffic) -> None:
    place = {key: at for at, key in enumerate(ranked(unguarded.everything()))}
    blocks = unguarded.graph.tables.blocks
    for key, at in place.items():
        parent = int(blocks.parent[blocks.find(as_keys([key]))[0]])
        if parent != NO_ROW and int(blocks.wire_keys(parent)) in place:
            assert at < place[int(blocks.wire_keys(parent))]


def test_a_limit_gives_the_first_to_go_and_the_most_precious(unguarded: Traffic) -> None:
    whole, few = unguarded.everything(), unguarded.graph.rank("e", 7)
    assert few.order.tolist() == whole.order[:7].tolist()
    assert few.protected.tolist() == whole.protected[-7:].tolist()


def test_columns_full_of_nonsense_cost_no_rule(name: str) -> None:
    """Never so by our own events; but a policy that stumbles must not take the rules with it."""
    traffic = played(name)
    traffic.graph.policy = Renamed(traffic.graph.policy)
    blocks = traffic.graph.tables.blocks
    for nonsense in NONSENSE:
        with np.errstate(all="ignore"):
            blocks.last_attended[: blocks.size : 3] = nonsense
            blocks.importance[: blocks.size : 2] = nonsense
            ranking = traffic.everything()
        assert_ruled(traffic, ranking)


def test_an_empty_pool_and_one_block(name: str) -> None:
    traffic = Traffic(Renamed(new_policy(name)))
    assert ranked(traffic.everything()) == []
    traffic.tell(stored(7))
    assert ranked(traffic.everything()) == [7]
    traffic.tell(removed(7))
    assert ranked(traffic.everything()) == []


def test_other_weights_may_come_while_it_runs(name: str) -> None:
    traffic = Traffic(new_policy(name))
    traffic.turns(20)
    set_weights(traffic.graph.policy, Weights(importance=0.0, hit_count=0.0))
    traffic.turns(20)
    assert traffic.graph.policy.name == name


def test_under_the_guard_it_begins_with_the_engines_own_order(name: str) -> None:
    traffic = Traffic(new_policy(name))
    traffic.graph.referee = Guard(name)
    traffic.turns(3)
    assert traffic.everything().order.tolist() == []


def test_under_the_guard_it_finds_what_lru_finds(name: str, tmp_path: Path) -> None:
    """On traffic in which recency is all there is to know: never below stock."""
    trace = made(tmp_path, itertools.islice(recent(np.random.default_rng(4)), 800))
    order = GraphOrder.alone(trace, new_policy(name))
    found = simulate(trace, [Instance(POOL, order)]).hits.sum() / trace.prompt_blocks
    lru = run_arm("lru", trace, POOL, Settings()).sum() / trace.prompt_blocks
    assert found >= lru - 0.005


class Renamed:
    """A policy whose rankings name an order also where it is LRU's, which is the engine's own."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = f"a policy like {policy.name}"
        self.observe = policy.observe
        self.scores = policy.scores
        self.terms = policy.terms
