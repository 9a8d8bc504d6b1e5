"""``Waits``: follows how long sessions wait for their next turn, from the session columns."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...graph.compiled import core
from ...graph.tables.sessions import SessionTable
from ...graph.types import Rows, SessionState
from .hazard import Cohort, Features, Floats

Sessions = npt.NDArray[np.int64]

_LEAST_S: Final = 0.01  # the shortest pause, in seconds; chosen
_KEPT: Final = 4096  # ended waits, and as many that have not ended; chosen


FEATURES: Final = (  # their order is that of ``core/graph/returns.hpp``
    "turns", "prompt", "written", "grown", "last_pause", "second_pause", "third_pause",
    "mean_pause", "recent_pause", "longest_pause", "mean_written", "stop", "tool_pause",
    "other_pause", "stated_pause",
)  # fmt: skip
"""What is known of a session when its turn ends: natural logarithms of counts, tokens and seconds.
``grown`` is the number of tokens by which its prompt extended the turn before; ``stop`` is 1 after
a tool call and 0 after an end of turn; the others are columns of sessions.
"""

_TIMED: Final = np.array([name.endswith("_pause") for name in FEATURES])
PROMPT_FEATURE: Final = FEATURES.index("prompt")
_WRITTEN_FEATURES: Final = [FEATURES.index("written"), FEATURES.index("mean_written")]
_GROWN_FEATURE: Final = FEATURES.index("grown")
STATED_FEATURE: Final = FEATURES.index("stated_pause")
STOP_FEATURES: Final = [FEATURES.index(n) for n in ("stop", "tool_pause", "other_pause")]
"""Features known only if callers state, or the engine reads, why answers end."""


def stranger() -> Features:
    """Return the features of a first turn of which only an average size is known, float32 ``[1,
    features]``.
    """
    known = np.full((1, len(FEATURES)), np.nan, dtype=np.float32)
    known[0, :3] = 0.0, np.log(4096), np.log1p(150)
    return known


def features(sessions: SessionTable, rows: Sessions | Rows) -> Features:
    """Return float32 ``[n, features]``: see ``FEATURES``; NaN where unknown."""
    known = np.empty((len(rows), len(FEATURES)), dtype=np.float32)
    core.features(
        sessions.turns, sessions.tokens, sessions.written, sessions.grown, sessions.stop,
        sessions.state, sessions.expected_return, sessions.last_seen,
        sessions.last_pause, sessions.second_pause, sessions.third_pause, sessions.mean_pause,
        sessions.recent_pause, sessions.longest_pause, sessions.mean_written,
        sessions.tool_pause, sessions.other_pause,
        np.asarray(rows, dtype=np.int32), known.reshape(-1),
    )  # fmt: skip
    return known


def fitted(known: Features, log_speed: float, log_size: float) -> Features:
    """Return features with seconds scaled by ``exp(log_speed)`` and tokens by ``exp(log_size)``."""
    stretched = known + np.where(_TIMED, np.float32(log_speed), np.float32(0.0)).astype(np.float32)
    size = np.exp(np.float32(log_size))
    stretched[:, PROMPT_FEATURE] += np.float32(log_size)
    written, grown = known[:, _WRITTEN_FEATURES], known[:, _GROWN_FEATURE]
    stretched[:, _WRITTEN_FEATURES] = np.log1p(np.expm1(written) * size)
    stretched[:, _GROWN_FEATURE] = np.sign(grown) * np.log1p(np.expm1(np.abs(grown)) * size)
    return np.asarray(stretched)


class NewWaits(NamedTuple):
    """Waits that ended or began since the last call; float64 ``[n]``, natural logarithms."""

    pauses: Floats  # seconds of each wait that ended
    prompts: Floats  # tokens of the prompt before each wait that began


_NO_WAITS: Final = NewWaits(np.empty(0), np.empty(0))


class Waits:
    """Tracks every session's present wait, and keeps recently ended waits. A wait ends with the
    next turn. A session ended by its caller is not waiting: no return is expected.
    """

    def __init__(self) -> None:
        self._since = np.empty(0)  # by session row; NaN: not waiting
        self._created = np.empty(0)
        self._features = np.empty((0, len(FEATURES)), dtype=np.float32)
        self._done_features = np.zeros((_KEPT, len(FEATURES)), dtype=np.float32)
        self._done_since = np.full(_KEPT, -np.inf)
        self._done_age = np.zeros(_KEPT)
        self._done = 0
        self._seen: tuple[SessionTable, int] | None = None  # the sessions, and their changes
        self.begun = 0  # waits ever seen

    def observe(self, sessions: SessionTable) -> NewWaits:
        """Note which sessions changed since the last call, whichever engine's ranking makes it."""
        seen = (sessions, sessions.changes)
        if seen == self._seen:
            return _NO_WAITS
        self._seen = seen
        self._grow(sessions.size)
        size = sessions.size
        started, last_seen = sessions.started[:size], sessions.last_seen[:size]
        same = self._created == sessions.created[:size]
        open_ = ~np.isnan(self._since)
        returned = np.flatnonzero(open_ & same & (started > self._since))
        lasted = started[returned] - self._since[returned]
        self._close(returned, lasted)
        idle = (sessions.running[:size] == 0) & (sessions.turns[:size] > 0)
        idle &= sessions.state[:size] != SessionState.ENDED
        self._since[open_ & ~(same & idle)] = np.nan
        fresh = np.flatnonzero(idle & (last_seen != self._since))
        self._since[fresh] = last_seen[fresh]
        self._created[fresh] = sessions.created[fresh]
        self._features[fresh] = features(sessions, fresh)
        self.begun += len(fresh)
        prompts = np.asarray(self._features[fresh, PROMPT_FEATURE], dtype=np.float64)
        return NewWaits(np.log(np.maximum(lasted, _LEAST_S)), prompts)

    def cohort(self, now: float, oldest_s: float) -> Cohort:
        """Return the waits that began in the last ``oldest_s`` seconds, ended or not. Learning only
        from ended ones would count short waits too often.
        """
        began = now - oldest_s
        if self._done > _KEPT:
            began = max(began, float(self._done_since.min()))
        done = np.flatnonzero(self._done_since >= began)
        waiting = np.flatnonzero(self._since >= began)
        step = -(-len(waiting) // _KEPT) or 1
        sample = waiting[::step]
        share = len(waiting) / max(1, len(sample))

        def known(places: npt.NDArray[np.int64]) -> Features:
            found = np.empty((len(places), len(FEATURES)), dtype=np.float32)
            ended = places < len(done)
            found[ended] = self._done_features[done[places[ended]]]
            found[~ended] = self._features[sample[places[~ended] - len(done)]]
            return found

        return Cohort(
            known,
            np.concatenate([self._done_age[done], now - self._since[sample]]),
            np.repeat([True, False], [len(done), len(sample)]),
            np.repeat([1.0, share], [len(done), len(sample)]),
        )

    def _close(self, rows: Sessions, lasted: Floats) -> None:
        rows, lasted = rows[-_KEPT:], lasted[-_KEPT:]
        at = (self._done + np.arange(len(rows))) % _KEPT
        self._done_features[at] = self._features[rows]
        self._done_since[at] = self._since[rows]
        self._done_age[at] = lasted
        self._done += len(rows)

    def _grow(self, size: int) -> None:
        more = size - len(self._since)
        if more > 0:
            blank = np.full((more, len(FEATURES)), np.nan, dtype=np.float32)
            self._since = np.append(self._since, np.full(more, np.nan))
            self._created = np.append(self._created, np.full(more, np.nan))
            self._features = np.append(self._features, blank, axis=0)
