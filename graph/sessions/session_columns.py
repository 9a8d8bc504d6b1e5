"""The properties of a session, one column each."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..columns.columns import column
from ..types import NEVER, NO_ROW, Rows, SessionState
from .pauses import PauseColumns

_INITIAL_SESSIONS: Final = 256  # rows; chosen
_EMA_SHARE: Final = 0.2  # of the newest sample in the mean of confidences; chosen


class SessionColumns(PauseColumns):
    """One row per session; its methods are those of ``SessionTable``.

    Attributes:
        names: By row.
    """

    state: npt.NDArray[np.uint8] = column(np.uint8, int(SessionState.IDLE))
    tenant: npt.NDArray[np.int64] = column(np.int64, NO_ROW)
    running: Rows = column(np.int32, 0)  # its requests inside the engine now
    # The residency column of the engine that ran its last request.
    engine: npt.NDArray[np.int8] = column(np.int8, NO_ROW)
    created: npt.NDArray[np.float64] = column(np.float64, 0.0, time=True)
    # Start or end of its last request.
    last_seen: npt.NDArray[np.float64] = column(np.float64, 0.0, time=True)
    started: npt.NDArray[np.float64] = column(np.float64, NEVER, time=True)  # its last turn's start
    gap: npt.NDArray[np.float32] = column(np.float32, 0.0)  # seconds between turns, mean
    tokens: Rows = column(np.int32, 0)  # prompt of its last turn, with the answer once it is known
    grown: Rows = column(np.int32, 0)  # by how many tokens that prompt extends the turn before
    asked: Rows = column(np.int32, 0)  # prompt of its last turn that began at rest
    longer: Rows = column(np.int32, 0)  # such turns in a row, each with a longer prompt
    written: Rows = column(np.int32, 0)  # tokens that the last turn answered
    # NEVER if it was not stated.
    expected_return: npt.NDArray[np.float64] = column(np.float64, NEVER, time=True)
    tip: Rows = column(np.int32, NO_ROW)  # block row where its last turn ended
    first_reach: Rows = column(np.int32, 0)  # full blocks of its first prompt
    reach: Rows = column(np.int32, 0)  # full blocks of its last prompt
    # Whether it was inferred: it began with a request that extended no earlier one.
    inferred: npt.NDArray[np.bool_] = column(np.bool_, False)
    # How sure the model was while it wrote to it, a running mean; below 0 if it was never sampled.
    confidence: npt.NDArray[np.float32] = column(np.float32, -1.0)
    tool: Rows = column(np.int32, NO_ROW)  # that it waits for, in ``tools``

    def __init__(self) -> None:
        super().__init__(_INITIAL_SESSIONS)
        self.names: list[str] = []

    def sure(self, row: int, confidence: float) -> None:
        """Note how sure the model was of a token that it wrote to a session."""
        before = float(self.confidence[row])
        newest = confidence if before < 0 else before + _EMA_SHARE * (confidence - before)
        self.confidence[row] = newest

    @property
    def size(self) -> int:
        """Rows ever used."""
        return len(self.names)
