"""When sessions will return, from what callers stated and from the pauses of all sessions."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import NEVER, NO_ROW, Rows, SessionState, StopReason
from .columns import Columns, column

# How long tools take, if callers name them: learned from the pauses of sessions that wait for them.

# All chosen.
A_TENANTS_TOOLS: Final = 64
MOST_TOOLS: Final = 4096
_FEW: Final = 3  # with fewer pauses, a tool's duration is unknown
_TRIALS: Final = 64  # tools that can be tried before the oldest makes room
_MEMORY: Final = 50.0  # pauses over which a mean forgets
_KNOWN_WITHIN: Final = math.log(4.0)  # the error that a caller's own statement may have
_LEAST_S: Final = 0.01
_OTHERS: Final = ""


class ToolBook:
    """Tools by tenant and name, with the logarithms of their durations; bounded.

    Beyond ``A_TENANTS_TOOLS``, a tenant's further tools count as one. Beyond ``MOST_TOOLS``, the
    oldest tool with fewer than ``_FEW`` known pauses is removed first, so that one tenant's many
    tools do not displace what is known of another's.

    Args:
        forget: Called with a number that is about to be given to another tool.
    """

    def __init__(self, forget: Callable[[int], None] = lambda tool: None) -> None:
        self._forget = forget
        self._names: list[tuple[int, str]] = []  # tenant and name, by number
        self._numbers: dict[tuple[int, str], int] = {}
        self._of_tenant: Counter[int] = Counter()
        self._stats: list[list[float]] = []  # by number: pauses seen, mean, variance
        self._untried: deque[int] = deque()  # the oldest first; some have become known since

    def __len__(self) -> int:
        return len(self._stats)

    @property
    def names(self) -> list[tuple[int, str]]:
        """Return the tenant and name of each tool, by number."""
        return list(self._names)

    def stats(self) -> npt.NDArray[np.float64]:
        """Return float64 ``[tools, 3]``: pauses seen, mean and variance of ln(pause / s)."""
        return np.array(self._stats, dtype=np.float64).reshape(-1, 3)

    def restore(self, names: Sequence[Sequence[int | str]], stats: npt.NDArray[np.float64]) -> None:
        """Fill an empty book with the results of ``names`` and ``stats()``."""
        for tenant, name in names:
            self._create(int(tenant), str(name))
        self._stats = stats.tolist()

    def number(self, name: str, tenant: int) -> int:
        """Return the number of the tool of this name, assigning one if it is new."""
        found = self._numbers.get((tenant, name))
        if found is not None:
            return found
        if self._of_tenant[tenant] >= A_TENANTS_TOOLS and name != _OTHERS:
            return self.number(_OTHERS, tenant)
        if len(self) >= MOST_TOOLS:
            return self._replace(self._least_known(), tenant, name)
        return self._create(tenant, name)

    def name(self, tool: int) -> str | None:
        """Return the tool's name; None for ``NO_ROW``, and for a tenant's further tools."""
        return None if tool == NO_ROW else self._names[tool][1] or None

    def note(self, tool: int, seconds: float) -> None:
        """Note that a session returned from this tool after ``seconds``."""
        seen, mean, variance = self._stats[tool]
        share = 1.0 / min(seen + 1.0, _MEMORY)
        off = math.log(max(seconds, _LEAST_S)) - mean
        self._stats[tool] = [
            seen + 1.0, mean + share * off, (1.0 - share) * (variance + share * off * off)
        ]  # fmt: skip

    def expected_s(self, tool: int) -> float | None:
        """Return how many seconds a tool usually takes; None if not known within a factor of 4."""
        if tool == NO_ROW:
            return None
        seen, mean, variance = self._stats[tool]
        if seen < _FEW or math.sqrt(variance) > _KNOWN_WITHIN:
            return None
        return math.exp(mean)

    def _create(self, tenant: int, name: str) -> int:
        number = len(self._names)
        self._names.append((tenant, name))
        self._numbers[tenant, name] = number
        self._of_tenant[tenant] += 1
        self._stats.append([0.0, 0.0, 0.0])
        self._untried.append(number)
        return number

    def _least_known(self) -> int:
        """Of many tools with few known pauses the oldest, else the one with the fewest."""
        while len(self._untried) > _TRIALS:
            tool = self._untried.popleft()
            if self._stats[tool][0] < _FEW:
                return tool
        untried = set(self._untried)
        known = (tool for tool in range(len(self)) if tool not in untried)
        return min(known, key=lambda tool: self._stats[tool][0])

    def _replace(self, tool: int, tenant: int, name: str) -> int:
        self._forget(tool)
        self._of_tenant[self._names[tool][0]] -= 1
        del self._numbers[self._names[tool]]
        self._names[tool] = tenant, name
        self._numbers[tenant, name] = tool
        self._of_tenant[tenant] += 1
        self._stats[tool] = [0.0, 0.0, 0.0]
        self._untried.append(tool)
        return tool


# The columns of a session's pauses, as natural logarithms of seconds.
#
# Pauses spread over five orders of magnitude, from a tool that answers at once to a person who
# returns tomorrow, so only means of their logarithms are meaningful.

Logs = npt.NDArray[np.float32]


class PauseColumns(Columns):
    """A session's pauses, NaN if there was none, and the kinds of these pauses."""

    turns: Rows = column(np.int32, 0)
    stop: npt.NDArray[np.uint8] = column(np.uint8, int(StopReason.UNKNOWN))  # of its last answer
    last_pause: Logs = column(np.float32, np.nan)  # pause before its last turn
    second_pause: Logs = column(np.float32, np.nan)  # the pause before that
    third_pause: Logs = column(np.float32, np.nan)
    mean_pause: Logs = column(np.float32, np.nan)  # mean over all pauses
    recent_pause: Logs = column(np.float32, np.nan)  # exponential mean over all pauses
    longest_pause: Logs = column(np.float32, np.nan)
    tool_pause: Logs = column(np.float32, np.nan)  # exponential mean over pauses for a tool
    # exponential mean over pauses after an answer that ended its turn
    other_pause: Logs = column(np.float32, np.nan)
    mean_written: Logs = column(np.float32, np.nan)  # exponential mean of ln(1 + tokens answered)


