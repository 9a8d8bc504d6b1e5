"""``RunningRequests``: requests whose end is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ..types import Rows

MOST_BLOCKS: Final = 1 << 22  # of all of them: 17 MB; chosen
_MOST_REQUESTS: Final = 65_536  # chosen


class Running(NamedTuple):
    """A request that was scheduled.

    Attributes:
        number: Its id in the log of requests.
        first: Of ``rows``: the first that it computes.
    """

    number: int
    engine: int
    rows: Rows
    session: str
    first: int = 0


class RunningRequests:
    """Requests by their engine's column and their name, the oldest first.

    Attributes:
        nbytes: Of their rows.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[int, str], Running] = {}
        self._blocks = 0
        self.nbytes = 0

    def add(self, name: str, running: Running) -> None:
        """Add a request, which must not be there."""
        self._running[running.engine, name] = running
        self._count(running, 1)

    def pop(self, engine: int, name: str) -> Running | None:
        """Remove a request; None if it is not there."""
        running = self._running.pop((engine, name), None)
        if running is not None:
            self._count(running, -1)
        return running

    def of(self, engine: int) -> list[str]:
        """The names of an engine's requests."""
        return [name for column, name in self._running if column == engine]

    def numbers(self, engine: int) -> list[int]:
        """The ids in the log of an engine's requests."""
        return [each.number for each in self._running.values() if each.engine == engine]

    def computed(self, engine: int) -> Iterator[Rows]:
        """What each of an engine's requests computes."""
        for each in self._running.values():
            if each.engine == engine:
                yield each.rows[each.first :]

    def surplus(self) -> tuple[int, str] | None:
        """The engine and the name of the oldest request, if there are too many."""
        full = len(self._running) > _MOST_REQUESTS or self._blocks > MOST_BLOCKS
        return next(iter(self._running)) if full and len(self._running) > 1 else None

    def _count(self, running: Running, sign: int) -> None:
        self._blocks += sign * len(running.rows)
        self.nbytes += sign * running.rows.nbytes
