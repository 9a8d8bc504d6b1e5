"""What is ranked is a copy: in parts, of runs, and as if it were the table itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking import fronts
from kvgraph.graph.ranking.formulas import ClassicPolicy, LruPolicy
from kvgraph.graph.ranking.order import rank, resident_scores
from kvgraph.graph.ranking.policy import Policy, Scores, Terms, View
from kvgraph.graph.tables import front as front_module
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.types import Rows
from kvgraph_bench.graph.churned import churned_graph
from kvgraph_bench.graph.graphs import ENGINE, build_graph


@pytest.fixture(scope="module")
def graph() -> KVCacheGraph:
    churned, churn = churned_graph(4_000)
    for _ in range(5):  # requests that run, and tips that stand within a chain
        churned.apply(ENGINE, churn.batch(3)[:-1])
    return churned


def seen(graph: KVCacheGraph) -> View:
    return View(graph.tables, graph.rules, graph.tables.engines[ENGINE], graph.clock())


@pytest.mark.parametrize("policy", [LifecyclePolicy(), ClassicPolicy(), LruPolicy()])
def test_runs_score_as_their_blocks_do(graph: KVCacheGraph, policy: Policy) -> None:
    view = seen(graph)
    rows = view.blocks.holding(view.engine).rows
    of_blocks, of_runs = (fronts._copied(view, policy, rows, runs) for runs in (False, True))
    assert of_runs.front.size < of_blocks.front.size / 3
    for found in (lambda x: x.scores(policy), lambda x: x.whole(x.scores(policy))):
        assert np.allclose(
            of_blocks.by_block(found(of_blocks)), of_runs.by_block(found(of_runs)), atol=1e-8
        )


@pytest.mark.parametrize("part", [37, 1 << 14])
@pytest.mark.parametrize("limit", [0, 1, 100, 3_000, 10_000])
def test_a_ranking_of_runs_is_the_ranking_of_their_blocks(
    graph: KVCacheGraph, limit: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_module, "PART", part)
    view, policy = seen(graph), LifecyclePolicy()
    found = rank(view, policy, limit).order
    rows, scores = resident_scores(view, policy)
    keys = view.blocks.wire_keys(rows)
    of_key = dict(zip(keys.tolist(), scores.tolist(), strict=True))
    wanted = np.sort(scores)[::-1][:limit]
    assert len(set(found.tolist())) == len(found) == min(limit, len(rows))
    assert np.allclose([of_key[key] for key in found.tolist()], wanted, atol=1e-8)


def test_where_blocks_are_kept_blocks_are_ranked() -> None:
    graph = build_graph(640, 0)  # each of ten chains opens with a protected block
    graph.policy = LifecyclePolicy()
    ranking = graph.rank(ENGINE, 10_000)
    assert len(ranking.protected) == 10
    assert len(ranking.order) == 630
    view = seen(graph)
    rows = view.blocks.holding(view.engine).rows
    assert fronts.copied(view, graph.policy, rows).front.lengths is None


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
        """None."""
        return {}


class Detached(Own):
    """The same, of which copies may be asked."""

    def detached(self, view: View, sessions: Rows) -> Policy:
        """Itself."""
        assert not is_free(self.graph)
        return self


def test_others_get_the_lock_while_copies_are_ranked() -> None:
    graph = build_graph(640, 0)
    graph.policy = policy = Detached(graph)
    assert len(graph.rank(ENGINE, 100).order) == 100
    assert policy.asked == [True] * len(policy.asked)
    assert policy.asked


def test_a_policy_of_somebodys_own_is_asked_of_the_table_with_the_lock() -> None:
    graph = build_graph(640, 0)
    graph.policy = policy = Own(graph)
    assert len(graph.rank(ENGINE, 100).order) == 100
    assert policy.asked == [False]
