"""How fast each session returns: by a prior, this traffic's pace and size, and what it taught."""

from __future__ import annotations

from typing import Final

import numpy as np

from ...graph.sessions.sessions import SessionTable
from .drift import Drift
from .hazard import AGES, FAR, OLDEST, Floats, ReturnModel, Singles, gittins
from .prior import Prior, load_prior
from .waits import PROMPT_FEATURE, Sessions, Waits, features, fitted, stranger

_WAITS_A_STEP: Final = 2  # new waits per step of learning; chosen
_MOST_STEPS: Final = 8  # of learning per look; chosen
_FEW_WAITS: Final = 64
_COHORT: Final = 7200.0  # model seconds of waits that are learned from; chosen
# Of Adam, and how strongly weights are drawn to the prior, in waits: at the prior's own pace, and
# at another by a factor of e or more, where the traffic is another too. Chosen on traffic of both
# kinds.
_STEPS: Final = (2e-4, 1e-3)
_PULLS: Final = (1000.0, 30.0)
_STALE: Final = 32  # steps of learning after which a session's rates are computed again; chosen
_RENEWED: Final = 256  # sessions at most per look; chosen


class Returns:
    """Rates of return by session row; learns in ``observe``."""

    def __init__(self, prior: Prior | None = None) -> None:
        prior = prior or load_prior()
        self._pace = Drift(prior.pause)
        self._size = Drift(*_usual_size(prior))
        self._waits = Waits()
        self._model = ReturnModel(prior.scales, prior.weights, step=_STEPS[0], pull=_PULLS[0])
        self._learned = 0  # of the waits that began
        self._steps = 0
        self._log_rates: Singles = np.zeros((0, len(AGES) - 1), dtype=np.float32)  # by session
        self._since = np.empty(0)  # the wait that they are of
        self._as_of = np.empty(0, dtype=np.int64)  # steps of learning when they were computed

    @property
    def speed(self) -> float:
        """How many seconds of the model one second here is."""
        return float(np.exp(self._pace.shift))

    def observe(self, sessions: SessionTable, now: float) -> None:
        """Take in who waits and who returned; take as many steps of learning as there is
        news for."""
        news = self._waits.observe(sessions)
        self._pace.note(news.pauses)
        self._size.note(news.prompts)
        steps = (self._waits.begun - self._learned) // _WAITS_A_STEP
        if not steps or self._waits.begun < _FEW_WAITS:
            return
        self._learned = self._waits.begun
        known, age, returned, weight = self._waits.cohort(now, _COHORT / self.speed)
        if not len(age):
            return
        steps = min(steps, _MOST_STEPS)
        self._trust_the_prior()
        self._steps += steps
        self._model.learn(self._fitted(known), age * self.speed, returned, weight, steps)

    def rates(self, sessions: SessionTable, rows: Sessions, now: float) -> Floats:
        """float64 ``[n]``, 1/model second: how fast each idle session returns from now on."""
        self._renew(sessions, rows)
        age = np.maximum(0.0, now - sessions.last_seen[rows]) * self.speed
        rates = np.exp(self._log_rates[rows], dtype=np.float64)
        return gittins(rates, np.minimum(age, OLDEST - 1e-3))

    def stranger_rate(self, age: Floats) -> Floats:
        """float64 ``[n]``: the rate for blocks of no session, as of an unknown session's first
        turn."""
        known = self._model.index(np.repeat(stranger(), len(AGES), axis=0), AGES)
        return np.asarray(np.interp(np.minimum(age * self.speed, OLDEST), AGES, known))

    def _trust_the_prior(self) -> None:
        """Draw weights to the prior, the more strongly the closer this traffic is to the prior's
        pace."""
        other = min(1.0, abs(self._pace.shift))
        self._model.step = _between(_STEPS, other)
        self._model.pull = _between(_PULLS, other)

    def _renew(self, sessions: SessionTable, rows: Sessions) -> None:
        """Compute the rates of sessions that began to wait, and some of those that are stale."""
        more = sessions.size - len(self._since)
        if more > 0:
            blank = np.zeros((more, self._log_rates.shape[1]), dtype=np.float32)
            self._log_rates = np.append(self._log_rates, blank, axis=0)
            self._since = np.append(self._since, np.full(more, np.nan))
            self._as_of = np.append(self._as_of, np.zeros(more, dtype=np.int64))
        fresh = rows[self._since[rows] != sessions.last_seen[rows]]
        stale = rows[self._as_of[rows] + _STALE < self._steps][:_RENEWED]
        due = np.union1d(fresh, stale)
        if len(due):
            self._log_rates[due] = self._model.log_rates(self._fitted(features(sessions, due)))
            self._since[due], self._as_of[due] = sessions.last_seen[due], self._steps

    def _fitted(self, known: Singles) -> Singles:
        return fitted(known, self._pace.shift, self._size.shift)


def _usual_size(prior: Prior) -> tuple[float, float]:
    """Mean of ln(tokens of a prompt), and how far off the prior still knows such prompts."""
    mean, spread = prior.scales[:, PROMPT_FEATURE]
    return float(mean), FAR * float(spread)


def _between(ends: tuple[float, float], share: float) -> float:
    """The geometric mean from the first to the second, weighted."""
    return float(ends[0] ** (1.0 - share) * ends[1] ** share)
