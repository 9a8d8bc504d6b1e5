"""When a step is sampled, and how much of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kvgraph.hooks.vllm.sampled.sampler import LONGEST_S, SamplingBudget

SHARE = 0.002


class Engine:
    """Steps on one core; a plain sample costs ``plain_s``, a layer ``each_s`` per token."""

    def __init__(
        self, plain_s: float, each_s: float, tokens: int, step_s: float = 0.005,
        strict: bool = False,
    ) -> None:  # fmt: skip
        self.now = self.cpu = self.sampled_s = 0.0
        self.plain_s, self.each_s, self.tokens = plain_s, each_s, tokens
        self.times: list[float] = []
        self.layers = 0
        self.step_s = step_s
        self.budget = SamplingBudget(lambda: self.now, lambda: self.cpu, SHARE, strict)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += self.step_s
            self.cpu += self.step_s
            if self.budget.is_due():
                self._sample()

    def _sample(self) -> None:
        layers = self.budget.layers(self.tokens, 16)
        cost = self.plain_s + self.each_s * layers * self.tokens
        self.now += cost
        self.cpu += cost
        self.sampled_s += cost
        self.layers += layers
        self.times.append(self.now)
        self.budget.took(cost, layers, self.tokens)


def test_samples_take_their_share_and_no_more() -> None:
    for tokens in (100, 1_000, 20_000):
        engine = Engine(2e-4, 1e-6, tokens)
        engine.run(300.0)
        assert engine.sampled_s <= 1.1 * SHARE * engine.cpu, tokens
        assert engine.layers > 0


def test_a_step_is_sampled_every_second_even_where_that_costs_more() -> None:
    engine = Engine(5e-3, 1e-4, 50_000)
    engine.run(60.0)
    gaps = [late - early for early, late in zip(engine.times, engine.times[1:], strict=False)]
    assert max(gaps) <= LONGEST_S + 0.2
    assert engine.sampled_s <= 60 * 6e-3 + 16 * 5.0


def test_one_sample_that_was_held_up_does_not_end_the_sampling_of_layers() -> None:
    engine = Engine(2e-4, 1e-6, 500)
    engine.run(30.0)
    engine.budget.took(5.0, 4, 500)
    before = engine.layers
    engine.run(3_000.0)
    assert engine.layers > before + 100


@pytest.mark.parametrize("step_s", [0.002, 0.03, 0.07, 0.2])
def test_a_second_has_one_sampled_step_however_long_steps_are(step_s: float) -> None:
    engine = Engine(2.5e-3, 1e-4, 50_000, step_s)
    engine.run(300.0)
    assert len(engine.times) >= 300
    gaps = [late - early for early, late in pairwise(engine.times)]
    assert max(gaps) <= LONGEST_S + step_s


def test_a_pause_is_not_made_up_for() -> None:
    engine = Engine(2.5e-3, 1e-4, 50_000)
    engine.run(10.0)
    engine.now += 60.0
    before = len(engine.times)
    engine.run(10.0)
    assert len(engine.times) - before <= 12


@pytest.mark.parametrize("cost_s", [2e-4, 4e-3, 0.03, 0.4])
@pytest.mark.parametrize("each_s", [0.0, 1e-8, 1e-6])
def test_a_strict_budget_never_spends_more_than_its_share_and_the_sample_it_learns_from(
    cost_s: float, each_s: float
) -> None:
    engine = Engine(cost_s, each_s, 10_000, 0.05, strict=True)
    for _ in range(60):
        engine.run(50.0)
        dearest = cost_s + 16 * each_s * 10_000
        assert engine.sampled_s <= SHARE * engine.cpu + dearest
    assert engine.times
    assert engine.sampled_s >= 0.5 * SHARE * engine.cpu - dearest


def test_a_strict_budget_tries_again_where_samples_become_cheap() -> None:
    engine = Engine(0.4, 0.0, 1_000, 0.05, strict=True)
    engine.run(1_000.0)
    engine.plain_s, before = 1e-3, len(engine.times)
    engine.run(10_000.0)
    assert len(engine.times) > before + 1_000


def test_layers_that_cost_far_more_than_was_guessed_are_taken_twice_and_then_saved_for() -> None:
    engine = Engine(7e-4, 3e-5, 300)
    engine.run(60.0)
    cost = 7e-4 + 16 * 3e-5 * 300
    assert engine.sampled_s <= SHARE * engine.cpu + 2 * cost
    engine.run(600.0)
    assert engine.sampled_s <= SHARE * engine.cpu + 2 * cost
    left = SHARE * engine.cpu - 7e-4 * len(engine.times)
    assert engine.layers * 3e-5 * 300 >= 0.9 * left, "all that confidence leaves is for layers"
