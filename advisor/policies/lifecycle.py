"""``LifecyclePolicy``: keeps blocks whose session is likely to return soon."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.compiled import core
from ...graph.ranking.formulas import graph_worth
from ...graph.ranking.policy import Scores, Terms, View
from ...graph.ranking.policy import Weights as ScoreWeights
from ...graph.tables.blocks import DEPTH_TIE, Selection
from ...graph.tables.columns import distinct
from ...graph.tables.sessions import SessionTable
from ...graph.types import DEFAULT_IMPORTANCE, BlockFlag, Rows, SessionState, SourceLayer
from .hazard import AGES, FAR, OLDEST, Batch, Floats, ReturnModel, Singles, Weights, gittins
from .waits import PROMPT_FEATURE, Sessions, Waits, features, fitted, stranger

# How this traffic differs, in pace and size, from the traffic from which the prior was learned.

_STRENGTH: Final = 30.0  # values that the prior's mean weighs as much as; chosen
_MEMORY: Final = 2000.0  # values over which the mean forgets; chosen


class Drift:
    """Scales times or sizes of this traffic to those from which the prior was learned.

    The model treats a fleet that is fourteen times as fast like any other: ages and pauses are
    multiplied by the ``exp(shift)`` of pauses, and numbers of tokens by that of prompts.

    Args:
        usual: Mean logarithm in the traffic from which the prior was learned.
        slack: Differences up to this are not scaled away, and of larger ones only the excess is,
            because scaling removes information.
    """

    def __init__(self, usual: float, slack: float = 0.0) -> None:
        self._usual = usual
        self._slack = slack
        self._mean = usual
        self._seen = _STRENGTH

    @property
    def shift(self) -> float:
        off = self._usual - self._mean
        return math.copysign(max(0.0, abs(off) - self._slack), off)

    def note(self, logarithms: Floats) -> None:
        """Add new values; float64 ``[n]``."""
        if not len(logarithms):
            return
        self._seen = min(self._seen + len(logarithms), max(_MEMORY, len(logarithms)))
        self._mean += (float(logarithms.mean()) - self._mean) * len(logarithms) / self._seen


# What recorded agents show about sessions in general: the initial state of ``LifecyclePolicy``.
#
# ``kvgraph prior`` creates the file from recorded sessions; it contains weights and no traffic.

FILE: Final = "prior.npz"
_WEIGHTS: Final = ("into", "bias", "across", "offset", "out", "base")


class Prior(NamedTuple):
    """Weights of a ``ReturnModel``, and the pace of the traffic that they were learned from."""

    scales: Singles
    weights: Weights
    pause: float  # mean of ln(pause / s) over all pauses that ended


def load_prior() -> Prior:
    with files(__package__).joinpath(FILE).open("rb") as file, np.load(file) as arrays:
        weights = [arrays[name].astype(np.float32) for name in _WEIGHTS]
        return Prior(arrays["scales"], weights, float(arrays["pause"]))


def packed(prior: Prior) -> dict[str, np.ndarray]:
    """Return the arrays of a prior's file, in half precision."""
    weights = zip(_WEIGHTS, prior.weights, strict=True)
    arrays = {name: weight.astype(np.float16) for name, weight in weights}
    return {"scales": prior.scales, "pause": np.array(prior.pause), **arrays}


# How fast each session returns: from a prior, this traffic's pace and size, and what was learned.

_WAITS_A_STEP: Final = 2  # new waits per step of learning; chosen
_MOST_STEPS: Final = 8  # of learning per call; chosen
_STEPS_PER_S: Final = 64.0  # of learning at most, for all engines together; chosen
_FEW_WAITS: Final = 64
_COHORT: Final = 7200.0  # age in model seconds of the waits learned from; chosen
# Step size of Adam, and how strongly weights are drawn to the prior, in waits: at the prior's own
# pace, and at a pace that differs by a factor of e or more, where the traffic is different too.
# Chosen on traffic of both kinds.
_STEPS: Final = (2e-4, 1e-3)
_PULLS: Final = (1000.0, 30.0)
_STALE: Final = 32  # learning steps after which a session's rates are recomputed; chosen
_RENEWED: Final = 256  # most sessions recomputed per call; chosen


