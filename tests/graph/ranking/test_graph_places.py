"""Where a block stands: in the order an engine goes by, among copies, among runs of a chain."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.graph.intents import Intent, IntentKind, Target, Verdict
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking import order
from kvgraph.graph.ranking.copies import CopyOrder
from kvgraph.graph.ranking.formulas import ClassicPolicy, LruPolicy
from kvgraph.graph.ranking.fronts import copied
from kvgraph.graph.ranking.order import _in_use, rank, resident_scores
from kvgraph.graph.ranking.policy import Policy, PolicyChoice, Rules, Scores, Terms, View
from kvgraph.graph.tables import front as front_module
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.types import HELD, Rows, SessionState, SourceLayer, Tier, as_keys
from kvgraph.graph.wire.events import BlocksRemoved, BlocksSpilled, EngineHello, Segment
from kvgraph_bench.graph.graphs import ENGINE, build_graph, churned_graph
from turns import SIZE, turn_events

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

    def policy_choices(self) -> dict[int, PolicyChoice]:
        return {0: PolicyChoice(self.trusting, 0.0, 0)}


@pytest.fixture
def graph() -> KVCacheGraph:
    """Four sessions of one block each, one after the other; the third is over."""
    now = iter(range(1_000_000))
    graph = KVCacheGraph(clock=lambda: float(next(now)))
    for key in range(1, 5):
        layer = SourceLayer.RULES if key == PROTECTED else SourceLayer.CONTEXT
        segments = (Segment(int(layer), 0, SIZE),)
        graph.apply("e", turn_events(f"s{key}", key, segments=segments, session_ended=key == OVER))
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
    graph.apply("e", turn_events("c", 11, 12, 13))
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


def filled(plain: bool = False) -> CopyOrder[int]:
    order: CopyOrder[int] = CopyOrder(plain)
    for block in range(6):
        order.add(block)
    return order


def first(order: CopyOrder[int], *advised: int) -> list[int]:
    return list(dict.fromkeys(order.first(advised)))


def test_copies_of_blocks_in_use_go_first_the_tail_before_the_head() -> None:
    order = filled()
    order.used([3, 4, 5, 77])
    assert first(order) == [5, 4, 3, 0, 1, 2]
    assert first(order, 2) == [5, 4, 3, 2, 0, 1]
    assert [order.stands_twice(block) for block in (2, 3, 77)] == [False, True, False]


def test_what_leaves_the_pool_is_the_last_to_go() -> None:
    order = filled()
    order.used([3, 4, 5])
    order.leaves(4)
    order.leaves(0)
    order.leaves(77)
    assert first(order) == [5, 3, 1, 2, 4, 0]
    assert len(order) == 6
    assert 77 not in order


def test_what_is_gone_is_forgotten() -> None:
    order = filled()
    order.used([0, 1])
    for block in (1, 3, 77):
        order.discard(block)
    assert first(order) == [0, 2, 4, 5]
    for plain in (False, True):
        assert first(CopyOrder(plain)) == []


def test_plain_is_least_recently_used_whatever_is_said() -> None:
    order = filled(plain=True)
    order.used([0, 1])
    order.leaves(2)
    assert first(order, 5) == [3, 4, 5, 1, 0, 2]


@pytest.fixture(scope="module")
def churned_fronts() -> KVCacheGraph:
    churned, churn = churned_graph(4_000)
    for _ in range(5):  # requests that run, and tips that stand within a chain
        churned.apply(ENGINE, churn.batch(3)[:-1])
    return churned


def seen(graph: KVCacheGraph) -> View:
    return View(graph.tables, graph.rules, graph.tables.engines[ENGINE], graph.clock())


@pytest.mark.parametrize("policy", [LifecyclePolicy(), ClassicPolicy(), LruPolicy()])
def test_runs_score_as_their_blocks_do(churned_fronts: KVCacheGraph, policy: Policy) -> None:
    view = seen(churned_fronts)
    rows = view.blocks.holding(view.engine).rows
    of_blocks, of_runs = (copied(view, policy, rows, runs=runs) for runs in (False, True))
    assert of_runs.front.size < of_blocks.front.size / 3
    for found in (lambda x: x.scores(policy), lambda x: x.whole(x.scores(policy))):
        assert np.allclose(
            of_blocks.by_block(found(of_blocks)), of_runs.by_block(found(of_runs)), atol=1e-8
        )


@pytest.mark.parametrize("part", [37, 1 << 14])
@pytest.mark.parametrize("limit", [0, 1, 100, 3_000, 10_000])
def test_a_ranking_of_runs_is_the_ranking_of_their_blocks(
    churned_fronts: KVCacheGraph, limit: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "PART", part)
    view, policy = seen(churned_fronts), LifecyclePolicy()
    found = rank(view, policy, limit).order
    rows, scores = resident_scores(view, policy)
    keys = view.blocks.wire_keys(rows)
    of_key = dict(zip(keys.tolist(), scores.tolist(), strict=True))
    at_rest = ~_in_use(view, Selection(view.blocks, rows))
    assert at_rest.sum() == 3_400
    wanted = np.sort(scores[at_rest])[::-1][:limit]
    assert len(set(found.tolist())) == len(found) == min(limit, 3_400)
    assert np.allclose([of_key[key] for key in found.tolist()], wanted, atol=1e-8)


def layered(seed: int, rules: Rules, policy: Policy, has_copies: bool) -> View:
    """A pool of conversations below shared rules, with layers, leases and some who run; of some
    blocks there are copies, and some of these have left the pool.
    """
    rng, clock = np.random.default_rng(seed), [1.0]
    graph = KVCacheGraph(policy=policy, rules=rules, clock=lambda: clock[0])
    graph.apply(ENGINE, [EngineHello(ENGINE, "m", SIZE, 2_001, "1")])
    heads = [rng.integers(1, 2**63, 24).tolist() for _ in range(2)]
    chains = [[*heads[at % 2], *rng.integers(1, 2**63, 100).tolist()] for at in range(16)]
    for number in range(40):
        clock[0] += 1.0
        at = int(rng.integers(len(chains)))
        keys = chains[at][: int(rng.integers(30, 124))]
        cuts = np.sort(rng.integers(0, SIZE * len(keys), 8)).tolist()
        segments = tuple(
            Segment(int(rng.integers(2, 10)), first, end, authority=int(rng.integers(3)),
                    pinned_s=50.0 if rng.random() < 0.1 else None)
            for first, end in pairwise(cuts)
        )  # fmt: skip
        rule = Segment(int(SourceLayer.RULES), 0, SIZE * 20)
        start, stored, end = turn_events(
            f"s{at}", *keys, request=f"r{number}", tenant=f"t{at % 3}", segments=(rule, *segments)
        )
        graph.apply(ENGINE, [start, stored] if number > 36 else [start, stored, end])
        if has_copies and number % 3 == 0:
            first = int(rng.integers(len(keys)))
            copied = as_keys(keys[first : first + 30]).tobytes()
            graph.apply(ENGINE, [BlocksSpilled(copied, int(Tier.WARM), 0.0)])
            graph.apply(ENGINE, [BlocksRemoved(copied[8 * int(rng.integers(20)) :])])
    clock[0] += 1.0
    return seen(graph)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [None, 0.0, 0.03, 0.3])
@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("policy", [LifecyclePolicy, ClassicPolicy, LruPolicy])
def test_where_blocks_are_kept_runs_are_ranked_as_blocks_are(
    seed: int, share: float | None, has_copies: bool, policy: Callable[[], Policy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ranks = policy()
    view = layered(seed, Rules(protected_share=share), ranks, has_copies)
    rows = view.blocks.holding(view.engine, HELD).rows
    assert copied(view, ranks, rows).front.size < len(rows) * 2 / 3
    limits = (50, 5_000)
    of_runs = [rank(view, ranks, limit) for limit in limits]
    monkeypatch.setattr(order, "copied", partial(copied, runs=False))
    for found, limit in zip(of_runs, limits, strict=True):
        of_blocks = rank(view, ranks, limit)
        for name in ("order", "protected", "spill_first", "demote_first"):
            one, other = getattr(found, name).tolist(), getattr(of_blocks, name).tolist()
            assert one == other, name
        assert share == 0.0 or len(found.protected)
        has_demoted = has_copies and ranks.name != LruPolicy.name
        assert bool(len(found.demote_first)) == has_demoted


def is_free(graph: KVCacheGraph) -> bool:
    """Whether another thread gets the graph's lock now."""
    got = list[bool]()

    def ask() -> None:
        got.append(graph.lock.acquire(blocking=False))
        if got[0]:
            graph.lock.release()

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    return got[0]


