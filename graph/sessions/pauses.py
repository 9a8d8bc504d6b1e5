"""The columns that remember a session's pauses, as natural logarithms of seconds.

Pauses spread over five orders of magnitude, from a tool that answers at once to a person who comes
back tomorrow; only means of their logarithms are meaningful.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..columns.columns import Columns, column
from ..types import Rows, StopReason

Logs = npt.NDArray[np.float32]


class PauseColumns(Columns):
    """A session's pauses, NaN where there was none, and what says which pause it was."""

    turns: Rows = column(np.int32, 0)
    stop: npt.NDArray[np.uint8] = column(np.uint8, int(StopReason.UNKNOWN))  # of its last answer
    last_pause: Logs = column(np.float32, np.nan)  # before its last turn
    second_pause: Logs = column(np.float32, np.nan)  # the one before that
    third_pause: Logs = column(np.float32, np.nan)
    mean_pause: Logs = column(np.float32, np.nan)  # of all
    recent_pause: Logs = column(np.float32, np.nan)  # exponential mean
    longest_pause: Logs = column(np.float32, np.nan)
    tool_pause: Logs = column(np.float32, np.nan)  # exponential mean of those that a tool caused
    # … of those after an answer that ended its turn.
    other_pause: Logs = column(np.float32, np.nan)
    mean_written: Logs = column(np.float32, np.nan)  # exponential mean of ln(1 + tokens answered)


_LEAST_S: Final = 0.01  # shorter pauses count as this; chosen
_SHARE: Final = 0.2  # weight of the newest in an exponential mean; chosen


def note_pause(sessions: PauseColumns, row: int, seconds: float) -> None:
    """Note that a session came back after ``seconds``; ``turns`` is still the number of turns
    before."""
    pause = math.log(max(seconds, _LEAST_S))
    pauses = int(sessions.turns[row])
    sessions.third_pause[row] = sessions.second_pause[row]
    sessions.second_pause[row] = sessions.last_pause[row]
    sessions.last_pause[row] = pause
    mean = sessions.mean_pause[row]
    sessions.mean_pause[row] = pause if math.isnan(mean) else mean + (pause - mean) / pauses
    if not sessions.longest_pause[row] >= np.float32(pause):  # also where there was none
        sessions.longest_pause[row] = pause
    _move_mean(sessions.recent_pause, row, pause)
    stop = int(sessions.stop[row])
    if stop == StopReason.TOOL_CALL:
        _move_mean(sessions.tool_pause, row, pause)
    elif stop == StopReason.END_OF_TURN:
        _move_mean(sessions.other_pause, row, pause)


def note_answer(sessions: PauseColumns, row: int, tokens: int) -> None:
    """Note that a turn of a session answered so many tokens."""
    _move_mean(sessions.mean_written, row, math.log1p(tokens))


def _move_mean(column: np.ndarray[Any, Any], row: int, value: float) -> None:
    known = column[row]
    column[row] = value if math.isnan(known) else known + _SHARE * (value - known)