class Waiting(NamedTuple):
    log_rates: Singles  # float32 `[n, bins]`, see `ReturnModel.log_rates`
    age: Floats  # float64 `[n]`, model seconds waited so far

    def rates(self) -> Floats:
        """Return each session's rate of return from now on, float64 ``[n]``, 1/model second."""
        rates = np.exp(self.log_rates, dtype=np.float64)
        return gittins(rates, np.minimum(self.age, OLDEST - 1e-3))


class Returns:
    """Rates at which sessions return, by session row; ``observe`` learns them."""

    def __init__(self, prior: Prior | None = None) -> None:
        prior = prior or load_prior()
        self._pace = Drift(prior.pause)
        self._size = Drift(*_usual_size(prior))
        self._waits = Waits()
        self._model = ReturnModel(prior.scales, prior.weights, step=_STEPS[0], pull=_PULLS[0])
        self._learned = 0  # of the waits that began
        self._may_learn, self._looked = _STEPS_PER_S, 0.0  # steps, as of then
        self._steps = 0
        self._learning = threading.Lock()
        self._log_rates: Singles = np.zeros((0, len(AGES) - 1), dtype=np.float32)  # by session
        self._since = np.empty(0)  # the wait that they are of
        self._as_of = np.empty(0, dtype=np.int64)  # steps of learning when they were computed

    @property
    def speed(self) -> float:
        return float(np.exp(self._pace.shift))

    def look(self, sessions: SessionTable, now: float) -> Callable[[], None]:
        """Note which sessions wait or returned; the result learns from it and reads no session."""
        news = self._waits.observe(sessions)
        self._pace.note(news.pauses)
        self._size.note(news.prompts)
        self._may_learn += (now - self._looked) * _STEPS_PER_S
        self._may_learn, self._looked = min(self._may_learn, _STEPS_PER_S), now
        steps = (self._waits.begun - self._learned) // _WAITS_A_STEP
        if not steps or self._waits.begun < _FEW_WAITS or self._may_learn < _MOST_STEPS:
            return lambda: None
        self._learned = self._waits.begun
        cohort = self._waits.cohort(now, _COHORT / self.speed)
        if not len(cohort.age):
            return lambda: None
        steps = min(steps, _MOST_STEPS)
        self._may_learn -= steps
        pace, size = self._pace.shift, self._size.shift
        drawn = self._model.drawn(cohort._replace(age=cohort.age * self.speed), steps)
        return partial(self._learn, drawn, steps, float(cohort.weight.sum()), pace, size)

    def _learn(self, drawn: Batch, steps: int, waits: float, pace: float, size: float) -> None:
        fit = drawn._replace(features=fitted(drawn.features, pace, size))
        with self._learning:
            self._trust_the_prior(pace)
            self._model.take(fit, waits)
            self._steps += steps

    def waiting(self, sessions: SessionTable, rows: Sessions, now: float) -> Waiting:
        """Return the inputs for the idle sessions' rates of return from now on, so that these can
        be computed later.
        """
        self._renew(sessions, rows)
        age = np.maximum(0.0, now - sessions.last_seen[rows]) * self.speed
        return Waiting(self._log_rates[rows], age)

    def stranger_rates(self) -> Floats:
        """Return the rates for blocks of no session, float64, by ``AGES``, in 1/model second: those
        of an unknown session's first turn.
        """
        known = np.repeat(stranger(), len(AGES), axis=0)
        return Waiting(self._model.log_rates(known), AGES).rates()

    def _trust_the_prior(self, pace: float) -> None:
        """Draw weights to the prior, the more strongly the closer this traffic's pace is."""
        other = min(1.0, abs(pace))
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
        due = distinct(np.concatenate([fresh, stale])) if len(stale) else fresh
        if len(due):
            self._log_rates[due] = self._model.log_rates(
                fitted(features(sessions, due), self._pace.shift, self._size.shift)
            )
            self._since[due], self._as_of[due] = sessions.last_seen[due], self._steps


def _usual_size(prior: Prior) -> tuple[float, float]:
    """Return the mean of ln(tokens of a prompt), and how far from it the prior still holds."""
    mean, spread = prior.scales[:, PROMPT_FEATURE]
    return float(mean), FAR * float(spread)


def _between(ends: tuple[float, float], share: float) -> float:
    """Return the weighted geometric mean of two rates."""
    return float(ends[0] ** (1.0 - share) * ends[1] ** share)


Mask = npt.NDArray[np.bool_]