_INITIAL_SESSIONS: Final = 256  # rows; chosen
_EMA_SHARE: Final = 0.2  # weight of the newest sample in the mean confidence; chosen


class SessionColumns(PauseColumns):
    """One row per session; its methods are those of ``SessionTable``."""

    state: npt.NDArray[np.uint8] = column(np.uint8, int(SessionState.IDLE))
    tenant: npt.NDArray[np.int64] = column(np.int64, NO_ROW)
    running: Rows = column(np.int32, 0)  # its requests inside the engine now
    # The residency column of the engine that ran its last request.
    engine: npt.NDArray[np.int8] = column(np.int8, NO_ROW)
    created: npt.NDArray[np.float64] = column(np.float64, 0.0, time=True)
    # Time when its last request started or ended.
    last_seen: npt.NDArray[np.float64] = column(np.float64, 0.0, time=True)
    started: npt.NDArray[np.float64] = column(np.float64, NEVER, time=True)  # its last turn's start
    gap: npt.NDArray[np.float32] = column(np.float32, 0.0)  # mean seconds between turns
    tokens: Rows = column(np.int32, 0)  # prompt of its last turn, with the answer once it is known
    grown: Rows = column(np.int32, 0)  # tokens by which that prompt extends the turn before
    asked: Rows = column(np.int32, 0)  # prompt tokens of its last turn that began when idle
    longer: Rows = column(np.int32, 0)  # number of such turns in a row with a longer prompt each
    written: Rows = column(np.int32, 0)  # tokens of the last turn's answer
    # The time stated by its caller; NEVER if none was.
    expected_return: npt.NDArray[np.float64] = column(np.float64, NEVER, time=True)
    tip: Rows = column(np.int32, NO_ROW)  # row of the block where its last turn ended
    first_reach: Rows = column(np.int32, 0)  # full blocks of its first prompt
    reach: Rows = column(np.int32, 0)  # full blocks of its last prompt
    # Whether it was inferred: it began with a request that extended no earlier one.
    inferred: npt.NDArray[np.bool_] = column(np.bool_, False)
    # Running mean of the model's confidence while answering it; below 0 if never sampled.
    confidence: npt.NDArray[np.float32] = column(np.float32, -1.0)
    tool: Rows = column(np.int32, NO_ROW)  # the tool that it waits for, in ``tools``

    def __init__(self) -> None:
        super().__init__(_INITIAL_SESSIONS)
        self.names: list[str] = []  # by row

    def sure(self, row: int, confidence: float) -> None:
        """Note the model's confidence in a token that it wrote for a session."""
        before = float(self.confidence[row])
        newest = confidence if before < 0 else before + _EMA_SHARE * (confidence - before)
        self.confidence[row] = newest

    @property
    def size(self) -> int:
        return len(self.names)


