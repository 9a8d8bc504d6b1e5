"""When sessions come back: by what they stated, and by what all sessions taught."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NEVER, NO_ROW, Rows, SessionState
from .pauses import note_pause
from .session_columns import SessionColumns
from .tools import ToolBook

# P(another turn | turns so far) on the Mooncake conversation trace: the prior until we know better.
RETURN_PRIOR: Final = np.array([0.25, 0.39, 0.49, 0.56, 0.60, 0.66, 0.74])
_PRIOR_STRENGTH: Final = 20.0  # sessions that the prior counts for; chosen
_GAP_SHARE: Final = 0.3  # weight of the newest gap in the mean; chosen
_LONGEST_SLACK_S: Final = 30.0  # seconds past its time for which a session is still due; chosen


class SessionOutlook(SessionColumns):
    """Expectations of sessions, as vectors over all rows ever used.

    Attributes:
        tools: How long tools take, if callers name them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tools = ToolBook(self._forget_tool)
        self._reached = np.zeros(len(RETURN_PRIOR) + 1)  # sessions that had a k-th turn
        self._ended = np.zeros(len(RETURN_PRIOR) + 1)  # … and were said to be over after it
        self._mean_tool_pause = np.inf  # seconds, exponential mean over all; inf: none seen

    def learned(self) -> dict[str, npt.NDArray[np.float64]]:
        """What the sessions so far taught about all sessions: kept beside the columns."""
        pause = np.array([self._mean_tool_pause])
        counts = {"reached": self._reached, "ended": self._ended}
        return {**counts, "pause": pause, "tools": self.tools.stats()}

    def load_learned(
        self, learned: dict[str, npt.NDArray[np.float64]], tools: list[list[int | str]]
    ) -> None:
        """Take over what ``learned()`` and ``tools.names`` gave."""
        self.tools.restore(tools, learned["tools"])
        self._reached[:], self._ended[:] = learned["reached"], learned["ended"]
        self._mean_tool_pause = float(learned["pause"][0])

    def among(self, sessions: Rows) -> Rows:
        """The rows, ascending, that occur in a column of session rows, where NO_ROW is none."""
        present = np.zeros(self.size + 1, dtype=np.bool_)  # the last one stands for NO_ROW
        present[sessions] = True
        return present[:-1].nonzero()[0].astype(np.int32)

    def return_probability(self, rows: Rows | slice = np.s_[:]) -> npt.NDArray[np.float64]:
        """float64 ``[n]``: P(another turn) of these sessions, from their turns so far.

        The share of sessions that continued after as many turns, learned as they come, with
        ``RETURN_PRIOR`` as the prior. A caller who names sessions may say which are over: for a
        session that is named, those that callers ended do not count.
        """
        reached, went_on = self._reached[:-1], self._reached[1:]
        is_named = ~self.inferred[: self.size][rows]
        turns = np.clip(self.turns[: self.size][rows] - 1, 0, len(RETURN_PRIOR) - 1)
        counted = reached[turns] - is_named * self._ended[turns]
        learned = went_on[turns] + _PRIOR_STRENGTH * RETURN_PRIOR[turns]
        return np.asarray(np.minimum(learned / (counted + _PRIOR_STRENGTH), 1.0))

    def due(self) -> npt.NDArray[np.float64]:
        """float64 ``[size]``: the expected return of each session that waits for a tool; inf for
        the others.

        The stated time, or else the session's own mean pause after its last turn, or the mean of
        all.
        """
        due = np.full(self.size, np.inf)
        waiting = self._waiting()
        due[waiting] = self._due(waiting)
        return due

    def soon(self, horizon_s: float, now: float) -> npt.NDArray[np.intp]:
        """intp: the rows of sessions that are due, the earliest first.

        A session is due from ``horizon_s`` before its expected return until one expected pause
        (clamped to ``horizon_s`` … 30 s) after it.
        """
        waiting = self._waiting()
        due = self._due(waiting)
        pause = np.clip(due - self.last_seen[waiting], horizon_s, _LONGEST_SLACK_S)
        near = (due - horizon_s <= now) & (now <= due + pause)
        return waiting[near][np.argsort(due[near], kind="stable")]

    def credit(self, now: float, memory_s: float, rows: Rows) -> npt.NDArray[np.float64]:
        """float64 ``[n]`` in [0, 1]: how much each of these sessions' claim on its blocks counts.

        Running: 1. Waiting for a tool: 1 until well past its expected return. Idle: the probability
        that it returns, fading over ``memory_s`` seconds. Ended: 0.
        """
        state, last_seen = self.state[rows], self.last_seen[rows]
        credit = self.return_probability(rows)
        credit *= np.exp((last_seen - now) / memory_s)
        credit[state == SessionState.RUNNING] = 1.0
        credit[state == SessionState.ENDED] = 0.0
        waiting = np.flatnonzero(state == SessionState.WAITING_FOR_TOOL)
        paused = last_seen[waiting]
        expected = np.maximum(self.expected_return[rows[waiting]], paused)
        overdue = np.maximum(0.0, now - (expected + (expected - paused)))
        credit[waiting] = np.exp(-overdue / memory_s)
        return credit

    def _forget_tool(self, tool: int) -> None:
        """No session waits any longer for the tool of a number that another one gets."""
        self.tool[: self.size][self.tool[: self.size] == tool] = NO_ROW

    def _place(self, row: int) -> int:
        """Where sessions with as many turns as this row's are counted."""
        return min(int(self.turns[row]) - 1, len(RETURN_PRIOR))

    def _waiting(self) -> npt.NDArray[np.intp]:
        """intp: the rows of sessions that wait for a tool, ascending."""
        return np.flatnonzero(self.state[: self.size] == SessionState.WAITING_FOR_TOOL)

    def _due(self, waiting: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """float64 ``[n]``: the expected return of sessions that wait for a tool; see ``due``."""
        gap, stated = self.gap[waiting], self.expected_return[waiting]
        predicted = self.last_seen[waiting] + np.where(gap > 0, gap, self._mean_tool_pause)
        return np.where(stated > NEVER, stated, predicted)

    def note_turn(self, row: int) -> None:
        """Note that one more session had as many turns as this row counts."""
        self._reached[self._place(row)] += 1

    def note_end(self, row: int) -> None:
        """Note that one more session was said to be over after as many turns as this row counts."""
        if self.turns[row] > 0:
            self._ended[self._place(row)] += 1

    def take_back_end(self, row: int) -> None:
        """Note that a session of which ``note_end`` was told came back all the same."""
        if self.turns[row] > 0:
            self._ended[self._place(row)] -= 1

    def note_gap(self, row: int, now: float) -> None:
        """Note that a session comes back, by the state and the time in which it was last seen."""
        if self.turns[row] == 0:
            return
        gap = now - self.last_seen[row]
        note_pause(self, row, gap)
        known = self.gap[row]
        self.gap[row] = gap if known == 0 else known + _GAP_SHARE * (gap - known)
        if self.state[row] == SessionState.WAITING_FOR_TOOL:
            mean = gap if np.isinf(self._mean_tool_pause) else self._mean_tool_pause
            self._mean_tool_pause = mean + _GAP_SHARE * (gap - mean)
            if (tool := int(self.tool[row])) != NO_ROW:
                self.tools.note(tool, gap)
        self.tool[row] = NO_ROW