SCALE: Final = 1000.0  # points of score per factor of e in the rate of returns; chosen
_OFF_CHAIN: Final = 4.0  # a block off the chain is worth a factor of e^4 less; chosen
_LEAST_RATE: Final = 1e-9  # 1/s; chosen
_RUNNING_RATE: Final = 10.0  # 1/s: blocks of a running session are in use; chosen
# What the graph knows besides time contributes a bounded factor, which cannot outweigh time. All
# chosen.
_STEER: Final = 0.35  # natural logarithm of the largest factor, either way
_WORTH: Final = 40.0  # points of the configured weights that give three quarters of that factor
_USUAL_WORTH: Final = 10.0  # points of an ordinary block of a conversation
_ORDINARY: Final = float(DEFAULT_IMPORTANCE[SourceLayer.USER_TURN])  # who says nothing
_FARTHEST: Final = np.int32(np.iinfo(np.int32).max)
_IDLE_FACTOR: Final = 10.0  # factor by which a shared block's idle time outweighs its interval


class LifecyclePolicy:
    """Scores a block by the rate at which its session is expected to return.

    The rate (``Returns``) starts from recorded agents and is learned further from this sidecar's
    sessions. Blocks that several sessions share have a rate of their own, from how often they are
    walked. Edges and importance, by the configured weights, multiply the rate by a bounded factor.
    The score is ``-1000 · ln(rate)``, so that a factor of e in the rate is a thousand points.
    """

    name: Final = "lifecycle"

    def __init__(self, weights: ScoreWeights | None = None, returns: Returns | None = None) -> None:
        self.weights = weights or ScoreWeights()
        self._returns = returns or Returns()

    def observe(self, view: View) -> None:
        self.look(view)()

    def look(self, view: View) -> Callable[[], None]:
        """As ``observe``, in two parts; see ``graph.ranking.policy.Learner``."""
        return self._returns.look(view.sessions, view.now)

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, higher is evicted first."""
        return self.detached(view, picked.of(view.blocks.session)).scores(view, picked)

    def terms(self, view: View, picked: Selection) -> Terms:
        """Return the score's terms: rate of return, sharing, place in the chain."""
        return self.detached(view, picked.of(view.blocks.session)).terms(view, picked)

    def detached(self, view: View, wanted: Rows) -> _Scorer:
        """Return a copy that scores as this policy does now; see ``policy.Detachable``."""
        sessions, returns = view.sessions, self._returns
        rows, size = sessions.among(wanted), sessions.size + 1
        state, claims = sessions.state[rows], np.full(size, SCALE * math.log(_LEAST_RATE))
        claims[rows[state == SessionState.RUNNING]] = SCALE * math.log(_RUNNING_RATE)
        claims[-1] = 0.0
        # The oldest end first: if a caller wrongly ends every session, their order is still LRU's.
        over = rows[state == SessionState.ENDED]
        claims[over] -= SCALE * np.log1p(np.maximum(0.0, view.now - sessions.last_seen[over]))
        ends, begins = np.full(size, _FARTHEST), np.full(size, -np.inf)
        ends[rows] = _last_depths(view, rows)
        begins[rows] = sessions.started[rows]
        quiet = rows[(state != SessionState.RUNNING) & (state != SessionState.ENDED)]
        waiting = quiet, returns.waiting(sessions, quiet, view.now)
        strangers = returns.stranger_rates() if (wanted < 0).any() else None
        return _Scorer(self.weights, claims, waiting, ends, begins, returns.speed, strangers)