# P(another turn | turns so far) on the Mooncake conversation trace: the prior until enough is
# known.
RETURN_PRIOR: Final = np.array([0.25, 0.39, 0.49, 0.56, 0.60, 0.66, 0.74])
_PRIOR_STRENGTH: Final = 20.0  # sessions that the prior weighs as much as; chosen
_GAP_SHARE: Final = 0.3  # weight of the newest gap in the mean of all tools; chosen
_LONGEST_SLACK_S: Final = 30.0  # seconds past its time for which a session is still due; chosen


class SessionOutlook(SessionColumns):
    """Estimates whether and when each session returns, as vectors over all sessions' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = ToolBook(self._forget_tool)  # how long tools take, if callers name them
        self._reached = np.zeros(len(RETURN_PRIOR) + 1)  # sessions that had a k-th turn
        self._ended = np.zeros(len(RETURN_PRIOR) + 1)  # … and were said to be over after it
        # Seconds, exponential mean over all; inf: none seen. Of numpy: beside a column of half its
        # precision, a float of Python's would lose its own.
        self._mean_tool_pause = np.float64(np.inf)

    def learned(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return what past sessions showed about all sessions; stored beside the columns."""
        pause = np.array([self._mean_tool_pause])
        counts = {"reached": self._reached, "ended": self._ended}
        return {**counts, "pause": pause, "tools": self.tools.stats()}

    def load_learned(
        self, learned: dict[str, npt.NDArray[np.float64]], tools: list[list[int | str]]
    ) -> None:
        """Load the results of ``learned()`` and ``tools.names``."""
        self.tools.restore(tools, learned["tools"])
        self._reached[:], self._ended[:] = learned["reached"], learned["ended"]
        self._mean_tool_pause = learned["pause"][0]

    def among(self, sessions: Rows) -> Rows:
        """Return the rows, ascending, that occur in a column of session rows; NO_ROW means none."""
        present = np.zeros(self.size + 1, dtype=np.bool_)  # the last one stands for NO_ROW
        present[sessions] = True
        return present[:-1].nonzero()[0].astype(np.int32)

    def return_probability(self) -> npt.NDArray[np.float64]:
        """Return P(another turn) for each session, float64 ``[size]``, from its turns so far.

        It is the share of sessions that continued after as many turns, learned over time, with
        ``RETURN_PRIOR`` as the prior. A caller who names sessions can also say which have ended, so
        for named sessions those ended by callers are left out.
        """
        reached, went_on = self._reached[:-1], self._reached[1:]
        is_named = ~self.inferred[: self.size]
        turns = np.clip(self.turns[: self.size] - 1, 0, len(RETURN_PRIOR) - 1)
        counted = reached[turns] - is_named * self._ended[turns]
        learned = went_on[turns] + _PRIOR_STRENGTH * RETURN_PRIOR[turns]
        return np.asarray(np.minimum(learned / (counted + _PRIOR_STRENGTH), 1.0))

    def due(self) -> npt.NDArray[np.float64]:
        """Return the expected return time of each session that waits for a tool, float64
        ``[size]``; inf for the others.

        It is the stated time, or else the last turn plus the session's own mean pause, or else plus
        the mean of all sessions.
        """
        due = np.full(self.size, np.inf)
        waiting = self._waiting()
        due[waiting] = self._due(waiting)
        return due

    def soon(self, horizon_s: float, now: float) -> npt.NDArray[np.intp]:
        """Return the rows of sessions that are due, intp, the earliest first.

        A session is due from ``horizon_s`` before its expected return until one expected pause
        (clamped to ``horizon_s`` … 30 s) after it.
        """
        waiting = self._waiting()
        if not len(waiting):
            return waiting
        due = self._due(waiting)
        pause = np.clip(due - self.last_seen[waiting], horizon_s, _LONGEST_SLACK_S)
        near = (due - horizon_s <= now) & (now <= due + pause)
        return waiting[near][np.argsort(due[near], kind="stable")]

    def credit(self, now: float, memory_s: float, rows: Rows) -> npt.NDArray[np.float64]:
        """Return the weight of each session's claim on its blocks, float64 ``[n]`` in [0, 1].

        Running: 1. Waiting for a tool: 1 until well past its expected return. Idle: the probability
        that it returns, fading over ``memory_s`` seconds. Ended: 0.
        """
        credit = np.empty(len(rows))
        core.credit(
            self.state, self.last_seen, self.expected_return, self.turns, self.inferred,
            self._reached, self._ended, RETURN_PRIOR, _PRIOR_STRENGTH,
            np.asarray(rows, dtype=np.int32), now, memory_s, credit,
        )  # fmt: skip
        return credit

    def _forget_tool(self, tool: int) -> None:
        """No session waits any longer for the tool of a number that another one gets."""
        self.tool[: self.size][self.tool[: self.size] == tool] = NO_ROW

    def _waiting(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.state[: self.size] == SessionState.WAITING_FOR_TOOL)

    def _due(self, waiting: npt.NDArray[np.intp]) -> npt.NDArray[np.float64]:
        """float64 ``[n]``: the expected return of sessions that wait for a tool; see ``due``."""
        gap, stated = self.gap[waiting], self.expected_return[waiting]
        predicted = self.last_seen[waiting] + np.where(gap > 0, gap, self._mean_tool_pause)
        return np.where(stated > NEVER, stated, predicted)

    def _due_of(self, row: int) -> float:
        if (stated := self.expected_return.item(row)) > NEVER:
            return float(stated)
        gap = self.gap.item(row)
        return float(self.last_seen.item(row) + (gap if gap > 0 else self._mean_tool_pause))

    def note_turn(self, state: int, turns: int, away_s: float, tool: int) -> None:
        """Note that a session in ``state`` has one more turn after ``turns`` earlier ones. It was
        last seen ``away_s`` seconds ago, and waited for ``tool``, if any.
        """
        if turns and state == SessionState.ENDED:  # it goes on: that it was over was wrong
            self._ended[_place(turns)] -= 1
        if turns and state == SessionState.WAITING_FOR_TOOL:
            mean = away_s if math.isinf(self._mean_tool_pause) else self._mean_tool_pause
            self._mean_tool_pause = np.float64(mean + _GAP_SHARE * (away_s - mean))
            if tool != NO_ROW:
                self.tools.note(tool, away_s)
        self._reached[_place(turns + 1)] += 1

    def note_end(self, row: int) -> None:
        """Note that one more session was declared ended, after as many turns as this row has."""
        if turns := self.turns.item(row):
            self._ended[_place(turns)] += 1

    def take_back_end(self, row: int) -> None:
        """Note that a session came back although ``note_end`` was called for it."""
        if turns := self.turns.item(row):
            self._ended[_place(turns)] -= 1


def _place(turns: int) -> int:
    """The index at which sessions with this many turns are counted."""
    return min(turns - 1, len(RETURN_PRIOR))
