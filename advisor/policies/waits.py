"""Waits of sessions for their next turn, gathered from the session columns as they change."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.sessions import SessionTable
from ...graph.types import SessionState
from .hazard import OLDEST, Codes, Floats

Sessions = npt.NDArray[np.int64]

# What is known of a session when its turn ends, and where each is cut into classes.
_TURNS: Final = np.array([2, 3, 4, 5, 6, 8, 11, 16])
_TOKENS: Final = np.array([1024, 2048, 4096, 8192, 16384, 32768, 65536])
_WRITTEN: Final = np.array([10, 50, 150, 300, 450, 600, 900])
_GAPS: Final = np.array([1e-6, 15, 30, 45, 60, 90, 120, 200, 400])
_GROWN: Final = np.array([-1000, 0, 10, 50, 300, 1000, 5000])
CLASSES: Final = tuple(
    len(cuts) + extra for cuts, extra in
    ((_TURNS, 1), (_TOKENS, 1), (_WRITTEN, 1), (_GAPS, 1), (_GROWN, 2))
)  # fmt: skip

_KEPT: Final = 4096  # waits that ended, and as many of those that go on
_COHORT_S: Final = 3600.0


def features(sessions: SessionTable, rows: Sessions) -> Codes:
    """uint8 ``[n, features]``: the classes of sessions."""
    turns = sessions.turns[rows]
    later = turns > 1
    prompt = sessions.tokens[rows] - sessions.written[rows]
    columns = (
        np.searchsorted(_TURNS, turns, side="right"),
        np.searchsorted(_TOKENS, prompt, side="right"),
        np.searchsorted(_WRITTEN, sessions.written[rows], side="right"),
        np.searchsorted(_GAPS, sessions.gap[rows], side="right"),
        later * (1 + np.searchsorted(_GROWN, sessions.grown[rows], side="right")),
    )
    return np.stack(columns, axis=1).astype(np.uint8)


class Cohort(NamedTuple):
    """Waits to learn from; see ``ReturnModel.learn``."""

    codes: Codes
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
        self._codes = np.empty((0, len(CLASSES)), dtype=np.uint8)
        self._done_codes = np.zeros((_KEPT, len(CLASSES)), dtype=np.uint8)
        self._done_since = np.full(_KEPT, -np.inf)
        self._done_age = np.zeros(_KEPT)
        self._done = 0

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
        self._codes[fresh] = features(sessions, fresh)
        return returned

    def codes_of(self, sessions: SessionTable, rows: Sessions) -> Codes:
        """uint8 ``[n, features]``: the classes of sessions, whether they were observed or not."""
        if rows.size and int(rows[-1]) >= len(self._codes):
            return features(sessions, rows)
        return self._codes[rows]

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
            np.concatenate([self._done_codes[done], self._codes[sample]]),
            np.concatenate([self._done_age[done], now - self._since[sample]]),
            np.repeat([True, False], [len(done), len(sample)]),
            np.repeat([1.0, share], [len(done), len(sample)]),
        )

    def _close(self, rows: Sessions, started: Floats) -> None:
        rows, started = rows[-_KEPT:], started[-_KEPT:]
        at = (self._done + np.arange(len(rows))) % _KEPT
        self._done_codes[at] = self._codes[rows]
        self._done_since[at] = self._since[rows]
        self._done_age[at] = np.minimum(started - self._since[rows], OLDEST)
        self._done += len(rows)

    def _grow(self, size: int) -> None:
        more = size - len(self._since)
        if more > 0:
            self._since = np.append(self._since, np.full(more, np.nan))
            self._created = np.append(self._created, np.full(more, np.nan))
            self._codes = np.append(self._codes, np.zeros((more, len(CLASSES)), np.uint8), axis=0)