@dataclass(slots=True)
class _Scorer:
    """``LifecyclePolicy`` as of a moment: by session, and last for blocks of none."""

    weights: ScoreWeights
    # float64 `[sessions + 1]`: 1000 · ln of the return rate, of sessions that do not wait
    known: Floats
    # the waiting sessions, and how they wait; None: `known` has all of them
    waiting: tuple[Rows, Waiting] | None
    ends: Rows  # int32 `[sessions + 1]`: depth at its last turn's end
    begins: Floats  # float64 `[sessions + 1]`: start of its last turn
    speed: float  # model seconds per second
    # float64, by `AGES`: rates of blocks of no session; None: there are no such blocks
    strangers: Floats | None
    name: str = "lifecycle"

    def _claims(self) -> Floats:
        """float64 ``[sessions + 1]``: 1000 · ln of the rate at which each returns."""
        if self.waiting is not None:
            (rows, waiting), self.waiting = self.waiting, None
            self.known[rows] = SCALE * np.log(np.maximum(waiting.rates(), _LEAST_RATE))
        return self.known

    def observe(self, view: View) -> None:
        """Learn nothing."""

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, higher goes first."""
        scores, off_chain = self._by_session(view, picked)
        self._score_shared(scores, view, picked)
        scores += SCALE * _OFF_CHAIN * off_chain
        scores -= self._steered(view, picked)
        return scores

    def terms(self, view: View, picked: Selection) -> Terms:
        own, off_chain = self._by_session(view, picked)
        own -= picked.of(view.blocks.depth) * DEPTH_TIE
        shared = own.copy()
        self._score_shared(shared, view, picked)
        return {
            "return_time": own,
            "sharing": shared - own,
            "graph": -self._steered(view, picked),
            "off_chain": np.where(off_chain, SCALE * _OFF_CHAIN, 0.0),
        }

    def _by_session(self, view: View, picked: Selection) -> tuple[Floats, Mask]:
        """float64 ``[len(picked)]``: a tie by depth, less the claim of each block's session; and
        which of them the next turn cannot match: those behind the end of the last turn (a partial
        block), and those of a branch that the session left behind.
        """
        blocks, session = view.blocks, picked.of(view.blocks.session)
        scores, off_chain = np.empty(len(picked)), np.empty(len(picked), dtype=np.bool_)
        core.by_session(
            picked.of(blocks.depth), session, picked.of(blocks.last_attended),
            self._claims(), self.ends, self.begins, scores, off_chain,
        )  # fmt: skip
        if self.strangers is not None:
            nobodys = np.flatnonzero(session < 0)
            age = view.now - picked.last_used()[nobodys]
            rate = np.interp(np.minimum(age * self.speed, OLDEST), AGES, self.strangers)
            scores[nobodys] -= SCALE * np.log(np.maximum(rate, _LEAST_RATE))
        return scores, off_chain

    def _steered(self, view: View, picked: Selection) -> Floats:
        """What edges, importance and confidence add by weight, float64 ``[len(picked)]``."""
        worth = graph_worth(view, self.weights, picked)
        worth += self.weights.importance * _more_than_ordinary(view, picked)
        worth -= _USUAL_WORTH
        worth /= _WORTH
        np.tanh(worth, out=worth)
        worth *= SCALE * _STEER
        return worth

    def _score_shared(self, scores: Scores, view: View, picked: Selection) -> None:
        """Score a shared block by at least the rate at which its sessions walk it."""
        blocks = view.blocks
        places = np.flatnonzero(picked.of(blocks.flags) & int(BlockFlag.SHARED))
        if not places.size:
            return
        shared = Selection(blocks, picked.rows[places])
        idle = view.now - shared.last_used()
        usual = (view.now - idle - shared.of(blocks.created)) / np.maximum(
            shared.of(blocks.walkers), 1
        )
        seconds = (_IDLE_FACTOR * idle + usual) * self.speed
        rate = 1.0 / np.maximum(seconds, 1.0)
        scores[places] = np.minimum(scores[places], -SCALE * np.log(rate))


def _more_than_ordinary(view: View, picked: Selection) -> Floats:
    """float64 ``[len(picked)]``: a block's importance relative to its session's mean, less an
    ordinary session's: who calls everything important says nothing.
    """
    importance = picked.of(view.blocks.importance)
    if not len(importance) or importance.min() == importance.max() == _ORDINARY:
        return np.zeros(len(picked))
    session = picked.of(view.blocks.session) + 1  # NO_ROW is the first
    blocks = picked.blocks_of_each
    counts = np.maximum(np.bincount(session, weights=blocks), 1)
    weights = importance if blocks is None else importance * blocks
    means = np.bincount(session, weights=weights) / counts
    return np.asarray((np.maximum(means, _ORDINARY) - _ORDINARY)[session])


def _last_depths(view: View, rows: Rows) -> Rows:
    """int32 ``[n]``: the depth of the end of each session's last turn; no bound while it runs."""
    sessions, tip = view.sessions, view.sessions.tip[rows]
    ended = (sessions.running[rows] == 0) & (tip >= 0)
    return np.where(ended, view.blocks.depth[tip], _FARTHEST)
