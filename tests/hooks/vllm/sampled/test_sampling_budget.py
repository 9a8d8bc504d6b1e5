"""When a step is sampled, and how much of it."""

from __future__ import annotations

from kvgraph.hooks.vllm.sampled.sampling_budget import LONGEST_S, SamplingBudget

SHARE = 0.002


class Engine:
    """Steps of 5 ms on one core; a plain sample costs ``plain_s``, a layer ``each_s`` per token."""

    def __init__(self, plain_s: float, each_s: float, tokens: int) -> None:
        self.now = self.cpu = self.sampled_s = 0.0
        self.plain_s, self.each_s, self.tokens = plain_s, each_s, tokens
        self.times: list[float] = []
        self.layers = 0
        self.budget = SamplingBudget(lambda: self.now, lambda: self.cpu, SHARE)

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.005
            self.cpu += 0.005
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
