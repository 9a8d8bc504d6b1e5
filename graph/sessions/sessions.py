"""Sessions: which come back, and by what evidence.

A session is what a caller names (``session_id``), or else a chain of requests each of which extends
the one before. Rows are reused when ``limit`` is reached: those quiet for longest go first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..types import NEVER, NO_ROW, Rows, SessionState, StopReason
from .outlook import SessionOutlook
from .pauses import note_answer
from .quiet_rows import QuietRows

INFERRED: Final = "~"
"""Opens the name of a session that no caller named."""


class SessionTable(SessionOutlook):
    """Sessions by row; row numbers stand in the block table's ``session`` column.

    Args:
        limit: Sessions kept at most.
        clear: Is told of rows that are about to be reused: nothing may name them any more.

    Attributes:
        changes: Rises whenever a session appears, begins or ends a turn, or is over.
        soonest: The earliest return that was told, or is predicted, of sessions that began to wait
            since it was last set to inf, in seconds.
    """

    def __init__(self, limit: int, clear: Callable[[Rows], None] = lambda rows: None) -> None:
        super().__init__()
        self._limit = limit
        self._clear = clear
        self._quiet = QuietRows()
        self._rows: dict[tuple[int, str], int] = {}
        self._name_bytes = 0
        self.changes = 0
        self.soonest = math.inf

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self.columns_nbytes + sys.getsizeof(self._rows) + self._name_bytes

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Every column by name, cut to the rows in use; views, for reading."""
        return self.views(self.size)

    def load_columns(self, columns: dict[str, npt.NDArray[Any]], names: list[str]) -> None:
        """Fill an empty table with what ``columns()`` and ``names`` gave."""
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
        """The row of a session, ``NO_ROW`` if it is unknown."""
        return self._rows.get((tenant, name), NO_ROW)

    def rows_named(self, name: str) -> list[int]:
        """Rows of this name under any tenant."""
        return [row for (_, known), row in self._rows.items() if known == name]

    def ensure(self, name: str, tenant: int, now: float) -> int:
        """The row of a session, created if unknown: another one is forgotten where it is full."""
        row = self.find(name, tenant)
        if row != NO_ROW:
            return row
        row = self._reuse() if len(self._rows) >= self._limit else self._append()
        self._name_bytes += sys.getsizeof(name) - sys.getsizeof(self.names[row])
        self.names[row] = name
        self._rows[tenant, name] = row
        self.refresh(row)
        self.changes += 1
        self.tenant[row] = tenant
        self.inferred[row] = name.startswith(INFERRED)
        self.created[row] = self.last_seen[row] = now
        return row

    def begin_turn(self, row: int, engine: int, now: float, prompt_tokens: int = 0) -> None:
        """Note that a request of the session entered an engine."""
        self.changes += 1
        if self.running[row] == 0:
            self._take_back_end(row)
            self.note_gap(row, now)
            self.started[row] = now
            self.grown[row] = prompt_tokens - self.tokens[row] if self.turns[row] else 0
            longer = self.turns[row] and prompt_tokens > self.asked[row]
            self.longer[row] = self.longer[row] + 1 if longer else 0
            self.tokens[row] = self.asked[row] = prompt_tokens
            self.turns[row] += 1
            self.note_turn(row)
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
        self.changes += 1
        self.written[row] = max(0, total - prompt)
        note_answer(self, row, int(self.written[row]))
        self.stop[row] = StopReason.UNKNOWN
        self.tokens[row] = total
        self.running[row] = max(0, int(self.running[row]) - 1)
        if self.running[row] == 0:
            self._take_back_end(row)
            self.state[row] = SessionState.IDLE
        self.tip[row] = tip
        self.last_seen[row] = now

    def wait(self, row: int, expected_return: float, tool: int = NO_ROW) -> None:
        """Note that the session is paused (a tool runs); ``expected_return`` is a time, or
        NEVER."""
        if self.running[row] == 0:
            self._take_back_end(row)
            self.changes += 1
            self.stop[row] = StopReason.TOOL_CALL
            self.tool[row] = tool
            self.state[row] = SessionState.WAITING_FOR_TOOL
            self.expected_return[row] = expected_return
            self.soonest = min(self.soonest, float(self._due(np.array([row]))[0]))

    def rest(self, row: int) -> None:
        """Note that the session's last answer ended its turn, or its tool asks: it waits for a
        person."""
        if self.running[row] == 0:
            self.stop[row] = StopReason.END_OF_TURN
            if self.state[row] == SessionState.WAITING_FOR_TOOL:
                self.changes += 1
                self.state[row] = SessionState.IDLE
                self.tool[row], self.expected_return[row] = NO_ROW, NEVER

    def cut_short(self, row: int) -> None:
        """Note that the session's last answer was cut at a length."""
        if self.running[row] == 0:
            self.stop[row] = StopReason.TRUNCATED

    def end(self, row: int) -> None:
        """Note that the session does not return."""
        if self.running[row] == 0 and self.state[row] != SessionState.ENDED:
            self.changes += 1
            self.state[row] = SessionState.ENDED
            self.note_end(row)

    def interrupt(self, engine: int | None = None) -> None:
        """Note that none of an engine's requests (or of all engines') is known to run any more."""
        self.changes += 1
        state, running = self.state[: self.size], self.running[: self.size]
        there = running > 0
        if engine is not None:
            there &= self.engine[: self.size] == engine
        state[there] = SessionState.IDLE
        running[there] = 0

    def _take_back_end(self, row: int) -> None:
        """Note that a session goes on; if it was said to be over, that was wrong."""
        if self.state[row] == SessionState.ENDED:
            self.take_back_end(row)

    def _reuse(self) -> int:
        """The row of the session that was quiet for longest."""
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