class Own:
    """A policy of somebody's own, which reads what it likes."""

    name = "own"

    def __init__(self, graph: KVCacheGraph) -> None:
        self.graph, self.asked = graph, list[bool]()

    def observe(self, view: View) -> None:
        """Learn nothing."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """Seconds since each was stored."""
        self.asked.append(is_free(self.graph))
        return np.asarray(view.now - picked.of(view.blocks.created))

    def terms(self, view: View, picked: Selection) -> Terms:
        return {}


class Detached(Own):
    """The same, of which copies may be asked."""

    def detached(self, view: View, sessions: Rows) -> Policy:
        assert not is_free(self.graph)
        return self


class Learning(Detached):
    """The same, which learns for a long time."""

    def look(self, view: View) -> Callable[[], None]:
        self.asked.append(is_free(self.graph))
        return lambda: self.asked.append(is_free(self.graph))


@pytest.mark.parametrize(
    ("kind", "free"),
    [
        pytest.param(Own, [False], id="a policy of somebody's own is asked with the lock"),
        pytest.param(Detached, [True], id="copies are ranked without it"),
        pytest.param(Learning, [False, True], id="others get it while a policy learns"),
    ],
)
def test_others_get_the_lock_while(kind: type[Own], free: list[bool]) -> None:
    graph = build_graph(640, 0)
    graph.policy = policy = kind(graph)
    assert len(graph.rank(ENGINE, 100).order) == 100
    assert policy.asked[: len(free)] == free
    assert set(policy.asked[len(free) :]) <= {True}
