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

from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.compiled import core

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Features = Singles
Weights = list[Singles]

# Borders of the age bins in model seconds: about four per doubling of the odds where tools answer,
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
_SMOOTH: Final = 0.002  # how strongly neighbouring bins attract each other; chosen
FAR: Final = 3.0  # spreads from the mean; chosen
_BENT: Final = 30.0  # beyond this, a swish is linear or zero
_LEAST_LOG_RATE, _MOST_LOG_RATE = -14.0, 1.0
# Without a prior: two of five sessions return, log-logistically around two minutes; chosen.
_RETURNS, _MEDIAN_S, _SHAPE = 0.4, 120.0, 1.4


class Batch(NamedTuple):
    """Waits from which steps learn, one step after the other; see ``ReturnModel.learn``."""

    features: Features
    age: Floats
    returned: npt.NDArray[np.bool_]
    weight: Floats

    def part(self, which: slice) -> Batch:
        """Return the rows in ``which``."""
        return Batch(
            self.features[which], self.age[which], self.returned[which], self.weight[which]
        )


class Cohort(NamedTuple):
    # Returns float32 ``[m, features]`` of ``m`` waits, given their indices; NaN where one does not
    # apply. A batch is small compared with a cohort.
    features: Callable[[npt.NDArray[np.int64]], Features]
    age: Floats  # how long each wait has lasted
    returned: npt.NDArray[np.bool_]  # whether it ended with a return
    weight: Floats  # how many waits each stands for


