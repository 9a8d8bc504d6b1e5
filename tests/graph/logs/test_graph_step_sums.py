"""Sums over steps of time: questions change nothing, and late counts find their own step."""

from __future__ import annotations

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.history import StepSums
from kvgraph.graph.wire.events import RequestFinished, RequestStarted


@pytest.fixture
def sums() -> StepSums:
    return StepSums(("a", "b"), 10.0, 4)


def test_a_question_begins_no_step(sums: StepSums) -> None:
    sums.add((1, 2), 5.0)
    starts, counted = sums.series(25.0)
    assert (starts, counted.tolist()) == ([0.0, 10.0, 20.0], [[1, 2], [0, 0], [0, 0]])
    assert sums.series(5.0)[0] == [0.0]


def test_what_is_heard_late_counts_in_its_own_step(sums: StepSums) -> None:
    sums.add((1, 0), 5.0)
    sums.add((2, 0), 25.0)
    sums.add((4, 0), 15.0)
    assert sums.series(25.0)[1][:, 0].tolist() == [1, 4, 2]
    sums.add((8, 0), -5.0)
    assert sums.series(25.0)[1][:, 0].tolist() == [8, 1, 4, 2]
    sums.add((16, 0), -500.0)  # no longer remembered: the oldest that is
    assert sums.series(25.0)[1][:, 0].tolist() == [24, 1, 4, 2]


def test_a_step_that_left_the_ring_does_not_come_back(sums: StepSums) -> None:
    sums.add((7, 7), 5.0)
    assert sums.series(45.0)[1].sum() == 0
    assert sums.last(1000.0, 1e6) == {"a": 0, "b": 0}
    sums.add((1, 1), 55.0)
    assert sums.series(55.0)[1].tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_many_steps_are_told_as_few() -> None:
    sums = StepSums(("a", "b"), 10.0, 8)
    for step in range(3, 11):
        sums.add((step, 1), 10.0 * step)
    assert sums.merged(100.0, 8)[:2] == (10.0, [10.0 * step for step in range(3, 11)])
    step_s, starts, counted = sums.merged(100.0, 4)
    assert (step_s, starts) == (20.0, [20.0, 40.0, 60.0, 80.0, 100.0])
    assert counted["a"].tolist() == [3, 9, 13, 17, 10]
    assert sums.merged(100.0, 3)[:2] == (40.0, [0.0, 40.0, 80.0])
    assert StepSums(("a",), 10.0, 8).merged(5.0, 2)[1] == []


def test_columns_have_names(sums: StepSums) -> None:
    assert sums.series_by_name(0.0)[1]["b"].tolist() == []
    sums.add((1, 2), 5.0)
    assert sums.series_by_name(15.0)[1]["b"].tolist() == [2, 0]


def test_a_sum_stays_at_its_top_whatever_requests_claim() -> None:
    sums = StepSums(("asked", "found"), 10.0, 4)
    for now in (1.0, 2.0, 11.0, 12.0, 12.5):
        sums.add(((1 << 31) - 1, 1), now)
    sums.add((0, 1), 21.0)
    assert sums.last(100.0, 21.0) == {"asked": 2 * ((1 << 31) - 1) + (1 << 32) - 1, "found": 6}


def test_requests_that_claim_absurd_lengths_cost_the_next_ones_nothing() -> None:
    now = [1.0]
    graph, most = KVCacheGraph(clock=lambda: now[0]), (1 << 31) - 1
    for number in range(9):
        now[0] += 4.0
        started = RequestStarted(f"r{number}", b"\1" * 8, most, 0, 16, "s")
        graph.apply(
            "e", [started, RequestFinished(f"r{number}", b"\1" * 8, most, most, "stop", "s")]
        )
    assert graph.counters["requests"] == 9
