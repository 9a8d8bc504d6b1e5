"""``RunningRequests``: requests whose end is awaited."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile
from typing import Final, NamedTuple

from ..types import Rows

MOST_BLOCKS: Final = 1 << 22  # of all of them: 17 MB; chosen
AWAITED_S: Final = 600.0  # so long the end of a doubted request is awaited; chosen
_MOST_REQUESTS: Final = 65_536  # chosen
_AT_ONCE: Final = 2_048  # requests, in one hold of the graph's lock; chosen


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

    An engine that lost news may have told the ends of its requests in vain: these are doubted from
    then on, and overdue after ten minutes.

    Attributes:
        nbytes: Of their rows.
    """

    def __init__(self) -> None:
        self._running: dict[int, dict[str, Running]] = {}
        self._doubted: dict[int, dict[str, tuple[Running, float]]] = {}  # since when
        self._requests = self._blocks = 0
        self.nbytes = 0

    def add(self, name: str, running: Running) -> None:
        """Add a request, which must not be there."""
        self._running.setdefault(running.engine, {})[name] = running
        self._count(running, 1)

    def pop(self, engine: int, name: str) -> Running | None:
        """Remove a request; None if it is not there."""
        running = self._running.get(engine, {}).pop(name, None)
        if running is None:
            running, _ = self._doubted.get(engine, {}).pop(name, (None, 0.0))
        if running is not None:
            self._count(running, -1)
        return running

    def doubt(self, engine: int, now: float) -> list[int]:
        """Note that an engine lost news; returns the ids in the log of its requests that were not
        doubted before."""
        doubted = self._running.pop(engine, {})
        for name, running in doubted.items():
            self._doubted.setdefault(engine, {})[name] = running, now
        return [running.number for running in doubted.values()]

    def overdue(self, engine: int, now: float) -> list[str]:
        """The names of some of an engine's requests that were doubted for too long."""
        doubted = self._doubted.get(engine, {}).items()
        old = takewhile(lambda each: now - each[1][1] > AWAITED_S, doubted)
        return [name for name, _ in islice(old, _AT_ONCE)]

    def of(self, engine: int) -> list[str]:
        """The names of an engine's requests."""
        return [*self._doubted.get(engine, {}), *self._running.get(engine, {})]

    def computed(self, engine: int) -> Iterator[Rows]:
        """What each of an engine's requests computes that are not doubted."""
        for each in self._running.get(engine, {}).values():
            yield each.rows[each.first :]

    def surplus(self) -> tuple[int, str] | None:
        """The engine and the name of the oldest request, if there are too many."""
        full = self._requests > _MOST_REQUESTS or self._blocks > MOST_BLOCKS
        if not full or self._requests <= 1:
            return None
        doubted = (each for those in self._doubted.values() for each in islice(those.items(), 1))
        oldest = [(running.number, running.engine, name) for name, (running, _) in doubted]
        certain = (each for those in self._running.values() for each in islice(those.items(), 1))
        oldest += [(running.number, running.engine, name) for name, running in certain]
        return min(oldest)[1:]

    def _count(self, running: Running, sign: int) -> None:
        self._requests += sign
        self._blocks += sign * len(running.rows)
        self.nbytes += sign * running.rows.nbytes
