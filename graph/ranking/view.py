"""``View``: all that one ranking is computed from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..sessions.sessions import SessionTable
from ..tables.blocks import BlockTable
from ..tables.tables import Tables
from .profile import Rules


@dataclass(frozen=True, slots=True)
class View:
    """The columns, the rules, the engine whose pool is meant, and the time.

    Made once per ranking, and passed on whole. Its holder reads the columns and writes none.

    Attributes:
        engine: A residency column; ``NO_ROW`` for a question about no engine in particular.
        now: Monotonic seconds of the graph's clock.
        kept_share: Of a pool, that may be kept whatever scores say, for whoever asks what would be
            if it were another; None: what holds.
    """

    tables: Tables
    rules: Rules
    engine: int
    now: float
    kept_share: float | None = None

    @property
    def blocks(self) -> BlockTable:
        """The columns of blocks."""
        return self.tables.blocks

    @property
    def sessions(self) -> SessionTable:
        """The columns of sessions."""
        return self.tables.sessions

    def of(self, engine: int) -> View:
        """The same moment, for another engine."""
        return replace(self, engine=engine)
