"""Sequence numbers: contiguous, repeated, missing."""

from __future__ import annotations

import random

import pytest
from kvgraph.advisor.sockets.subscriber import Arrival, SequenceTracker


def test_contiguous_numbers_are_next() -> None:
    tracker = SequenceTracker()
    assert [tracker.accept(seq) for seq in range(3)] == [Arrival.NEXT] * 3
    assert (tracker.gaps, tracker.missed, tracker.duplicates) == (0, 0, 0)


def test_gap_counts_what_is_missing_and_goes_on() -> None:
    tracker = SequenceTracker()
    assert tracker.accept(5) is Arrival.GAP
    assert tracker.accept(6) is Arrival.NEXT
    assert (tracker.gaps, tracker.missed) == (1, 5)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_number_whose_place_has_passed_is_a_duplicate(late: int) -> None:
    tracker = SequenceTracker()
    for seq in range(3):
        tracker.accept(seq)
    assert tracker.accept(late) is Arrival.DUPLICATE
    assert tracker.expected == 3


def test_classify_takes_nothing() -> None:
    tracker = SequenceTracker(expected=4)
    assert tracker.classify(9) is Arrival.GAP
    assert (tracker.expected, tracker.gaps) == (4, 0)


def test_duplicated_and_reordered_streams_accept_each_number_once() -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    numbers = [seq for seq in range(200) for _ in range(rng.randint(1, 3))]
    tracker = SequenceTracker()
    taken = [seq for seq in numbers if tracker.accept(seq) is not Arrival.DUPLICATE]
    assert taken == list(range(200)), f"seed {seed}"
