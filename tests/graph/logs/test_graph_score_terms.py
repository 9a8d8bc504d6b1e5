"""The terms of what was evicted: as ranked, bounded, and never those of another block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.evictions import RING_BYTES, TermRing, TermsAtRanking
from kvgraph.graph.logs.history import StepSums
from kvgraph.graph.ranking.order import front_terms
from kvgraph.graph.ranking.policy import View
from kvgraph.graph.wire.events import RequestFinished, RequestStarted
from small_world import World


def terms_of(world: World, evictions: int) -> list[dict[str, float] | None]:
    return [world.history.evictions[0].terms.of(number) for number in range(evictions)]


def terms(**columns: Sequence[float]) -> TermsAtRanking:
    return TermsAtRanking.of({name: np.array(each, float) for name, each in columns.items()})


def test_each_block_keeps_the_terms_that_it_was_ranked_by(world: World) -> None:
    world.serve(1, 2, 3)
    world.rank(3, 1, return_time=[9000.0, 7000.0], sharing=[0.0, -300.0])
    world.evict(1, 2, 3)
    found = terms_of(world, 3)
    assert found[0] == {"return_time": 7000.0, "sharing": -300.0}
    assert found[1] is None, "no ranking named it"
    assert found[2] == {"return_time": 9000.0, "sharing": 0.0}


def test_terms_hold_until_the_next_are_asked_for(world: World) -> None:
    world.serve(1, 2, 3)
    world.rank(3, 2, age=[5.0, 4.0])
    assert not world.history.wants_terms(0, world.now + 0.9)
    world.history.ranked(0, world.ranking(2, 1), (), None)
    world.evict(1, 2, 3)
    found = terms_of(world, 3)
    assert found[0] is None, "it was not in the ranking whose terms are known"
    assert found[1] == {"age": 4.0}
    assert found[2] is None, "the ranking in force does not name it: they decided nothing"
    assert world.history.wants_terms(0, world.now + 1.0)


def test_where_the_engines_own_order_holds_no_terms_are_told(world: World) -> None:
    world.serve(1, 2)
    world.rank(1, age=[5.0])
    world.rank()
    world.evict(1, 2)
    assert terms_of(world, 2) == [None, None]


def test_a_policys_terms_add_up_to_the_order_of_its_ranking(world: World) -> None:
    world.serve(1, 2, 3, session="a")
    world.now += 60
    world.serve(7, 8, 9, session="b")
    graph = world.graph
    ranking = graph.rank("a", 100)
    view = View(graph.tables, graph.rules, 0, world.now)
    columns = front_terms(view, graph.policy, None, ranking)
    assert set(columns) >= {"age", "importance"}
    score = sum(columns.values())
    assert len(score) == len(ranking.order) == 6
    assert score[:3].min() > score[3:].max(), "the blocks with the higher scores go first"


def test_the_ring_is_bounded_and_forgets_the_oldest() -> None:
    ring = TermRing()
    room = RING_BYTES // (2 * 2)
    for first in range(0, room + 1000, 500):
        numbers = np.arange(first, first + 500, dtype=np.float64) % 1024
        ring.add(first, TermsAtRanking.of({"a": numbers, "b": -numbers}))
    assert ring.nbytes <= RING_BYTES
    assert ring.of(first + 499) == {"a": (first + 499) % 1024, "b": -((first + 499) % 1024)}
    assert ring.of(first + 500 - room) is not None
    assert ring.of(first + 499 - room) is None, "the ring went round"
    assert ring.of(first + 500) is None, "it did not happen yet"

    at_once = TermRing()
    at_once.add(0, terms(a=range(2 * room + 10)))
    assert at_once.of(9) is None
    assert at_once.of(10) == {"a": 10.0}


def test_another_policys_terms_begin_anew() -> None:
    ring = TermRing()
    ring.add(0, terms(age=[1.0, 2.0]))
    ring.add(2, terms(return_time=[3.0], sharing=[4.0]))
    assert ring.of(1) is None
    assert ring.of(2) == {"return_time": 3.0, "sharing": 4.0}


def test_scores_beyond_all_bounds_stay_numbers() -> None:
    assert np.isfinite(terms(wild=[1e300, -1e300, np.inf]).parts).all()


@pytest.fixture
def sums() -> StepSums:
    return StepSums(("a", "b"), 10.0, 4)


def test_a_question_begins_no_step(sums: StepSums) -> None:
    assert sums.series_by_name(0.0)[1]["b"].tolist() == []
    sums.add((1, 2), 5.0)
    assert sums.series_by_name(15.0)[1]["b"].tolist() == [2, 0]
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
