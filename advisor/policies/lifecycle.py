"""``LifecyclePolicy``: keep what is likely to be asked for again soon, session by session."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.blocks import Picked
from ...graph.policy import Scores
from ...graph.tables import Tables
from ...graph.types import BlockFlag, Rows, SessionState
from .guard import SAMPLE, Guard
from .hazard import AGES, OLDEST, Floats, ReturnModel
from .waits import KNOTS, STRANGER, Waits, features

Mask = npt.NDArray[np.bool_]

_SCALE: Final = 1000.0  # of a score: a factor of e in the rate of returns
_DEPTH_TIE: Final = 1e-5
_OFF_CHAIN: Final = 4.0  # natural logarithm of how much less a block off the chain is worth
_WAITS_A_STEP: Final = 2  # that begin, for one step of learning
_STEPS: Final = 8  # at most in one look
_FEW_WAITS: Final = 32
_LEAST_RATE: Final = 1e-9  # 1/s
_RUNNING_RATE: Final = 1.0
_TOOL_S: Final = 30.0  # how long a tool takes when nobody said
_TOOL_SLACK_S: Final = 5.0
_TOOL_MEMORY_S: Final = 300.0
_SHARED_MEMORY_S: Final = 600.0


class LifecyclePolicy:
    """Scores a block by the rate at which its session is expected to return.

    The rate (``ReturnModel.index``) is learned from the sessions of this very sidecar. Blocks that
    several sessions share have a rate of their own, from how often they are walked. The score is
    ``-1000 · ln(rate)``, so that a factor of e in the rate is a thousand points. ``Guard`` watches
    each engine, and hands over to LRU for a while where that would do better.
    """

    name: Final = "lifecycle"

    def __init__(self) -> None:
        self._waits = Waits()
        self._model = ReturnModel(KNOTS)
        self._guards: dict[int, Guard] = {}
        self._learned = 0  # of the waits that began

    def observe(self, tables: Tables, engine: int, now: float) -> None:
        """Notice who returned, learn from it, and compare with LRU."""
        returned = self._waits.observe(tables.sessions)
        for guard_of in self._guards.keys() - {engine}:
            self._guards[guard_of].note(returned)
        guard = self._guards.setdefault(engine, Guard())
        guard.note(returned)
        sample = tables.blocks.sample(SAMPLE)
        guard.look(tables, engine, sample, _on_chain(tables, sample), now)
        self._learn(now)

    def scores(self, tables: Tables, engine: int, picked: Picked, now: float) -> Scores:
        """float64 ``[len(picked)]``, higher goes first."""
        scores = np.multiply(picked.of(tables.blocks.depth), _DEPTH_TIE, dtype=np.float64)
        if self._yields(engine, now):
            return scores + (now - picked.last_used())
        scores -= self._claims(tables, picked, now)
        _score_shared(scores, tables, picked, now)
        scores += _SCALE * _OFF_CHAIN * ~_on_chain(tables, picked)
        return scores

    def terms(self, tables: Tables, row: int, now: float) -> dict[str, float]:
        """The score's parts: the session's rate of return, sharing, its place in the chain."""
        only = Picked(tables.blocks, np.array([row], dtype=np.int32))
        own = -self._claims(tables, only, now)
        shared = own.copy()
        _score_shared(shared, tables, only, now)
        return {
            "return_rate": float(own[0]),
            "sharing": float(shared[0] - own[0]),
            "off_chain": 0.0 if _on_chain(tables, only)[0] else _SCALE * _OFF_CHAIN,
        }

    def _learn(self, now: float) -> None:
        """As many steps as there is news: nothing happens, nothing is computed."""
        steps = (self._waits.begun - self._learned) // _WAITS_A_STEP
        if steps and self._waits.begun >= _FEW_WAITS:
            self._learned = self._waits.begun
            self._model.learn(*self._waits.cohort(now), min(steps, _STEPS))

    def _yields(self, engine: int, now: float) -> bool:
        guard = self._guards.get(engine)
        return guard is not None and guard.yields(now)

    def _claims(self, tables: Tables, picked: Picked, now: float) -> Floats:
        """float64 ``[len(picked)]``: 1000 · ln of the rate at which each one's session returns."""
        session = picked.of(tables.blocks.session)
        rates = self._session_rates(tables, session, now)
        worth = np.append(np.log(rates), 0.0)  # the last one stands for NO_ROW
        claims = np.take(worth, session, mode="wrap")
        nobodys = np.flatnonzero(session < 0)
        if nobodys.size:
            age = now - picked.last_used()[nobodys]
            claims[nobodys] = np.log(np.maximum(self._stranger_rate(age), _LEAST_RATE))
        return np.asarray(_SCALE * claims)

    def _session_rates(self, tables: Tables, wanted: Rows, now: float) -> Floats:
        """float64 ``[sessions.size]``, 1/s; of sessions that are not ``wanted``: the least."""
        sessions = tables.sessions
        present = np.zeros(sessions.size + 1, dtype=np.bool_)
        present[wanted] = True  # NO_ROW lands behind the last
        rates = np.full(sessions.size, _LEAST_RATE)
        rows = np.flatnonzero(present[:-1])
        state, last_seen = sessions.state[rows], sessions.last_seen[rows]
        rates[rows[state == SessionState.RUNNING]] = _RUNNING_RATE
        is_quiet = (state != SessionState.RUNNING) & (state != SessionState.ENDED)
        quiet, age = rows[is_quiet], np.maximum(0.0, now - last_seen[is_quiet])
        rates[quiet] = self._model.index(features(sessions, quiet), age)
        waiting = rows[state == SessionState.WAITING_FOR_TOOL]
        rates[waiting] = np.maximum(rates[waiting], _tool_rate(tables, waiting, now))
        return np.asarray(np.maximum(rates, _LEAST_RATE))

    def _stranger_rate(self, age: Floats) -> Floats:
        """The rate of blocks that no session claims: as of a first turn of nobody's."""
        known = self._model.index(np.repeat(STRANGER, len(AGES), axis=0), AGES)
        return np.asarray(np.interp(np.minimum(age, OLDEST), AGES, known))


