"""Whose statement of a block's source layer counts, if several requests state one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..tables.tables import Tables
from ..types import DEFAULT_IMPORTANCE, NO_ROW, Authority, Rows, SessionState, SourceLayer


class LayerBook:
    """Sets layers and importances of blocks.

    What an operator stated holds against callers, and what a caller stated against what is
    inferred. Among equals the most precious layer holds while a session that stated it lives: only
    the tenant that raised a block may lower it before that.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def state(
        self,
        rows: Rows,
        layer: SourceLayer,
        importance: float | None,
        authority: Authority,
        session: int,
    ) -> None:
        """Take what ``session`` says these block rows are; ``NO_ROW`` speaks for nobody."""
        if not len(rows):
            return
        blocks = self._tables.blocks
        number, rank = int(layer), int(authority)  # numpy is slow with an enumeration's
        if authority is Authority.INFERRED:  # seen again: what was said of its worth stands
            rows = rows[blocks.layer[rows] != number]
        worth = np.float32(DEFAULT_IMPORTANCE[number] if importance is None else importance)
        rows = rows[self._may_state(rows, number, worth, rank, session)]
        blocks.layer[rows] = number
        blocks.importance[rows] = worth
        blocks.stated[rows] = rank
        blocks.raised_by[rows] = session

    def _may_state(
        self,
        rows: Rows,
        layer: int,
        worth: np.float32,
        authority: int,
        session: int,
    ) -> npt.NDArray[np.bool_]:
        blocks = self._tables.blocks
        stated, raised_by = blocks.stated[rows], blocks.raised_by[rows]
        if (raised_by == NO_ROW).all():  # as always where nobody says anything
            return np.asarray(stated <= authority)
        before = blocks.layer[rows]
        less = (before < layer) | ((before == layer) & (blocks.importance[rows] > worth))
        same = (before == layer) & (blocks.importance[rows] == worth)  # who raised it, did
        holds = (stated == authority) & (less | same) & ~self._yields(raised_by, session)
        return np.asarray((stated <= authority) & ~holds)

    def _yields(self, raised_by: Rows, session: int) -> npt.NDArray[np.bool_]:
        """Whether ``session`` may take back what others said: sessions of its own tenant, or gone
        ones."""
        sessions = self._tables.sessions
        gone = (raised_by == NO_ROW) | (sessions.state[raised_by] == SessionState.ENDED)
        tenant = sessions.tenant[session] if session != NO_ROW else NO_ROW
        return np.asarray(gone | (sessions.tenant[raised_by] == tenant))
