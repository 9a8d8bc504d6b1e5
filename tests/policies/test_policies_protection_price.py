"""What callers name costs nobody more than it may: recorded agents, beside replays without it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from kvgraph.advisor.replay.arms import Settings, new_orders
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.graph_order import GraphOrder
from kvgraph.advisor.replay.recordings import read_sessions
from kvgraph.advisor.replay.simulator import Instance, simulate
from kvgraph.advisor.replay.trace import Ints, Trace
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import ScoreProfile
from kvgraph.graph.tables.walks import ProtectionBudget
from kvgraph.graph.wire.events import EngineHello
from kvgraph_bench.policies.policies_fleets import SHIPPED, fleet, of_tenants

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
    sessions = read_sessions(SHIPPED)
    return fleet("f", sessions, USERS, HOURS, signals, with_layers=with_layers)


def points(hits: Ints, trace: Trace) -> float:
    return float(100.0 * hits.sum() / trace.prompt_blocks)


@pytest.mark.parametrize("signals", [Signals.ALL, Signals.NONE])
def test_naming_rules_costs_little_and_the_price_is_known(signals: Signals) -> None:
    trace = recorded(signals, True)
    kept, bare = play(trace), play(trace, BARE)
    cost = points(bare.hits, trace) - points(kept.hits, trace)
    assert cost <= 0.8, "half a point, and what it takes to find out"
    assert kept.budget is not None
    assert kept.budget.points_ever == pytest.approx(cost, abs=0.3)


def test_without_a_price_the_same_words_cost_points() -> None:
    """Else these recorded agents could not tell that protection costs anything."""
    trace = recorded(Signals.ALL, True)
    hard = play(trace, ScoreProfile(protected_share=0.5))
    bare = play(trace, BARE)
    assert points(bare.hits, trace) - points(hard.hits, trace) > 1.0
    assert hard.budget is not None
    assert hard.budget.share == 0.5
    assert hard.budget.points_ever is not None
    assert hard.budget.points_ever > 0.7, "and an operator is told so"


def test_a_tenant_that_calls_everything_an_axiom_takes_next_to_nothing_from_others() -> None:
    told = recorded(Signals.ALL, False)
    lost = []
    for hostile in (False, True):
        trace = of_tenants(told, "t", hostile=hostile)
        assert trace.said is not None
        others = trace.said.tenant != 0
        hits = play(trace).hits
        lost.append(100.0 * hits[others].sum() / np.asarray(trace.prompts)[others].sum())
    assert lost[0] - lost[1] <= 0.5


def test_what_no_share_would_keep_is_no_reason_to_keep_more() -> None:
    """Many heads that nobody named are kept by no share: a trial of more would try nothing."""
    trace = recorded(Signals.NONE, True)
    found = play(trace, ScoreProfile(inferred_share=0.001), "default+layers")
    assert found.budget is not None
    assert found.budget.share <= 1 / 16


def test_lru_as_the_policy_pays_nothing_for_protection() -> None:
    trace = recorded(Signals.NONE, True)
    found = play(trace, None, "lru+hints")
    assert found.budget is not None
    assert found.budget.share < 1 / 16, "what it kept at first had a price"


def test_an_emptied_engine_begins_with_a_budget_of_no_evidence() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [EngineHello("e", "m", 16, 1001, "v")])
    column = graph.tables.engines["e"]
    graph.tables.budgets[column] = ProtectionBudget(0.5)
    graph.tables.emptied(column, graph.clock())
    assert graph.tables.kept_share(column) == 1 / 16
