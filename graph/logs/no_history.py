"""``NoHistory``: for graphs whose logs nobody reads, such as those of the replay lab."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .history import History

if TYPE_CHECKING:
    from ..messages.events import RequestFinished, RequestStarted
    from ..types import Rows
    from .request_facts import Hold


class NoHistory(History):
    """A history that takes no note of requests and evictions, which takes a tenth of ingest's
    time."""

    def evicted(self, engine: int, rows: Rows, now: float) -> None:
        """Take no note."""

    def started(
        self, engine: int, event: RequestStarted, session: int, rows: Rows, now: float,
        hold: Hold | None = None,
    ) -> None:  # fmt: skip
        """Take no note."""

    def finished(self, engine: int, event: RequestFinished, rows: Rows, now: float) -> None:
        """Take no note."""
