"""The figures of ``bench agents``, from results that were not measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvgraph.bench.agents.agents_arms import AgentRun
from kvgraph.bench.agents.agents_figures import AgentsResult
from kvgraph.bench.agents.agents_lab import BELADY, LRU, LabRun, default_policy
from kvgraph.bench.agents.agents_pass import AgentPass
from kvgraph.bench.serving.completions import Answer
from kvgraph.bench.serving.own_counts import OwnCounts
from kvgraph.bench.serving.passes import PassResult
from kvgraph.bench.serving.workload import BLOCK


def run(arm: str, pool: int, cached: int, host: int = 0) -> AgentRun:
    """An arm that found ``cached`` of 1,000 prompt tokens."""
    answer = Answer("a/0", "", 0.1, 0.2, 1000, cached, 3)
    passed = AgentPass(PassResult((answer,), 1.0), (0.0,))
    own = OwnCounts({}, mean_served_s=0.15)
    return AgentRun(arm, f"{arm}-{pool}", pool, host, 0.1, passed, own)


def lab(policy: str, pool: int, blocks: int) -> LabRun:
    """A policy of the lab that found ``blocks`` blocks of 100."""
    return LabRun(policy, pool, np.array([blocks], dtype=np.int32), 100 * BLOCK)


def result(*runs: AgentRun, labs: tuple[LabRun, ...]) -> AgentsResult:
    return AgentsResult(Path(), (), (200, 100), 0.1, runs, labs)


def test_shares_are_of_the_way_from_stock_to_belady() -> None:
    found = result(
        run("stock", 200, 600), run("stock", 200, 590), run("stock", 200, 610),
        run("default", 200, 650), run("hints", 200, 710),
        labs=(lab(LRU, 200, 60), lab(BELADY, 200, 80)),
    ).figures().figures  # fmt: skip
    assert found["engine_inferred_share"].value == pytest.approx(0.25)
    assert found["engine_signalled_share"].value == pytest.approx(0.55)
    assert found["stock_share"].value == pytest.approx(0.6)
    assert found["stock_share"].n == 3
    assert "lab_live_difference" not in found, "no policy was played in the lab"


def test_the_worst_is_against_the_worst_of_stock_on_the_same_pool() -> None:
    found = result(
        run("stock", 200, 600), run("stock", 200, 590), run("stock", 100, 400),
        run("default", 200, 592), run("hints", 200, 700), run("default", 100, 397),
        labs=(lab(LRU, 200, 60), lab(BELADY, 200, 80)),
    ).figures().figures  # fmt: skip
    assert found["engine_worst_points"].value == pytest.approx(-0.3)


def test_lab_and_engine_are_compared_by_what_a_policy_gains() -> None:
    labs = (lab(LRU, 200, 61), lab(BELADY, 200, 80), lab(default_policy(False), 200, 71))
    found = result(run("stock", 200, 600), run("default", 200, 680), labs=labs).figures().figures
    assert found["lab_live_difference"].value == pytest.approx(8 - 10)


def test_tiers_are_compared_with_a_plain_host_tier_of_equal_size() -> None:
    found = result(
        run("stock", 200, 600),
        run("host_lru", 200, 700, 100), run("tiers", 200, 760, 100),
        run("quiet_tiers", 200, 730, 100),
        run("host_lru", 200, 800, 200), run("tiers", 200, 810, 200),
        run("host_lru", 200, 900, 400), run("tiers", 200, 890, 400),
        labs=(lab(LRU, 200, 60), lab(BELADY, 200, 80)),
    ).figures().figures  # fmt: skip
    assert found["tiers_recomputed_ratio"].value == pytest.approx(240 / 300)
    assert found["tiers_recomputed_worst"].value == pytest.approx(110 / 100)
    assert found["quiet_tiers_recomputed_ratio"].value == pytest.approx(270 / 300)


def test_an_engine_takes_less_time_than_its_client_waits() -> None:
    assert run("default", 200, 680).took_s() == [pytest.approx(0.15)]
    fast, slow = Answer("a/0", "", 0.1, 0.02, 10, 0, 3), Answer("a/1", "", 0.1, 0.3, 10, 0, 3)
    both = AgentPass(PassResult((fast, slow), 1.0), (0.0, 0.1))
    took = AgentRun("default", "", 200, 0, 0.1, both, OwnCounts({}, mean_served_s=0.13)).took_s()
    assert took == [0.0, pytest.approx(0.27)]
