"""When do sessions return? A hazard by age, from small networks that learn while running.

The rate at which a session that has waited for ``a`` seconds returns is constant within an age bin:

    rate(a | x) = base[bin(a)] · exp(Σ_k h_k(x) · V[k, ·] · BASIS[·, bin(a)]),  h(x) = tanh(W x + b)

for its features x, each spread over hats at a few knots. It is fitted to the waits of a recent
cohort, those that go on included, by the likelihood of a Poisson process: the sum of
``rate · seconds spent`` less the sum of ``ln rate`` at each return. Sessions that never return need
no case of their own: the rate falls with age. Features matter together (a long answer means one
thing after a short gap and another after a long one), which a product of one factor a feature does
not catch. A few networks from different starts, averaged, err less than one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Features = Singles

AGES: Final = np.array(
    [0, 6, 12, 20, 30, 40, 50, 60, 75, 90, 110, 135, 165, 200, 250, 320, 420, 600, 900, 1500, 2400],
    dtype=np.float64,
)
"""Borders of the age bins, seconds."""
OLDEST: Final = float(AGES[-1])

_WIDTHS: Final = np.diff(AGES)
_NETWORKS: Final = 4
_HIDDEN: Final = 32
_CURVES: Final = 6  # how many ways a hidden unit bends the rate over age
_LINE: Final = 1.5  # how much a feature's line weighs among the inputs, over its knots' spread
_HAT: Final = 0.35  # how much its hats do
_BATCH: Final = 512
# Of Adam. The base alone moves fast: a prior that is far off must not last.
_STEPS: Final = (3e-3, 3e-3, 3e-3, 3e-2)
# How strongly weights are drawn to zero (and the base to its prior), in waits: what is believed
# before weighs less and less as evidence comes.
_DRAWN_IN, _DRAWN_OUT, _DRAWN_BASE = 2.4, 24.0, 2.4
_PRIOR_WAITS: Final = 500.0
# Prior: two of five sessions return, log-logistically around two minutes.
_PRIOR_RETURNS, _PRIOR_MEDIAN_S, _PRIOR_SHAPE = 0.4, 120.0, 1.4
_LEAST_LOG_RATE, _MOST_LOG_RATE = -16.0, 0.0


class ReturnModel:
    """The hazard of a return, by age and features. Deterministic: the same calls, the same rates.

    Args:
        knots: For each feature the values, in rising order, between which rates are interpolated.
    """

    def __init__(self, knots: tuple[Floats, ...]) -> None:
        self._scales = [(each, float(each.mean()), float(each.std()) / _LINE) for each in knots]
        self._rng = np.random.default_rng(0)
        inputs = sum(1 + len(each) for each in knots)
        spread = (_NETWORKS, inputs, _HIDDEN)
        weights: list[npt.NDArray[np.float64]] = [  # a network a row
            self._rng.normal(0.0, inputs**-0.5, spread),
            np.zeros((_NETWORKS, 1, _HIDDEN)),
            np.zeros((_NETWORKS, _HIDDEN, _CURVES)),
            np.tile(_PRIOR, (_NETWORKS, 1, 1)),
        ]
        self._weights = [weight.astype(np.float32) for weight in weights]
        self._mean = [np.zeros_like(weight) for weight in self._weights]
        self._square = [np.zeros_like(weight) for weight in self._weights]
        self._steps = 0

    def index(self, features: Features, age: Floats) -> Floats:
        """float64 ``[n]``, 1/s: the best rate of returns per second of waiting from now on.

        ``max over τ of P(return within τ) / E[seconds waited until the return or τ]``: Gittins'
        index of a wait. A block is worth keeping while its session's index is above the price of
        space, whatever that is; so blocks in the order of their index go in the right order.

        Args:
            features: float32 ``[n, features]``; NaN where one does not apply.
            age: float64 ``[n]``, seconds waited so far.
        """
        log_rates = self._forward(self._spread(features))[1].mean(axis=0)
        return _gittins(np.exp(log_rates, dtype=np.float64), np.minimum(age, OLDEST - 1e-3))

    def learn(self, features: Features, age: Floats, returned: npt.NDArray[np.bool_],
              weight: Floats, steps: int) -> None:  # fmt: skip
        """Take ``steps`` steps down the loss, each on a random batch.

        Args:
            features: float32 ``[n, features]`` of a cohort of waits; NaN where one does not apply.
            age: float64 ``[n]``, how long each lasted, or lasts.
            returned: Whether it ended by a return.
            weight: How many waits each stands for.
        """
        waits = float(weight.sum()) + _PRIOR_WAITS
        for _ in range(steps):
            batch = self._rng.integers(0, len(features), _BATCH)
            lasted = age[batch]
            spent = np.minimum(np.maximum(lasted[:, None] - AGES[:-1], 0.0), _WIDTHS)
            ended = np.flatnonzero(returned[batch] & (lasted < OLDEST))
            events = np.zeros_like(spent)
            events[ended, np.searchsorted(AGES, lasted[ended], side="right") - 1] = 1.0
            share = weight[batch, None] / weight[batch].sum()
            spent, events = (spent * share).astype(np.float32), (events * share).astype(np.float32)
            self._descend(self._gradients(self._spread(features[batch]), spent, events, waits))

    def _spread(self, features: Features) -> Singles:
        """float32 ``[n, inputs]``: each feature as a line, and as hats at its knots beside that.

        A value's two nearest knots share ``_HAT``, by nearness.
        """
        inputs = np.zeros((len(features), self._weights[0].shape[1]), dtype=np.float32)
        rows, first = np.arange(len(features)), 0
        for (knots, mean, spread), column in zip(self._scales, features.T, strict=True):
            value = np.minimum(np.maximum(column, knots[0]), knots[-1])
            left = np.searchsorted(knots[1:-1], value, side="right")
            share = (value - knots[left]) / (knots[left + 1] - knots[left])
            inputs[rows, first] = (value - mean) / spread
            inputs[rows, first + 1 + left] = _HAT * (1.0 - share)
            inputs[rows, first + 2 + left] = _HAT * share
            inputs[np.isnan(column), first : first + 1 + len(knots)] = 0.0
            first += 1 + len(knots)
        return inputs

    def _forward(self, inputs: Singles) -> tuple[Singles, Singles]:
        """Hidden units ``[networks, n, hidden]`` and log rates ``[networks, n, bins]``."""
        into, bias, out, base = self._weights
        hidden = np.tanh(inputs @ into + bias)
        log_rates = hidden @ (out @ _BASIS) + base
        return hidden, np.clip(log_rates, _LEAST_LOG_RATE, _MOST_LOG_RATE)

    def _gradients(self, inputs: Singles, spent: Singles, events: Singles, waits: float) \
            -> list[Singles]:  # fmt: skip
        into, _, out, base = self._weights
        hidden, log_rates = self._forward(inputs)
        slope = np.exp(log_rates) * spent - events
        bent = slope @ _BASIS.T
        inner = bent @ out.swapaxes(1, 2) * (1.0 - hidden * hidden)
        return [
            inputs.T @ inner + _DRAWN_IN / waits * into,
            inner.sum(axis=1, keepdims=True),
            hidden.swapaxes(1, 2) @ bent + _DRAWN_OUT / waits * out,
            slope.sum(axis=1, keepdims=True) + _DRAWN_BASE / waits * (base - _PRIOR),
        ]

    def _descend(self, gradients: list[Singles]) -> None:
        """One step of Adam (Kingma & Ba, ICLR 2015)."""
        self._steps += 1
        warm = (1.0 - 0.9**self._steps, 1.0 - 0.99**self._steps)
        for step, weight, mean, square, gradient in zip(
            _STEPS, self._weights, self._mean, self._square, gradients, strict=True
        ):
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            weight -= step * (mean / warm[0]) / (np.sqrt(square / warm[1]) + 1e-6)


def _gittins(rate: Floats, age: Floats) -> Floats:
    rows, now = np.arange(len(age)), np.searchsorted(AGES, age, side="right") - 1
    # Inside a bin the rate moves on to the next one's: who waits longer is never taken for equal.
    moved = (age - AGES[now]) / _WIDTHS[now]
    rate[rows, now] **= 1.0 - moved
    rate[rows, now] *= rate[rows, np.minimum(now + 1, len(_WIDTHS) - 1)] ** moved
    left = np.clip(AGES[1:] - age[:, None], 0.0, _WIDTHS)
    gone = np.exp(-np.cumsum(rate * left, axis=1))
    before = np.concatenate([np.ones((len(age), 1)), gone[:, :-1]], axis=1)
    waited = np.cumsum((before - gone) / rate, axis=1)
    best: Floats = np.max((1.0 - gone) / np.maximum(waited, 1e-9), axis=1)
    return best


def _prior_log_rates() -> Floats:
    odds = (AGES / _PRIOR_MEDIAN_S) ** _PRIOR_SHAPE
    survival = np.log(1.0 - _PRIOR_RETURNS * odds / (1.0 + odds))
    return np.asarray(np.log(-np.diff(survival) / _WIDTHS))


def _hats() -> Floats:
    """float64 ``[curves, bins]``: hat functions over the logarithm of age; they sum to one."""
    at = np.log(AGES[1:])
    knots = np.linspace(at[0], at[-1], _CURVES)
    return np.stack([np.interp(at, knots, row) for row in np.eye(_CURVES)])


_PRIOR: Final = _prior_log_rates().astype(np.float32)
_BASIS: Final = _hats().astype(np.float32)
