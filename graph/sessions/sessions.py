"""Sessions: which come back, and by what evidence.

A session is what a caller names (``session_id``), or else a chain of requests each of which extends
the one before. Rows are reused when ``limit`` is reached: those quiet for longest go first.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..types import NEVER, NO_ROW, Rows, SessionState, StopReason
from .pauses import PAUSE_COLUMNS, note_answer, note_pause
from .quiet_rows import QuietRows
from .tools import ToolBook

INFERRED: Final = "~"
"""Opens the name of a session that no caller named."""

_INITIAL_SESSIONS: Final = 256  # rows; chosen
_NO_ROWS: Final[Rows] = np.empty(0, dtype=np.int32)

_COLUMNS: Final[dict[str, tuple[Any, Any]]] = {
    "state": (np.uint8, int(SessionState.IDLE)),
    "tenant": (np.int64, NO_ROW),
    "turns": (np.int32, 0),
    "running": (np.int32, 0),  # its requests inside the engine now
    "engine": (np.int8, NO_ROW),  # residency column of the engine that ran its last request
    "created": (np.float64, 0.0),
    "last_seen": (np.float64, 0.0),  # start or end of its last request
    "started": (np.float64, NEVER),  # start of its last turn
    "gap": (np.float32, 0.0),  # seconds between turns, exponential mean
    "tokens": (np.int32, 0),  # prompt of its last turn, with the answer once that is known
    "grown": (np.int32, 0),  # by how many tokens that prompt extends the turn before
    "written": (np.int32, 0),  # tokens that the last turn answered
    "expected_return": (np.float64, NEVER),  # NEVER when nobody said
    "tip": (np.int32, NO_ROW),  # block row where its last turn ended
    "reach": (np.int32, 0),  # full blocks of its last prompt
    "inferred": (np.bool_, False),  # nobody named it: a request that extended none of before
    "stop": (np.uint8, int(StopReason.UNKNOWN)),  # why its last answer ended
    "tool": (np.int32, NO_ROW),  # that it waits for, in ``tools``
    **PAUSE_COLUMNS,
}

# P(another turn | turns so far) on the Mooncake conversation trace: the prior until we know better.
RETURN_PRIOR: Final = np.array([0.25, 0.39, 0.49, 0.56, 0.60, 0.66, 0.74])
_PRIOR_STRENGTH: Final = 20.0  # sessions that the prior counts for; chosen
_GAP_SHARE: Final = 0.3  # weight of the newest gap in the mean; chosen
_LONGEST_SLACK_S: Final = 30.0  # seconds past its time for which a session is still due; chosen


class SessionTable:
    """Sessions by row; the block table's ``session`` column holds row numbers."""

    state: npt.NDArray[np.uint8]
    tenant: npt.NDArray[np.int64]
    turns: Rows
    running: Rows
    engine: npt.NDArray[np.int8]
    created: npt.NDArray[np.float64]
    last_seen: npt.NDArray[np.float64]
    started: npt.NDArray[np.float64]
    gap: npt.NDArray[np.float32]
    tokens: Rows
    grown: Rows
    written: Rows
    expected_return: npt.NDArray[np.float64]
    tip: Rows
    reach: Rows
    inferred: npt.NDArray[np.bool_]
    stop: npt.NDArray[np.uint8]
    tool: Rows
    last_pause: npt.NDArray[np.float32]
    second_pause: npt.NDArray[np.float32]
    third_pause: npt.NDArray[np.float32]
    mean_pause: npt.NDArray[np.float32]
    recent_pause: npt.NDArray[np.float32]
    longest_pause: npt.NDArray[np.float32]
    tool_pause: npt.NDArray[np.float32]
    other_pause: npt.NDArray[np.float32]
    mean_written: npt.NDArray[np.float32]

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._quiet = QuietRows()
        self._rows: dict[tuple[int, str], int] = {}
        self.names: list[str] = []
        self.tools = ToolBook()
        self._reached = np.zeros(len(RETURN_PRIOR) + 1)  # sessions that had a k-th turn
        self._tool_pause = np.inf  # seconds, exponential mean over all sessions; inf: none seen
        for name, (dtype, fresh) in _COLUMNS.items():
            setattr(self, name, np.full(_INITIAL_SESSIONS, fresh, dtype=dtype))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Rows ever used."""
        return len(self.names)

    @property
    def nbytes(self) -> int:
        plain = sum(getattr(self, name).nbytes for name in _COLUMNS)
        return int(plain + sys.getsizeof(self._rows) + sum(map(sys.getsizeof, self.names)))

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column by name, cut to the rows in use; views, for reading."""
        return {name: getattr(self, name)[: self.size] for name in _COLUMNS}

    def learned(self) -> dict[str, npt.NDArray[np.float64]]:
        """What the sessions so far taught about all sessions: kept beside the columns."""
        pause = np.array([self._tool_pause])
        return {"reached": self._reached, "pause": pause, "tools": self.tools.stats()}

    def load_learned(
        self, learned: dict[str, npt.NDArray[np.float64]], tools: list[list[int | str]]
    ) -> None:
        """Take over what ``learned()`` and ``tools.names`` gave."""
        self.tools.restore(tools, learned["tools"])
        self._reached[:] = learned["reached"]
        self._tool_pause = float(learned["pause"][0])

    def load_columns(self, columns: dict[str, npt.NDArray[Any]], names: list[str]) -> None:
        """Fill an empty table with what ``columns()`` and ``names`` gave."""
        self._reserve(len(names))
        self.names = list(names)
        for name in _COLUMNS:
            getattr(self, name)[: self.size] = columns[name]
        self._rows = {
            (int(tenant), name): row
            for row, (tenant, name) in enumerate(zip(self.tenant.tolist(), names, strict=False))
        }

    def find(self, name: str, tenant: int) -> int:
        """The row of a session, ``NO_ROW`` if it is unknown."""
        return self._rows.get((tenant, name), NO_ROW)

    def rows_named(self, name: str) -> list[int]:
        """Rows of this name under any tenant."""
        return [row for (_, known), row in self._rows.items() if known == name]

    def ensure(self, name: str, tenant: int, now: float) -> tuple[int, Rows]:
        """The row of a session, created if unknown, and rows that are reused from now on.

        The caller must clear the reused rows from the blocks that still name them.
        """
        row, reused = self.find(name, tenant), _NO_ROWS
        if row != NO_ROW:
            return row, reused
        if len(self._rows) >= self._limit:
            row, reused = self._quiet.take(self.running[: self.size], self.last_seen[: self.size])
            del self._rows[int(self.tenant[row]), self.names[row]]
        else:
            row = self._append()
        self.names[row] = name
        self._rows[tenant, name] = row
        for column, (_, fresh) in _COLUMNS.items():
            getattr(self, column)[row] = fresh
        self.tenant[row] = tenant
        self.inferred[row] = name.startswith(INFERRED)
        self.created[row] = self.last_seen[row] = now
        return row, reused

    def begin_turn(self, row: int, engine: int, now: float, prompt_tokens: int = 0) -> None:
        """Note that a request of the session entered an engine."""
        if self.running[row] == 0:
            self._note_gap(row, now)
            self.started[row] = now
            self.grown[row] = prompt_tokens - self.tokens[row] if self.turns[row] else 0
            self.tokens[row] = prompt_tokens
            self.turns[row] += 1
            self._reached[min(int(self.turns[row]) - 1, len(RETURN_PRIOR))] += 1
        self.running[row] += 1
        self.engine[row] = engine
        self.state[row] = SessionState.RUNNING
        self.expected_return[row] = NEVER
        self.last_seen[row] = now

    def end_turn(self, row: int, tip: int, now: float, prompt: int = 0, total: int = 0) -> None:
        """A request of the session left the engine; its chain ended at block row ``tip``.

        Args:
            prompt: Tokens of its prompt.
            total: Tokens of its prompt and its answer.
        """
        self.written[row] = max(0, total - prompt)
        note_answer(self, row, int(self.written[row]))
        self.stop[row] = StopReason.UNKNOWN
        self.tokens[row] = total
        self.running[row] = max(0, int(self.running[row]) - 1)
        if self.running[row] == 0:
            self.state[row] = SessionState.IDLE
        self.tip[row] = tip
        self.last_seen[row] = now

    def wait(self, row: int, expected_return: float, tool: int = NO_ROW) -> None:
        """Note that the session is paused (a tool runs); ``expected_return`` is a time, or
        NEVER."""
        if self.running[row] == 0:
            self.stop[row] = StopReason.TOOL_CALL
            self.tool[row] = tool
            self.state[row] = SessionState.WAITING_FOR_TOOL
            self.expected_return[row] = expected_return

    def rest(self, row: int) -> None:
        """Note that the session's last answer ended its turn: a person reads it."""
        if self.running[row] == 0:
            self.stop[row] = StopReason.END_OF_TURN

    def end(self, row: int) -> None:
        """Note that the session does not return."""
        if self.running[row] == 0:
            self.state[row] = SessionState.ENDED

    def interrupt(self, engine: int | None = None) -> None:
        """Note that none of an engine's requests (or of all engines') is known to run any more."""
        state, running = self.state[: self.size], self.running[: self.size]
        there = running > 0
        if engine is not None:
            there &= self.engine[: self.size] == engine
        state[there] = SessionState.IDLE
        running[there] = 0

    def return_probability(self) -> npt.NDArray[np.float64]:
        """float64 ``[size]``: P(another turn), from the turns so far.

        The share of sessions that continued after as many turns, learned as they come, with
        ``RETURN_PRIOR`` as the prior.
        """
        reached, went_on = self._reached[:-1], self._reached[1:]
        learned = (went_on + _PRIOR_STRENGTH * RETURN_PRIOR) / (reached + _PRIOR_STRENGTH)
        turns = np.clip(self.turns[: self.size] - 1, 0, len(RETURN_PRIOR) - 1)
        return np.asarray(np.minimum(learned, 1.0)[turns])

    def due(self) -> npt.NDArray[np.float64]:
        """float64 ``[size]``: when each session that waits for a tool is expected; inf: it is not.

        What was stated, or else the session's own mean pause after its last turn, or everyone's.
        """
        waiting = self.state[: self.size] == SessionState.WAITING_FOR_TOOL
        gap = self.gap[: self.size]
        predicted = self.last_seen[: self.size] + np.where(gap > 0, gap, self._tool_pause)
        stated = self.expected_return[: self.size]
        return np.where(waiting, np.where(stated > NEVER, stated, predicted), np.inf)

    def soon(self, horizon_s: float, now: float) -> npt.NDArray[np.intp]:
        """intp: the rows of sessions that are due, the earliest first.

        A session is due from ``horizon_s`` before its expected return until one expected pause
        (clamped to ``horizon_s`` … 30 s) after it.
        """
        due = self.due()
        pause = np.clip(due - self.last_seen[: self.size], horizon_s, _LONGEST_SLACK_S)
        rows = np.flatnonzero((due - horizon_s <= now) & (now <= due + pause))
        return rows[np.argsort(due[rows], kind="stable")]

    def credit(self, now: float, memory_s: float) -> npt.NDArray[np.float64]:
        """float64 ``[size]`` in [0, 1]: how much a session's claim on its blocks counts.

        Running: 1. Waiting for a tool: 1 until well past its expected return. Idle: the probability
        that it returns, fading over ``memory_s`` seconds. Ended: 0.
        """
        state, last_seen = self.state[: self.size], self.last_seen[: self.size]
        credit = self.return_probability()
        credit *= np.exp((last_seen - now) / memory_s)
        credit[state == SessionState.RUNNING] = 1.0
        credit[state == SessionState.ENDED] = 0.0
        waiting = np.flatnonzero(state == SessionState.WAITING_FOR_TOOL)
        paused = last_seen[waiting]
        expected = np.maximum(self.expected_return[waiting], paused)
        overdue = np.maximum(0.0, now - (expected + (expected - paused)))
        credit[waiting] = np.exp(-overdue / memory_s)
        return credit

    def _note_gap(self, row: int, now: float) -> None:
        if self.turns[row] == 0:
            return
        gap = now - self.last_seen[row]
        note_pause(self, row, gap)
        known = self.gap[row]
        self.gap[row] = gap if known == 0 else known + _GAP_SHARE * (gap - known)
        if self.state[row] == SessionState.WAITING_FOR_TOOL:
            mean = gap if np.isinf(self._tool_pause) else self._tool_pause
            self._tool_pause = mean + _GAP_SHARE * (gap - mean)
            if (tool := int(self.tool[row])) != NO_ROW:
                self.tools.note(tool, gap)
        self.tool[row] = NO_ROW

    def _append(self) -> int:
        self.names.append("")
        self._reserve(self.size)
        return self.size - 1

    def _reserve(self, rows: int) -> None:
        capacity = len(self.state)
        if rows <= capacity:
            return
        capacity = max(rows, capacity + capacity // 4)
        for name, (dtype, fresh) in _COLUMNS.items():
            column = getattr(self, name)
            grown = np.full(capacity, fresh, dtype=dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)
