"""A step of learning, beside the same step told plainly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from kvgraph.advisor.policies.hazard import AGES, OLDEST, Batch, ReturnModel
from kvgraph.advisor.policies.lifecycle import load_prior

Singles = npt.NDArray[np.float32]
FEATURES = 15
STEP, PULL = 2e-4, 1000.0


class _Layer(NamedTuple):
    bent: Singles
    slope: Singles


def _layer(values: Singles, slope: Singles, base: Singles) -> _Layer:
    lines = values @ slope + base
    gate = np.exp(-np.clip(lines, np.float32(-30), np.float32(30))) + np.float32(1)
    share = np.float32(1) / gate
    return _Layer(lines / gate, ((np.float32(1) - share) * lines + np.float32(1)) * share)


def _log_rates(layer: _Layer, out: Singles, base: Singles) -> Singles:
    return np.clip(layer.bent @ out + base, np.float32(-14), np.float32(1))


def _inputs(model: ReturnModel, features: Singles) -> Singles:
    known, (mean, spread) = ~np.isnan(features), model.scales
    scaled = np.where(known, (features - mean) / spread, np.float32(0))
    far = np.float32(3)
    return np.concatenate([np.clip(scaled, -far, far), known], axis=1, dtype=np.float32)


class _Plain:
    """What a model learns, in numpy alone."""

    def __init__(self, model: ReturnModel) -> None:
        self.model = model
        self.weights = [each.copy() for each in model.weights]
        self.start = [each.copy() for each in model.weights]
        self.mean = [np.zeros_like(each) for each in self.weights]
        self.square = [np.zeros_like(each) for each in self.weights]
        self.taken = 0

    def take(self, batch: Batch, waits: float) -> None:
        self.taken += 1
        warm = np.float32(1 - 0.9**self.taken), np.float32(1 - 0.999**self.taken)
        pull, step = np.float32(STEP * PULL / waits), np.float32(STEP)
        for weight, start, mean, square, slope in zip(
            self.weights, self.start, self.mean, self.square, self.slopes(batch), strict=True
        ):
            mean += np.float32(0.1) * (slope - mean)
            square += np.float32(0.001) * (slope * slope - square)
            weight -= step * (mean / warm[0]) / (np.sqrt(square / warm[1]) + np.float32(1e-8))
            weight -= pull * (weight - start)

    def slopes(self, batch: Batch) -> list[Singles]:
        into, bias, across, offset, out, base = self.weights
        inputs = _inputs(self.model, batch.features)
        first = _layer(inputs, into, bias)
        second = _layer(first.bent, across, offset)
        log_rates = _log_rates(second, out, base)
        spent, events = self.exposure(batch)
        rough = (log_rates[..., 1:] - log_rates[..., :-1]) * np.float32(2 * 0.002 / len(batch.age))
        slope = np.exp(log_rates) * spent - events
        slope[..., 1:] += rough
        slope[..., :-1] -= rough
        of_second = second.slope * (slope @ out.swapaxes(1, 2))
        of_first = first.slope * (of_second @ across.swapaxes(1, 2))
        layers = ((inputs[None], of_first), (first.bent, of_second), (second.bent, slope))
        found: list[Singles] = []
        for before, after in layers:
            found += [before.swapaxes(1, 2) @ after, np.add.reduce(after, axis=1, keepdims=True)]
        return found

    def exposure(self, batch: Batch) -> tuple[Singles, Singles]:
        spent = np.minimum(np.maximum(batch.age[:, None] - AGES[:-1], 0.0), np.diff(AGES))
        events = np.zeros_like(spent)
        ended = np.flatnonzero(batch.returned & (batch.age < OLDEST))
        events[ended, np.searchsorted(AGES, batch.age[ended], side="right") - 1] = 1.0
        share = (batch.weight[:, None] / batch.weight.sum()).astype(np.float32)
        return spent.astype(np.float32) * share, events.astype(np.float32) * share


def _batch(rng: np.random.Generator, waits: int) -> Batch:
    features = rng.normal(3, 4, (waits, FEATURES)).astype(np.float32)
    features[rng.random(features.shape) < 0.2] = np.nan
    age = np.where(rng.random(waits) < 0.1, rng.choice(AGES, waits), rng.exponential(400, waits))
    return Batch(features, age, rng.random(waits) < 0.5, rng.uniform(1, 3, waits))


def test_steps_of_learning_are_those_of_the_formulas_to_the_last_bit() -> None:
    prior, rng = load_prior(), np.random.default_rng(5)
    model = ReturnModel(prior.scales, prior.weights, step=STEP, pull=PULL)
    plain = _Plain(model)
    for waits in (256, 256, 100, 256):
        batch = _batch(rng, waits)
        plain.take(batch, 700.0)
        model.take(batch, 700.0)
    for ours, theirs in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_rates_are_those_of_the_formulas_to_the_last_bit() -> None:
    prior = load_prior()
    model = ReturnModel(prior.scales, prior.weights, step=STEP, pull=PULL)
    features = _batch(np.random.default_rng(6), 40).features
    into, bias, across, offset, out, base = model.weights
    first = _layer(_inputs(model, features), into, bias)
    log_rates = _log_rates(_layer(first.bent, across, offset), out, base)
    np.testing.assert_array_equal(model.log_rates(features), log_rates.mean(axis=0))