def _tool_rate(tables: Tables, waiting: Rows, now: float) -> Floats:
    """1/s: a pause ends when it was said to, and is given up slowly after that."""
    sessions = tables.sessions
    paused, due = sessions.last_seen[waiting], sessions.expected_return[waiting]
    due = np.where(np.isfinite(due), np.maximum(due, paused), paused + _TOOL_S)
    overdue = np.maximum(0.0, now - (due + (due - paused)))
    return np.asarray(
        np.exp(-overdue / _TOOL_MEMORY_S) / (np.maximum(due - now, 0.0) + _TOOL_SLACK_S)
    )


def _score_shared(scores: Scores, tables: Tables, picked: Picked, now: float) -> None:
    """A block that several sessions walk is worth at least the rate at which they do."""
    blocks = tables.blocks
    places = np.flatnonzero(picked.of(blocks.flags) & int(BlockFlag.SHARED))
    if not places.size:
        return
    shared = Picked(blocks, picked.rows[places])
    idle = now - shared.last_used()
    seconds = now - shared.of(blocks.created) + idle + _SHARED_MEMORY_S
    rate = np.maximum(shared.of(blocks.walkers) - 1.0, 1e-6) / seconds
    scores[places] = np.minimum(scores[places], -_SCALE * np.log(rate))


def _on_chain(tables: Tables, picked: Picked) -> Mask:
    """bool ``[len(picked)]``: what the next turn of a block's session may match.

    Not what lies behind the end of its last turn (a partial block), nor what that left behind.
    """
    blocks, sessions = tables.blocks, tables.sessions
    tip = sessions.tip[: sessions.size]
    idle = sessions.running[: sessions.size] == 0
    end = np.where(idle & (tip >= 0), blocks.depth[tip], np.iinfo(np.int32).max)
    end = np.append(end, np.iinfo(np.int32).max)  # the last one stands for NO_ROW
    began = np.append(sessions.started[: sessions.size], -np.inf)
    session = picked.of(blocks.session)
    on_chain = picked.of(blocks.depth) <= np.take(end, session, mode="wrap")
    on_chain &= picked.of(blocks.last_attended) >= np.take(began, session, mode="wrap")
    return np.asarray(on_chain)
