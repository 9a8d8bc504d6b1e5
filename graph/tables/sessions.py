"""Sessions: named ones (``session_id``), or else chains of requests that each extend the one
before. Rows are reused when ``limit`` is reached, those idle longest first.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import NEVER, NO_ROW, Keys, Rows, SessionState, StopReason, Tier
from .blocks import BlockTable
from .columns import grown
from .returns import SessionOutlook

_BATCHES: Final = 256  # a whole table is reused in this many batches; chosen
_NONE: Final[Rows] = np.empty(0, dtype=np.int32)


class QuietRows:
    """Chooses which sessions' rows new sessions take: those that were quiet for longest. It chooses
    many at a time, because choosing reads every session, and clearing a row reads every block.
    """

    def __init__(self) -> None:
        self._chosen: list[tuple[int, float]] = []  # and when each was last seen; the next one last

    def take(self, running: Rows, last_seen: npt.NDArray[np.float64]) -> tuple[int, Rows]:
        """Return the next row to reuse, and the batch of rows chosen with it if it was chosen just
        now.

        A row whose session became active after the row was chosen is left alone.

        Args:
            running: int32 ``[n]``, requests of each session inside an engine; a running session is
                taken only if all sessions are running.
            last_seen: float64 ``[n]``, monotonic seconds.
        """
        while self._chosen:
            row, seen = self._chosen.pop()
            if not running[row] and last_seen[row] == seen:
                return row, _NONE
        quiet = np.where(running > 0, np.inf, last_seen)
        count = max(1, len(quiet) // _BATCHES)
        rows = np.argpartition(quiet, count - 1)[:count]
        rows = rows[np.argsort(quiet[rows], kind="stable")]
        self._chosen = [(int(row), float(last_seen[row])) for row in rows[:0:-1]]
        return int(rows[0]), np.asarray(rows, dtype=np.int32)


INFERRED: Final = "~"  # first character of the name of a session that no caller named


_OF_RANKINGS: Final = (
    "state", "tenant", "engine", "last_seen", "started", "gap", "expected_return", "reach",
    "inferred", "confidence", "turns",
)  # fmt: skip


class SessionTable(SessionOutlook):
    """Sessions by row; the block table's ``session`` column holds row numbers. ``clear`` is called
    with rows about to be reused, which nothing may refer to any more.
    """

    def __init__(self, limit: int, clear: Callable[[Rows], None] = lambda rows: None) -> None:
        super().__init__()
        self.bound = core.SessionColumns()  # where compiled loops find the columns
        self._limit = limit
        self._clear = clear
        self._quiet = QuietRows()
        self._rows: dict[tuple[int, str], int] = {}
        self._name_bytes = 0
        self.changes = 0  # rises whenever a session appears, begins or ends a turn, or is over
        # The earliest return that was told, or is predicted, of sessions that began to wait since
        # it was last set to inf, in seconds.
        self.soonest = math.inf

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self.columns_nbytes(self.size) + sys.getsizeof(self._rows) + self._name_bytes

    def copied(self) -> SessionTable:
        """Return a copy for rankings made while sessions change: their columns, no names."""
        size, one = self.size, copy.copy(self)
        for name in _OF_RANKINGS:
            setattr(one, name, getattr(self, name)[:size].copy())
        one.names = [""] * size
        one._reached, one._ended = self._reached.copy(), self._ended.copy()
        return one

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return every column by name, cut to the rows in use; views, read only."""
        return self.views(self.size)

    def load_columns(self, columns: dict[str, npt.NDArray[Any]], names: list[str]) -> None:
        """Fill an empty table with the results of ``columns()`` and ``names``."""
        if len(names) > len(self.state):
            self.grow(len(names))
        self.names = list(names)
        self._name_bytes = sum(map(sys.getsizeof, names))
        self.fill(columns, self.size)
        self.changes += 1
        self._rows = {
            (int(tenant), name): row
            for row, (tenant, name) in enumerate(zip(self.tenant.tolist(), names, strict=False))
        }

    def find(self, name: str, tenant: int) -> int:
        """Return the row of a session; ``NO_ROW`` if it is unknown."""
        return self._rows.get((tenant, name), NO_ROW)

    def rows_named(self, name: str) -> list[int]:
        return [row for (_, known), row in self._rows.items() if known == name]

    def ensure(self, name: str, tenant: int, now: float) -> int:
        """Return a session's row. An unknown session gets a row, as seen at ``now`` on the graph's
        clock; if the table is full, another session is forgotten for it. Sessions of one name under
        two tenants are different.
        """
        row = self.find(name, tenant)
        if row != NO_ROW:
            return row
        row = self._reuse() if len(self._rows) >= self._limit else self._append()
        self._name_bytes += sys.getsizeof(name) - sys.getsizeof(self.names[row])
        self.names[row] = name
        self._rows[tenant, name] = row
        self.refresh(np.array([row], dtype=np.int32))
        self.changes += 1
        self.tenant[row] = tenant
        self.inferred[row] = name.startswith(INFERRED)
        self.created[row] = self.last_seen[row] = now
        return row

    def begin_turn(
        self, row: int, engine: int, now: float, prompt_tokens: int = 0, reach: int = -1,
        tip: int = NO_ROW,
    ) -> None:  # fmt: skip
        """Note that a request entered an engine. Its prompt has ``reach`` full blocks (-1: not all
        are known); the last of them is at row ``tip`` (``NO_ROW``: there is none).
        """
        self.changes += 1
        was = core.begin_turn(self, row, engine, now, prompt_tokens, reach, tip)
        if was is not None:
            self.note_turn(*was)

    def end_turn(self, row: int, tip: int, now: float, prompt: int = 0, total: int = 0) -> None:
        """Note that a request of the session left the engine. Its chain ended at block row ``tip``,
        after ``prompt`` tokens, or ``total`` tokens with its answer.
        """
        self.changes += 1
        if core.end_turn(self, row, tip, now, prompt, total):
            self.take_back_end(row)

    def begin_walk(
        self, blocks: BlockTable, row: int, rows: Rows, engine: int, now: float, prompt_tokens: int,
        whole: bool,
    ) -> int:  # fmt: skip
        """As ``begin_turn``, for a request that walks these block rows; ``whole``: they are all
        full blocks of its prompt. The session owns these blocks, and shares those that others
        walked too. Returns how many blocks of its last turn it abandoned, and so superseded; 0
        while another request of the session runs, and for a prompt at most half as long that shares
        none of them: a side question, or a subagent.
        """
        self.changes += 1
        left, was = core.begin_walk(blocks, self, row, rows, engine, now, prompt_tokens, whole)
        if was is not None:
            self.note_turn(*was)
        return left

    def end_walk(
        self, blocks: BlockTable, row: int, rows: Rows, now: float, prompt: int, total: int
    ) -> None:
        """As ``end_turn``, for a request that walked these block rows."""
        self.changes += 1
        if core.end_walk(blocks, self, row, rows, now, prompt, total):
            self.take_back_end(row)

    def wait(self, row: int, expected_return: float, tool: int = NO_ROW) -> None:
        """Note that the session waits for a tool until ``expected_return``, a time or NEVER."""
        if self.running[row] == 0:
            if self.state[row] == SessionState.ENDED:  # that was wrong: it goes on
                self.take_back_end(row)
            self.changes += 1
            self.stop[row] = StopReason.TOOL_CALL
            self.tool[row] = tool
            self.state[row] = SessionState.WAITING_FOR_TOOL
            self.expected_return[row] = expected_return
            self.soonest = min(self.soonest, self._due_of(row))

    def rest(self, row: int) -> None:
        """Note that the session's last answer ended its turn, or that its tool asks a person."""
        if self.running[row] == 0:
            self.stop[row] = StopReason.END_OF_TURN
            if self.state[row] == SessionState.WAITING_FOR_TOOL:
                self.changes += 1
                self.state[row] = SessionState.IDLE
                self.tool[row], self.expected_return[row] = NO_ROW, NEVER

    def cut_short(self, row: int) -> None:
        if self.running[row] == 0:
            self.stop[row] = StopReason.TRUNCATED

    def end(self, row: int) -> None:
        if self.running[row] == 0 and self.state[row] != SessionState.ENDED:
            self.changes += 1
            self.state[row] = SessionState.ENDED
            self.note_end(row)

    def interrupt(self, engine: int | None = None) -> None:
        """Note that no request of ``engine`` (None: of any engine) is known to run any more."""
        self.changes += 1
        state, running = self.state[: self.size], self.running[: self.size]
        there = running > 0
        if engine is not None:
            there &= self.engine[: self.size] == engine
        state[there] = SessionState.IDLE
        running[there] = 0

    def _reuse(self) -> int:
        row, chosen = self._quiet.take(self.running[: self.size], self.last_seen[: self.size])
        if len(chosen):
            self._clear(chosen)
        del self._rows[int(self.tenant[row]), self.names[row]]
        return row

    def _append(self) -> int:
        self.names.append("")
        self._name_bytes += sys.getsizeof("")
        if self.size > len(self.state):
            self.grow(max(self.size, len(self.state) + len(self.state) // 4))
        return self.size - 1


_SESSIONS: Final = 64  # most recent sessions remembered per memory; chosen


@dataclass(slots=True)
class MemoryFacts:
    """Properties of a MEMORY node."""

    # ``first_seen``, ``last_recalled``: monotonic seconds.
    first_seen: float
    last_recalled: float = field(init=False)
    recalls: int = 0  # times that a new session named it, or a session for other blocks
    # Rows of the last sessions that named it, in order; rows are reused.
    sessions: dict[int, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last_recalled = self.first_seen

    def recalled(self, session: int, now: float) -> None:
        self.recalls += 1
        self.last_recalled = now
        self.sessions.pop(session, None)
        self.sessions[session] = None
        while len(self.sessions) > _SESSIONS:
            del self.sessions[next(iter(self.sessions))]


LIMIT: Final = 32_768  # changes; chosen: 590 kB
_LEAST: Final = 1024  # changes for which there is room at first; chosen
_CHANGE: Final = np.dtype(
    [
        ("key", "<u8"),  # the graph's key
        ("at", "<f8"),  # time in the clock's seconds
        ("tier", "u1"),
        ("sign", "i1"),  # 1: it got its first copy there; -1: its last copy there was dropped
    ]
)
Changes = npt.NDArray[np.void]


class CopyLog:
    """A ring of the latest changes of copies, by block; a block's session may change later."""

    def __init__(self) -> None:
        self._ring = np.zeros(0, dtype=_CHANGE)
        self._next = 0

    @property
    def nbytes(self) -> int:
        return int(self._ring.nbytes)

    def add(self, keys: Keys, tier: Tier, sign: int, now: float) -> None:
        """Note that these blocks got copies (``sign`` 1), or lost their last ones (-1)."""
        keys = keys[-LIMIT:]
        if not len(keys):
            return
        end = self._next + len(keys)
        if len(self._ring) < min(LIMIT, end):
            self._ring = grown(self._ring, min(LIMIT, max(_LEAST, 2 * end)))
        slots = np.arange(self._next, end) % len(self._ring)
        self._ring["key"][slots], self._ring["at"][slots] = keys, now
        self._ring["tier"][slots], self._ring["sign"][slots] = int(tier), sign
        self._next = end

    def changes(self) -> Changes:
        """Return ``key, at, tier, sign`` of the remembered changes, the oldest first."""
        count = min(self._next, len(self._ring))
        slots = np.arange(self._next - count, self._next) % max(1, len(self._ring))
        remembered: Changes = self._ring[slots]
        return remembered
