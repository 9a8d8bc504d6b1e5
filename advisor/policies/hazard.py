"""When do sessions return? A hazard by age, from small networks that learn while running.

The rate at which a session that has waited for ``a`` seconds returns is constant within an age bin:

    ln rate(a | x) = (V · h(U · h(W x + b) + c) + d)[bin(a)],  h(z) = z / (1 + exp(-z))

for its features x. It is fitted to the waits of a recent
cohort, including those that have not ended, by the likelihood of a Poisson process: the sum of
``rate · seconds spent`` less the sum of ``ln rate`` at each return. Sessions that never return need
no case of their own, since the rate falls with age. Features matter together (a long answer means
one thing after a short pause and another after a long one), which a product of one factor per
feature cannot express. The mean of a few networks from different starts errs less than one network.

All times here are in the model's own seconds: the caller scales them to the pace of its traffic
(``lifecycle.Drift``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.compiled import core

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Features = Singles
Weights = list[Singles]

# Borders of the age bins, model seconds: about four per doubling of the odds where tools answer,
# and wider where people do; chosen.
AGES: Final = np.array(
    [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 62, 78, 100, 130, 170, 220, 300,
     400, 550, 800, 1200, 1800, 3600],
    dtype=np.float64,
)  # fmt: skip
OLDEST: Final = float(AGES[-1])

_WIDTHS: Final = np.diff(AGES)
_NETWORKS: Final = 3  # chosen
_HIDDEN: Final = 48  # units of a layer; chosen
_BATCH: Final = 256  # waits per step of learning; chosen
_SMOOTH: Final = 0.002  # how strongly neighbouring bins are drawn to each other; chosen
FAR: Final = 3.0  # spreads from the mean; chosen
_BENT: Final = 30.0  # beyond this, a swish is a line or nothing
_LEAST_LOG_RATE, _MOST_LOG_RATE = -14.0, 1.0
# Without a prior: two of five sessions return, log-logistically around two minutes; chosen.
_RETURNS, _MEDIAN_S, _SHAPE = 0.4, 120.0, 1.4


class Batch(NamedTuple):
    """Waits that one step learns from; see ``ReturnModel.learn``."""

    features: Features
    age: Floats
    returned: npt.NDArray[np.bool_]
    weight: Floats


class Cohort(NamedTuple):
    # Gives float32 ``[m, features]`` of ``m`` waits, by their places; NaN where one does not apply.
    # A batch is small beside a cohort.
    features: Callable[[npt.NDArray[np.int64]], Features]
    age: Floats  # how long each lasted, or lasts
    returned: npt.NDArray[np.bool_]  # whether it ended by a return
    weight: Floats  # how many waits each stands for


class ReturnModel:
    """The hazard rate of a session's return, by age and features. Deterministic.

    Args:
        scales: float32 ``[2, features]``: mean and spread of each feature.
        prior: Weights to start from, as ``weights`` returns them; None: a built-in constant.
        step: Step size of Adam.
        pull: How strongly weights are drawn to where they started, in waits: the prior weighs less
            as evidence accumulates.
    """

    def __init__(
        self, scales: Singles, prior: Weights | None = None, *, step: float, pull: float
    ) -> None:
        self.scales = scales
        self._rng = np.random.default_rng(0)
        start = prior or self._blank()
        # One array of all, and a view of each: a step of learning takes them all alike. Rates are
        # computed from copies: another thread may ask for some meanwhile.
        self._flat, self._learning = _joined(start)
        self.weights = _copied(self._learning)
        self._slope, self._slopes = _joined(start)
        self._prior = self._flat.copy()
        self._mean, self._square = np.zeros((2, *self._flat.shape), dtype=np.float32)
        self.step, self.pull = step, pull
        self._taken = 0

    def index(self, features: Features, age: Floats) -> Floats:
        """float64 ``[n]``, 1/s: the best rate of returns per second of waiting, of ``features``,
        float32 ``[n, features]``, NaN where one does not apply, and ``age``, seconds waited; see
        ``gittins``."""
        rates = np.exp(self.log_rates(features), dtype=np.float64)
        return gittins(rates, np.minimum(age, OLDEST - 1e-3))

    def log_rates(self, features: Features) -> Singles:
        """float32 ``[n, bins]``: the natural logarithm of the rate in each age bin, 1/s."""
        return np.asarray(self._forward(self._inputs(features)).mean(axis=0))

    def learn(self, cohort: Cohort, steps: int) -> None:
        """Take ``steps`` gradient steps, each on a random batch."""
        self.take(self.drawn(cohort, steps), float(cohort.weight.sum()))

    def drawn(self, cohort: Cohort, steps: int) -> Iterator[Batch]:
        for _ in range(steps):
            batch = self._rng.integers(0, len(cohort.age), _BATCH)
            features, age, returned, weight = cohort
            yield Batch(features(batch), age[batch], returned[batch], weight[batch])

    def take(self, batches: Iterable[Batch], waits: float) -> None:
        """Take a gradient step on each batch, drawn from so many ``waits``; by one thread at a
        time."""
        for batch in batches:
            spent, events = exposure(batch.age, batch.returned)
            share = (batch.weight[:, None] / batch.weight.sum()).astype(np.float32)
            self._differentiate(self._inputs(batch.features), spent * share, events * share)
            self._descend(waits)
        self.weights = _copied(self._learning)

    def _blank(self) -> Weights:
        sizes = (2 * self.scales.shape[1], _HIDDEN, _HIDDEN, len(_WIDTHS))
        weights: list[Floats] = []
        for before, after in pairwise(sizes):
            spread = before**-0.5 / 3**0.5
            weights.append(self._rng.uniform(-spread, spread, (_NETWORKS, before, after)))
            weights.append(np.zeros((_NETWORKS, 1, after)))
        weights[-2] *= 0.1
        weights[-1] += _BLANK_BASE
        return [weight.astype(np.float32) for weight in weights]

    def _inputs(self, features: Features) -> Singles:
        """float32 ``[n, 2 · features]``: standardised features, and whether each is known."""
        known = ~np.isnan(features)
        mean, spread = self.scales
        scaled = np.where(known, (features - mean) / spread, np.float32(0.0))
        scaled = np.clip(scaled, -FAR, FAR)  # what nobody saw is taken for the farthest seen
        return np.concatenate([scaled, known], axis=1, dtype=np.float32)

    def _forward(self, inputs: Singles) -> Singles:
        """float32 ``[networks, n, bins]``: the logarithms of rates."""
        into, bias, across, offset, out, base = self.weights
        twice = _swish(_line(_swish(_line(inputs, into, bias)), across, offset))
        return _bounded(_line(twice, out, base), _LEAST_LOG_RATE, _MOST_LOG_RATE)

    def _differentiate(self, inputs: Singles, spent: Singles, events: Singles) -> None:
        into, bias, across, offset, out, base = self._learning
        bent, first_slope = _swish_and_slope(_line(inputs, into, bias))
        twice, second_slope = _swish_and_slope(_line(bent, across, offset))
        log_rates = _bounded(_line(twice, out, base), _LEAST_LOG_RATE, _MOST_LOG_RATE)
        rough = log_rates[..., 1:] - log_rates[..., :-1]
        rough *= np.float32(2 * _SMOOTH / len(inputs))
        slope = np.exp(log_rates, out=log_rates)
        slope *= spent
        slope -= events
        slope[..., 1:] += rough
        slope[..., :-1] -= rough
        second_slope *= slope @ out.swapaxes(1, 2)
        first_slope *= second_slope @ across.swapaxes(1, 2)
        layers = ((inputs[None], first_slope), (bent, second_slope), (twice, slope))
        for (before, after), into_it, of_base in zip(
            layers, self._slopes[::2], self._slopes[1::2], strict=True
        ):
            np.matmul(before.swapaxes(1, 2), after, out=into_it)
            np.add.reduce(after, axis=1, keepdims=True, out=of_base)

    def _descend(self, waits: float) -> None:
        """Take one step of Adam (Kingma & Ba, ICLR 2015), and of the pull, apart from it."""
        self._taken += 1
        warm = (1.0 - 0.9**self._taken, 1.0 - 0.999**self._taken)
        slope, mean, square = self._slope, self._mean, self._square
        mean += 0.1 * (slope - mean)
        square += 0.001 * (slope * slope - square)
        self._flat -= self.step * (mean / warm[0]) / (np.sqrt(square / warm[1]) + 1e-8)
        self._flat -= np.float32(self.step * self.pull / waits) * (self._flat - self._prior)


def _joined(weights: Weights) -> tuple[Singles, Weights]:
    flat = np.concatenate([each.ravel() for each in weights])
    ends = np.cumsum([each.size for each in weights])
    parts = np.split(flat, ends[:-1])
    return flat, [part.reshape(each.shape) for part, each in zip(parts, weights, strict=True)]


def _copied(weights: Weights) -> Weights:
    return [weight.copy() for weight in weights]


def _line(values: Singles, slope: Singles, base: Singles) -> Singles:
    found: Singles = values @ slope
    found += base
    return found


def _bounded(values: Singles, least: float, most: float) -> Singles:
    """Clip values in place; ``np.clip`` takes longer to begin than to do it."""
    np.maximum(values, least, out=values)
    return np.minimum(values, most, out=values)


def _gate(values: Singles) -> Singles:
    """``1 + exp(-values)``, of values that are bounded."""
    gate = _bounded(np.array(values), -_BENT, _BENT)
    np.negative(gate, out=gate)
    np.exp(gate, out=gate)
    gate += np.float32(1.0)
    return gate


def _swish(values: Singles) -> Singles:
    return np.asarray(values / _gate(values))


def _swish_and_slope(values: Singles) -> tuple[Singles, Singles]:
    gate = _gate(values)
    bent = values / gate
    np.divide(np.float32(1.0), gate, out=gate)
    slope = np.subtract(np.float32(1.0), gate)
    slope *= values
    slope += np.float32(1.0)
    slope *= gate
    return bent, slope


def exposure(age: Floats, returned: npt.NDArray[np.bool_]) -> tuple[Singles, Singles]:
    """float32 ``[n, bins]`` twice: seconds that each wait spent in each bin, and its return."""
    spent = np.minimum(np.maximum(age[:, None] - AGES[:-1], 0.0), _WIDTHS)
    ended = np.flatnonzero(returned & (age < OLDEST))
    events = np.zeros_like(spent)
    events[ended, np.searchsorted(AGES, age[ended], side="right") - 1] = 1.0
    return spent.astype(np.float32), events.astype(np.float32)


def gittins(rate: Floats, age: Floats) -> Floats:
    """float64 ``[n]``, 1/s: the best rate of returns per second of waiting from now on.

    ``max over τ of P(return within τ) / E[seconds waited until the return or τ]``: Gittins' index
    of a wait. A block is worth keeping while its session's index is above the price of space,
    whatever that price is; so blocks go in the order of their index.

    Args:
        rate: float64 ``[n, bins]``, 1/s in each age bin.
        age: float64 ``[n]``, seconds waited so far, below ``OLDEST``.
    """
    best = np.empty(len(age))
    core.gittins(rate.reshape(-1), AGES, age, best)
    return best


def _blank_log_rates() -> Floats:
    odds = (AGES / _MEDIAN_S) ** _SHAPE
    survival = np.log(1.0 - _RETURNS * odds / (1.0 + odds))
    return np.asarray(np.log(-np.diff(survival) / _WIDTHS))


_BLANK_BASE: Final = _blank_log_rates().astype(np.float32)
