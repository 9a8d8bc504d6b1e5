"""The figures of ``bench agents``, from results that were not measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvgraph_bench.agents.agents_arms import AgentRun
from kvgraph_bench.agents.agents_figures import AgentsResult
from kvgraph_bench.agents.agents_lab import BELADY, LRU, LabRun
from kvgraph_bench.agents.agents_pass import AgentPass
from kvgraph_bench.serving.completions import Answer
from kvgraph_bench.serving.own_counts import OwnCounts
from kvgraph_bench.serving.passes import PassResult
from kvgraph_bench.serving.workload import BLOCK


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