class ReturnModel:
    """The hazard rate of a session's return, by age and features. Deterministic.

    Args:
        scales: float32 ``[2, features]``: mean and spread of each feature.
        prior: Weights to start from, as ``weights`` returns them; None: a built-in constant.
        step: Step size of Adam.
        pull: How strongly weights are drawn to their initial values, in waits: the prior weighs
            less as evidence accumulates.
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
        self._mean, self._square, self._root = np.zeros((3, *self._flat.shape), dtype=np.float32)
        self.step, self.pull = step, pull
        self._taken = 0
        self._room: _Room | None = None  # for a step of learning

    def log_rates(self, features: Features) -> Singles:
        """Return ln(rate · s) in each age bin, float32 ``[n, bins]``."""
        return np.asarray(self._forward(self._inputs(features)).mean(axis=0))

    def learn(self, cohort: Cohort, steps: int) -> None:
        """Take ``steps`` gradient steps, each on waits drawn at random."""
        waits = float(cohort.weight.sum())
        for _ in range(steps):
            self.take(self.drawn(cohort, 1), waits)

    def drawn(self, cohort: Cohort, steps: int) -> Batch:
        """Draw the waits for ``steps`` steps of ``learn``."""
        places = self._rng.integers(0, len(cohort.age), steps * _BATCH)
        features, age, returned, weight = cohort
        return Batch(features(places), age[places], returned[places], weight[places])

    def take(self, drawn: Batch, waits: float) -> None:
        """Take gradient steps on a sample drawn from ``waits`` waits; by one thread at a time."""
        for start in range(0, len(drawn.age), _BATCH):
            self._differentiate(drawn.part(slice(start, start + _BATCH)))
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
        inputs = np.empty((len(features), 2 * features.shape[1]), dtype=np.float32)
        # What nobody saw is taken for the farthest seen.
        core.inputs(_told(features), _told(self.scales), FAR, _told(inputs))
        return inputs

    def _forward(self, inputs: Singles) -> Singles:
        """float32 ``[networks, n, bins]``: the logarithms of rates."""
        into, bias, across, offset, out, base = self.weights
        lines = np.empty((len(into), len(inputs), into.shape[2]), dtype=np.float32)
        bent, twice = np.empty((2, *lines.shape), dtype=np.float32)
        _bend(inputs, into, bias, lines, bent)
        _bend(bent, across, offset, lines, twice)
        log_rates = twice @ out
        _bound(log_rates, base)
        return log_rates

    def _differentiate(self, batch: Batch) -> None:
        into, bias, across, offset, out, base = self._learning
        waits, hidden, bins = len(batch.age), into.shape[2], base.shape[2]
        if self._room is None or self._room.waits != waits:
            self._room = _Room(len(into), waits, hidden, bins)
        room, inputs = self._room, self._inputs(batch.features)
        _bend(inputs, into, bias, room.first, room.bent)
        _bend(room.bent, across, offset, room.second, room.twice)
        slope = np.matmul(room.twice, out, out=room.log_rates)  # which it will be
        _bound(slope, base)
        rates = np.exp(slope, out=room.rates)
        share = (batch.weight / batch.weight.sum()).astype(np.float32)
        core.exposure(batch.age, batch.returned, AGES, share, room.spent, room.events)
        core.blame(
            _told(slope), _told(rates), room.spent, room.events, bins, 2 * _SMOOTH / waits
        )  # fmt: skip
        of_into, of_bias, of_across, of_offset, of_out, of_base = self._slopes
        core.back(_told(slope), None, bins, _told(of_base))
        factors = np.matmul(slope, out.swapaxes(1, 2), out=room.factors)
        core.back(_told(room.second), _told(factors), hidden, _told(of_offset))
        factors = np.matmul(room.second, across.swapaxes(1, 2), out=room.factors)
        core.back(_told(room.first), _told(factors), hidden, _told(of_bias))
        for before, after, of_slope in (
            (inputs[None], room.first, of_into),
            (room.bent, room.second, of_across),
            (room.twice, slope, of_out),
        ):
            np.matmul(before.swapaxes(1, 2), after, out=of_slope)

    def _descend(self, waits: float) -> None:
        """Take one step of Adam (Kingma & Ba, ICLR 2015), and of the pull, apart from it."""
        self._taken += 1
        warm = (1.0 - 0.9**self._taken, 1.0 - 0.999**self._taken)
        core.moments(self._slope, self._mean, self._square, warm[1], self._root)
        np.sqrt(self._root, out=self._root)
        pull = self.step * self.pull / waits
        core.descend(
            self._flat, self._mean, self._root, self._prior, warm[0], self.step, pull
        )  # fmt: skip


class _Room:
    """Buffers of a learning step, reused: allocating them costs more than filling them. ``waits``
    of a batch, ``hidden`` units of a layer, and age ``bins``.
    """

    def __init__(self, networks: int, waits: int, hidden: int, bins: int) -> None:
        self.waits = waits
        # Lines become the slopes of what they are bent to.
        self.first, self.bent, self.second, self.twice, self.factors = np.empty(
            (5, networks, waits, hidden), dtype=np.float32
        )
        self.log_rates, self.rates = np.empty((2, networks, waits, bins), dtype=np.float32)
        self.spent, self.events = np.empty((2, waits * bins), dtype=np.float32)


def _joined(weights: Weights) -> tuple[Singles, Weights]:
    flat = np.concatenate([each.ravel() for each in weights])
    ends = np.cumsum([each.size for each in weights])
    parts = np.split(flat, ends[:-1])
    return flat, [part.reshape(each.shape) for part, each in zip(parts, weights, strict=True)]


def _copied(weights: Weights) -> Weights:
    return [weight.copy() for weight in weights]


def _told(values: Singles) -> Singles:
    """The same values, as compiled loops take them."""
    return values.reshape(-1)


def _bend(values: Singles, slope: Singles, base: Singles, lines: Singles, bent: Singles) -> None:
    """A layer: ``bent`` becomes the swish of lines through ``values``, and ``lines`` its slope."""
    np.matmul(values, slope, out=lines)
    core.biased(_told(lines), _told(base), base.shape[2], -_BENT, _BENT, _told(bent))
    np.exp(bent, out=bent)
    core.swish(_told(lines), _told(bent))


def _bound(lines: Singles, base: Singles) -> None:
    """The last layer: lines become the logarithms of rates."""
    least, most = _LEAST_LOG_RATE, _MOST_LOG_RATE
    core.biased(_told(lines), _told(base), base.shape[2], least, most, None)


def gittins(rate: Floats, age: Floats) -> Floats:
    """Return the best rate of returns per second of waiting from now on, float64 ``[n]``, 1/s.

    ``max over τ of P(return within τ) / E[seconds waited until the return or τ]``: the Gittins
    index of a wait. A block is worth keeping while its session's index is above the price of space,
    whatever that price is; so blocks are evicted in the order of their index.

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
