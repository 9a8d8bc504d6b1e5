"""The seed's workload and the lab's fleets."""

from __future__ import annotations

import pytest
from kvgraph.advisor.replay.plan import FleetRouting
from kvgraph.advisor.replay.simulator import HostTier, Instance, LruOrder, simulate
from kvgraph_bench.lab.seed_workload import (
    ARMS,
    SEED_FACTS,
    FleetArm,
    FleetSize,
    compare_arms,
    endless,
    run_fleet,
    seed_workload,
    workload_facts,
)
from made_trace import chat_trace


def test_the_generators_figures_are_measured_against_the_seeds() -> None:
    trace = seed_workload()
    assert len(trace) == 1000
    facts = workload_facts(trace, 8, 550)
    errors = facts.errors(SEED_FACTS)
    assert len(errors) == 11
    assert errors["lru"] == pytest.approx(abs(facts.lru / 0.433 - 1))
    assert 0 < facts.lru < facts.infinite < 1
    assert max(errors.values()) <= 0.05


def test_the_generator_is_deterministic_and_its_seed_counts() -> None:
    one, same, other = seed_workload(1), seed_workload(1), seed_workload(2)
    assert (one.blocks == same.blocks).all()
    assert (one.at == same.at).all()
    assert len(one.blocks) != len(other.blocks) or (one.blocks != other.blocks).any()


def test_arms_are_named_by_their_levers() -> None:
    assert [arm.name for arm in ARMS] == ["none", "A", "B", "C", "AB", "AC", "BC", "ABC"]


def test_one_endless_engine_finds_what_an_endless_cache_does() -> None:
    trace = chat_trace(200)
    size = FleetSize(1, trace.num_blocks)
    for arm in (FleetArm(), FleetArm(home=True)):
        assert run_fleet(trace, size, arm).share == pytest.approx(endless(trace))


def test_a_shared_store_that_forgets_nothing_makes_engines_one() -> None:
    trace = chat_trace(200)
    store = HostTier(trace.num_blocks)
    pools = [Instance(60, LruOrder(), host=store) for _ in range(4)]
    routing = FleetRouting(trace, store)
    outcome = simulate(trace, pools, router=routing)
    found = (outcome.hits + outcome.warmed).sum() / trace.prompt_blocks
    assert found > 0.9 * endless(trace)


def test_the_arms_are_the_same_in_any_number_of_processes() -> None:
    trace, size = chat_trace(120), FleetSize(3, 80)
    arms = (FleetArm(), FleetArm(home=True))
    assert compare_arms(trace, size, arms) == compare_arms(trace, size, arms, processes=2)


def test_queues_hold_back_what_would_wait_too_long() -> None:
    """All turns at once: homes overflow, and later turns yield."""
    trace = chat_trace(200)
    routing = FleetRouting(trace, tokens_per_s=10.0)
    simulate(trace, [Instance(500, LruOrder()) for _ in range(3)], router=routing)
    assert routing.queues is not None
    waited = routing.queues.waited(3)
    assert (waited > 0).all()
    assert routing.router.counts["home_overloaded"] > 0
