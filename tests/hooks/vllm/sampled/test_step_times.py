"""What a sampled step costs, told from when the next steps begin."""

from __future__ import annotations

import random
from statistics import median

import pytest
from kvgraph.hooks.vllm.sampled.sampler import StepTimes
from made_runner import SIZES, scheduled

pytestmark = pytest.mark.usefixtures("vllm_loaded")
STEP_S = 0.01


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.times = StepTimes(lambda: self.now, SIZES)

    def decode(self, requests: int, *seconds: float) -> None:
        """Steps that begin, each followed by its time."""
        for each in seconds:
            self.times.begin(scheduled({f"r{n}": 1 for n in range(requests)}))
            self.now += each


def test_it_can_be_told_once_steps_of_that_size_were_timed() -> None:
    clock = Clock()
    clock.decode(3, *[STEP_S] * 8)
    assert not clock.times.can_tell
    clock.decode(3, STEP_S)
    assert clock.times.can_tell
    clock.decode(4, STEP_S)
    assert clock.times.can_tell, "three are padded to four"
    clock.decode(5, STEP_S)
    assert not clock.times.can_tell


@pytest.mark.parametrize("late", [(0.03, 0.0, 0.0), (0.0, 0.03, 0.0), (0.01, 0.01, 0.01)])
def test_all_that_a_sampled_step_holds_up_is_its_cost(late: tuple[float, ...]) -> None:
    clock = Clock()
    clock.decode(2, *[STEP_S] * 12)
    clock.decode(2, 0.0)
    clock.times.sampling()
    clock.now += STEP_S + late[0]
    assert clock.times.settled(1.0) is None
    clock.decode(2, *[STEP_S + each for each in late[1:]])
    assert not clock.times.can_tell, "one at a time"
    clock.decode(2, STEP_S)
    assert clock.times.settled(1.0) == pytest.approx(0.03)
    assert clock.times.settled(1.0) is None
    assert clock.times.can_tell


def test_a_cost_that_cannot_be_told_is_what_was_expected_at_least() -> None:
    clock = Clock()
    clock.decode(2, *[STEP_S] * 12)
    clock.times.sampling()
    clock.times.begin(scheduled({"r0": 1, "new": 500}, new=True))
    clock.now += 3.0
    assert clock.times.settled(0.02) == pytest.approx(0.02)


def test_what_passes_without_work_counts_for_nothing() -> None:
    clock = Clock()
    clock.decode(2, *[STEP_S] * 12)
    before = clock.times.busy()
    clock.now += 100.0
    clock.times.begin(scheduled({"new": 64}, new=True))
    clock.now += STEP_S
    clock.times.begin(scheduled({"new": 1}))
    assert clock.times.busy() == pytest.approx(before)


def test_steps_that_vary_are_held_against_their_median() -> None:
    rng, clock = random.Random(3), Clock()
    steps = [STEP_S * rng.uniform(0.8, 1.2) for _ in range(40)]
    clock.decode(2, *steps)
    clock.times.begin(scheduled({"r0": 1, "r1": 1}))
    clock.times.sampling()
    clock.now += 0.05
    clock.decode(2, STEP_S, STEP_S)
    clock.times.begin(scheduled({"r0": 1, "r1": 1}))
    usual = median(steps[-32:])
    assert clock.times.settled(0.0) == pytest.approx(0.05 + 2 * STEP_S - 3 * usual)
