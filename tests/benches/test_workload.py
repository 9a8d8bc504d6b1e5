"""The scripted workload of ``bench tiers`` is the same every time, and says the truth of itself."""

from __future__ import annotations

import itertools

import pytest
from kvgraph_bench.serving.workload import Workload
from kvgraph_bench.tiers.tiers_workload import build_tier_workload


@pytest.fixture(scope="module")
def workload() -> Workload:
    return build_tier_workload(2048)


def test_same_arguments_give_the_same_requests(workload: Workload) -> None:
    assert build_tier_workload(2048).in_order() == workload.in_order()
    assert build_tier_workload(2048, seed=8).in_order() != workload.in_order()


def test_segments_cover_each_prompt_without_gap(workload: Workload) -> None:
    for turn in workload.in_order():
        edges = [(s["start"], s["end"]) for s in turn.segments()]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(turn.token_ids)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
