"""When do sessions return? A piecewise-constant hazard that is learned while running.

The rate at which a session that has waited for ``a`` seconds returns is

    rate(a | x) = base[bin(a)] · Π_g factor[g][x_g, phase(bin(a))]

for its features x (turns so far, prompt length, …), each cut into a few classes. Baseline and
factors are fitted by iterative proportional scaling on the waits of a recent cohort, those that
go on included: events observed over events expected, shrunk towards what was believed before.
Sessions that never return need no case of their own: the baseline falls with age.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8]

AGES: Final = np.array(
    [0, 6, 12, 20, 30, 40, 50, 60, 75, 90, 110, 135, 165, 200, 250, 320, 420, 600, 900, 1500, 2400],
    dtype=np.float64,
)
"""Borders of the age bins, seconds."""
OLDEST: Final = float(AGES[-1])

_WIDTHS: Final = np.diff(AGES)
_PHASE: Final = np.digitize((AGES[:-1] + AGES[1:]) / 2, [45.0, 100.0, 250.0])
_PHASES: Final = 4
_BY_PHASE: Final = np.eye(_PHASES)[_PHASE]  # [bins, phases]
# Prior: two of five sessions return, log-logistically around two minutes.
_PRIOR_RETURNS, _PRIOR_MEDIAN_S, _PRIOR_SHAPE = 0.4, 120.0, 1.4
_PRIOR_WAITS: Final = 20.0  # as many waits does the prior baseline weigh
_PRIOR_EVENTS: Final = 8.0  # as many events does a factor of one weigh
_BOUND: Final = 4.0  # of a factor's logarithm


class ReturnModel:
    """The hazard of a return, by age and features.

    Args:
        classes: Number of classes of each feature.
    """

    def __init__(self, classes: tuple[int, ...]) -> None:
        self._prior = _prior_rates()
        self._base = self._prior.copy()
        self._factors = [np.zeros((count, _PHASES)) for count in classes]  # logarithms
        self._next = 0

    def index(self, codes: Codes, age: Floats) -> Floats:
        """float64 ``[n]``, 1/s: the best rate of returns per second of waiting from now on.

        ``max over τ of P(return within τ) / E[seconds waited until the return or τ]``: Gittins'
        index of a wait. A block is worth keeping while its session's index is above the price of
        space, whatever that is; so blocks in the order of their index go in the right order.

        Args:
            codes: uint8 ``[n, features]``.
            age: float64 ``[n]``, seconds waited so far.
        """
        age = np.minimum(age, OLDEST - 1e-3)
        left = np.clip(AGES[1:] - age[:, None], 0.0, _WIDTHS)
        rate = self._rates(codes)
        gone = np.exp(-np.cumsum(rate * left, axis=1))
        before = np.concatenate([np.ones((len(age), 1)), gone[:, :-1]], axis=1)
        waited = np.cumsum((before - gone) / rate, axis=1)
        best: Floats = np.max((1.0 - gone) / np.maximum(waited, 1e-9), axis=1)
        return best

    def learn(self, codes: Codes, age: Floats, returned: npt.NDArray[np.bool_],
              weight: Floats) -> None:  # fmt: skip
        """Improve one part, the baseline or one feature's factors; each call takes the next.

        Args:
            codes: uint8 ``[n, features]`` of a cohort of waits.
            age: float64 ``[n]``, how long each lasted, or lasts.
            returned: Whether it ended by a return.
            weight: How many waits each stands for.
        """
        spent = np.clip(age[:, None] - AGES[:-1], 0.0, _WIDTHS) * weight[:, None]
        bins = np.searchsorted(AGES, np.minimum(age, OLDEST - 1e-3), side="right") - 1
        events = weight * (returned & (age < OLDEST))
        if self._next == 0:
            happened: Floats = np.bincount(bins, events, minlength=len(_WIDTHS)).astype(np.float64)
            self._fit_base(codes, spent, happened)
        else:
            self._fit_factor(self._next - 1, codes, spent, _PHASE[bins], events)
        self._next = (self._next + 1) % (1 + len(self._factors))

    def _rates(self, codes: Codes) -> Floats:
        """float64 ``[n, bins]``."""
        return self._base * self._scale(codes)[:, _PHASE]

    def _scale(self, codes: Codes) -> Floats:
        """float64 ``[n, phases]``: the product of factors."""
        total = np.zeros((len(codes), _PHASES))
        for feature, factor in enumerate(self._factors):
            total += factor[codes[:, feature]]
        return np.exp(total)

    def _fit_base(self, codes: Codes, spent: Floats, events: Floats) -> None:
        exposure = (self._scale(codes)[:, _PHASE] * spent).sum(axis=0)
        prior = _PRIOR_WAITS * _WIDTHS
        self._base = (events + prior * self._prior) / (exposure + prior)

    def _fit_factor(
        self, feature: int, codes: Codes, spent: Floats, phase: npt.NDArray[np.int64],
        events: Floats,
    ) -> None:  # fmt: skip
        factor = self._factors[feature]
        expected = (self._rates(codes) * spent) @ _BY_PHASE
        cell = codes[:, feature].astype(np.int64) * _PHASES
        observed = np.bincount(cell + phase, events, minlength=factor.size)
        predicted = np.stack(
            [
                np.bincount(codes[:, feature], expected[:, each], minlength=len(factor))
                for each in range(_PHASES)
            ],
            axis=1,
        )
        ratio = (observed.reshape(factor.shape) + _PRIOR_EVENTS) / (predicted + _PRIOR_EVENTS)
        np.clip(factor + np.log(ratio), -_BOUND, _BOUND, out=factor)


def _prior_rates() -> Floats:
    odds = (AGES / _PRIOR_MEDIAN_S) ** _PRIOR_SHAPE
    survival = np.log(1.0 - _PRIOR_RETURNS * odds / (1.0 + odds))
    return np.asarray(-np.diff(survival) / _WIDTHS)
