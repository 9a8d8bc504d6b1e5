"""Waits of sessions for their next turn, gathered from the session columns as they change."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.sessions import SessionTable
from ...graph.types import SessionState
from .hazard import OLDEST, Features, Floats

Sessions = npt.NDArray[np.int64]

_KEPT: Final = 4096  # waits that ended, and as many of those that go on
_COHORT_S: Final = 3600.0


def _signed_log(tokens: npt.ArrayLike) -> Floats:
    """Logarithmic in both directions, and straight between -10 and 10."""
    value = np.asarray(tokens, dtype=np.float64)
    return np.asarray(np.sign(value) * np.log1p(np.abs(value) / 10.0))


# What is known of a session when its turn ends, and between which values of it rates are
# interpolated: turns, prompt tokens, answer tokens, mean seconds between turns, and by how many
# tokens the prompt extended the turn before; the last two of sessions with two turns or more.
KNOTS: Final = (
    np.log([1.0, 2, 3, 4, 6, 9, 16]),
    np.log([512.0, 1024, 2048, 4096, 8192, 16384, 32768, 65536]),
    np.log([3.0, 10, 50, 150, 300, 450, 600, 900]),
    np.log([5.0, 15, 30, 45, 60, 90, 130, 200, 400, 900]),
    _signed_log([-10000, -1000, -100, 0, 15, 50, 150, 300, 1000, 5000, 20000]),
)
STRANGER: Final = np.array([[0.0, np.log(4096), np.log(150), np.nan, np.nan]], dtype=np.float32)
"""``[1, features]``: a first turn of which nothing else is known."""


def features(sessions: SessionTable, rows: Sessions) -> Features:
    """float32 ``[n, features]``: see ``KNOTS``; NaN where one does not apply."""
    written = sessions.written[rows]
    prompt = sessions.tokens[rows] - written
    columns = [np.log(np.maximum(each, 1)) for each in (sessions.turns[rows], prompt, written)]
    columns += [np.log(np.maximum(sessions.gap[rows], 1)), _signed_log(sessions.grown[rows])]
    found = np.stack(columns, axis=1).astype(np.float32)
    found[sessions.turns[rows] < 2, 3:] = np.nan
    return found


class Cohort(NamedTuple):
    """Waits to learn from; see ``ReturnModel.learn``."""

    features: Features
    age: Floats
    returned: npt.NDArray[np.bool_]
    weight: Floats


class Waits:
    """Remembers, for every session, the wait that it is in; and the last that ended.

    A wait ends by the next turn. One that a caller ended is no wait: nobody is expected.
    """

    def __init__(self) -> None:
        self._since = np.empty(0)  # by session row; NaN: not waiting
        self._created = np.empty(0)
        self._features = np.empty((0, len(KNOTS)), dtype=np.float32)
        self._done_features = np.zeros((_KEPT, len(KNOTS)), dtype=np.float32)
        self._done_since = np.full(_KEPT, -np.inf)
        self._done_age = np.zeros(_KEPT)
        self._done = 0
        self.begun = 0  # waits ever seen

    def observe(self, sessions: SessionTable) -> Sessions:
        """Take in what changed; the rows of sessions that returned since the last look."""
        self._grow(sessions.size)
        size = sessions.size
        started, last_seen = sessions.started[:size], sessions.last_seen[:size]
        same = self._created == sessions.created[:size]
        open_ = ~np.isnan(self._since)
        returned = np.flatnonzero(open_ & same & (started > self._since))
        self._close(returned, started[returned])
        idle = (sessions.running[:size] == 0) & (sessions.turns[:size] > 0)
        idle &= sessions.state[:size] != SessionState.ENDED
        self._since[open_ & ~(same & idle)] = np.nan
        fresh = np.flatnonzero(idle & (last_seen != self._since))
        self._since[fresh] = last_seen[fresh]
        self._created[fresh] = sessions.created[fresh]
        self._features[fresh] = features(sessions, fresh)
        self.begun += len(fresh)
        return returned

    def cohort(self, now: float) -> Cohort:
        """Every wait that began since some moment, ended or not, so that neither is favoured."""
        began = now - _COHORT_S
        if self._done > _KEPT:
            began = max(began, float(self._done_since.min()))
        done = np.flatnonzero(self._done_since >= began)
        waiting = np.flatnonzero(self._since >= began)
        step = -(-len(waiting) // _KEPT) or 1
        sample = waiting[::step]
        share = len(waiting) / max(1, len(sample))
        return Cohort(
            np.concatenate([self._done_features[done], self._features[sample]]),
            np.concatenate([self._done_age[done], now - self._since[sample]]),
            np.repeat([True, False], [len(done), len(sample)]),
            np.repeat([1.0, share], [len(done), len(sample)]),
        )

    def _close(self, rows: Sessions, started: Floats) -> None:
        rows, started = rows[-_KEPT:], started[-_KEPT:]
        at = (self._done + np.arange(len(rows))) % _KEPT
        self._done_features[at] = self._features[rows]
        self._done_since[at] = self._since[rows]
        self._done_age[at] = np.minimum(started - self._since[rows], OLDEST)
        self._done += len(rows)

    def _grow(self, size: int) -> None:
        more = size - len(self._since)
        if more > 0:
            blank = np.full((more, len(KNOTS)), np.nan, dtype=np.float32)
            self._since = np.append(self._since, np.full(more, np.nan))
            self._created = np.append(self._created, np.full(more, np.nan))
            self._features = np.append(self._features, blank, axis=0)
