"""``LifecyclePolicy``: keeps what is likely to be asked for again soon, session by session."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.columns.whole_chains import DEPTH_TIE
from ...graph.ranking.formulas import graph_worth
from ...graph.ranking.policy import Scores, Terms
from ...graph.ranking.profile import Weights
from ...graph.ranking.view import View
from ...graph.tables.blocks import Selection
from ...graph.types import DEFAULT_IMPORTANCE, BlockFlag, Rows, SessionState, SourceLayer
from .hazard import Floats
from .returns import Returns

Mask = npt.NDArray[np.bool_]

SCALE: Final = 1000.0  # points of score per factor of e in the rate of returns; chosen
_OFF_CHAIN: Final = 4.0  # a block off the chain is worth a factor of e^4 less; chosen
_LEAST_RATE: Final = 1e-9  # 1/s; chosen
_RUNNING_RATE: Final = 10.0  # 1/s: blocks of a running session are in use; chosen
# What the graph knows besides time is a bounded factor, which cannot outweigh time. All chosen.
_STEER: Final = 0.35  # natural logarithm of the largest factor, either way
_WORTH: Final = 40.0  # points of the configured weights that give three quarters of it
_USUAL_WORTH: Final = 10.0  # points of an ordinary block of a conversation
_ORDINARY: Final = float(DEFAULT_IMPORTANCE[SourceLayer.USER_TURN])  # who says nothing
_IDLE_FACTOR: Final = 10.0  # a shared block's idle second counts as so many of its usual interval


class LifecyclePolicy:
    """Scores a block by the rate at which its session is expected to return.

    The rate (``Returns``) starts from what recorded agents teach, and is learned further from the
    sessions of this sidecar. Blocks that several sessions share have a rate of their own, from how
    often they are walked. Edges and importance, by the configured weights, are a bounded factor of
    the rate. The score is ``-1000 · ln(rate)``, so that a factor of e in the rate is a thousand
    points.

    Args:
        weights: What edges, importance and confidence count; assign others while it runs.
        returns: What it knows of returns; None starts from the prior that ships.
    """

    name: Final = "lifecycle"

    def __init__(self, weights: Weights | None = None, returns: Returns | None = None) -> None:
        self.weights = weights or Weights()
        self._returns = returns or Returns()

    def observe(self, view: View) -> None:
        """Find out which sessions returned, and learn from it."""
        self._returns.observe(view.sessions, view.now)

    def scores(self, view: View, picked: Selection) -> Scores:
        """float64 ``[len(picked)]``, higher goes first."""
        scores = np.multiply(picked.of(view.blocks.depth), DEPTH_TIE, dtype=np.float64)
        scores -= self._claims(view, picked)
        self._score_shared(scores, view, picked)
        scores += SCALE * _OFF_CHAIN * ~_on_chain(view, picked)
        scores -= self._steered(view, picked)
        return scores

    def _steered(self, view: View, picked: Selection) -> Floats:
        """float64 ``[len(picked)]``: what edges, importance and confidence add, by the configured
        weights."""
        worth = graph_worth(view, self.weights, picked)
        worth += self.weights.importance * _more_than_ordinary(view, picked)
        return np.asarray(SCALE * _STEER * np.tanh((worth - _USUAL_WORTH) / _WORTH))

    def terms(self, view: View, picked: Selection) -> Terms:
        """The score's parts: the session's rate of return, sharing, the place in the chain."""
        own = -self._claims(view, picked)
        shared = own.copy()
        self._score_shared(shared, view, picked)
        return {
            "return_time": own,
            "sharing": shared - own,
            "graph": -self._steered(view, picked),
            "off_chain": np.where(_on_chain(view, picked), 0.0, SCALE * _OFF_CHAIN),
        }

    def _claims(self, view: View, picked: Selection) -> Floats:
        """float64 ``[len(picked)]``: 1000 · ln of the rate at which each block's session
        returns."""
        session = picked.of(view.blocks.session)
        worth = np.append(np.log(self._session_rates(view, session)), 0.0)
        claims = np.take(worth, session, mode="wrap")  # the last one stands for NO_ROW
        nobodys = np.flatnonzero(session < 0)
        if nobodys.size:
            age = view.now - picked.last_used()[nobodys]
            claims[nobodys] = np.log(np.maximum(self._returns.stranger_rate(age), _LEAST_RATE))
        return np.asarray(SCALE * claims)

    def _session_rates(self, view: View, wanted: Rows) -> Floats:
        """float64 ``[sessions.size]``, 1/s; the least rate for sessions that are not ``wanted``."""
        sessions = view.sessions
        present = np.zeros(sessions.size + 1, dtype=np.bool_)
        present[wanted] = True  # NO_ROW lands behind the last
        rates = np.full(sessions.size, _LEAST_RATE)
        rows = np.flatnonzero(present[:-1])
        state = sessions.state[rows]
        rates[rows[state == SessionState.RUNNING]] = _RUNNING_RATE
        quiet = rows[(state != SessionState.RUNNING) & (state != SessionState.ENDED)]
        rates[quiet] = self._returns.rates(sessions, quiet, view.now)
        return np.asarray(np.maximum(rates, _LEAST_RATE))

    def _score_shared(self, scores: Scores, view: View, picked: Selection) -> None:
        """Score a block that several sessions walk by at least the rate at which they walk it."""
        blocks = view.blocks
        places = np.flatnonzero(picked.of(blocks.flags) & int(BlockFlag.SHARED))
        if not places.size:
            return
        shared = Selection(blocks, picked.rows[places])
        idle = view.now - shared.last_used()
        usual = (view.now - idle - shared.of(blocks.created)) / np.maximum(
            shared.of(blocks.walkers), 1
        )
        seconds = (_IDLE_FACTOR * idle + usual) * self._returns.speed
        rate = 1.0 / np.maximum(seconds, 1.0)
        scores[places] = np.minimum(scores[places], -SCALE * np.log(rate))


def _more_than_ordinary(view: View, picked: Selection) -> Floats:
    """float64 ``[len(picked)]``: by how much a session's blocks are more important in the mean than
    those of a session that says nothing: who calls everything important says nothing either."""
    importance = picked.of(view.blocks.importance)
    if not len(importance) or importance.min() == importance.max() == _ORDINARY:
        return np.zeros(len(picked))
    session = picked.of(view.blocks.session) + 1  # NO_ROW is the first
    counts = np.maximum(np.bincount(session), 1)
    means = np.bincount(session, weights=importance) / counts
    return np.asarray((np.maximum(means, _ORDINARY) - _ORDINARY)[session])


def _on_chain(view: View, picked: Selection) -> Mask:
    """bool ``[len(picked)]``: blocks that the next turn of their session may match.

    Not those behind the end of its last turn (a partial block), nor those of a branch that it left
    behind.
    """
    blocks, sessions = view.blocks, view.sessions
    tip = sessions.tip[: sessions.size]
    idle = sessions.running[: sessions.size] == 0
    end = np.where(idle & (tip >= 0), blocks.depth[tip], np.iinfo(np.int32).max)
    end = np.append(end, np.iinfo(np.int32).max)  # the last one stands for NO_ROW
    began = np.append(sessions.started[: sessions.size], -np.inf)
    session = picked.of(blocks.session)
    on_chain = picked.of(blocks.depth) <= np.take(end, session, mode="wrap")
    on_chain &= picked.of(blocks.last_attended) >= np.take(began, session, mode="wrap")
    return np.asarray(on_chain)
