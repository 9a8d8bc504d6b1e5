"""``Heard``: a request's walk as shadows see it, and the queue of those that they did not see
yet."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from ..types import Keys, Rows

MOST_BLOCKS: Final = 1 << 20  # that wait, of all walks: 12 MB; chosen
_MOST_WALKS: Final = 65_536  # that wait; chosen


class Heard(NamedTuple):
    """A request's start or end, as shadows see it.

    Attributes:
        session: Its tenant's and its own name, together.
        rows: int32, its chain's block rows; ``keys`` are the graph's, as they are now.
        reach: How many of them a prefix match could have covered; at the request's end, how many
            are its prompt's.
        found: How many of them the engine's pool held; -1 at the request's end.
        tokens: Tokens of its prompt; at the request's end, of its answer too.
        loaded: How many more blocks a load from a colder tier is to bring.
        size: Tokens of a block; 0: not told.
    """

    engine: int
    session: str
    rows: Rows
    keys: Keys
    reach: int
    found: int
    tokens: int
    at: float
    loaded: int = 0
    size: int = 0


class HeardQueue:
    """Walks since the last ``take``, the oldest of which go if nobody takes them.

    Attributes:
        nbytes: Of the rows and keys that wait.
    """

    def __init__(self) -> None:
        self._walks: deque[Heard] = deque()
        self._blocks = 0
        self.nbytes = 0

    def add(self, heard: Heard) -> None:
        """Add a walk."""
        self._walks.append(heard)
        self._count(heard, 1)
        while len(self._walks) > 1 and self._is_full:
            self._count(self._walks.popleft(), -1)

    def take(self) -> list[Heard]:
        """Take all of them, the oldest first."""
        taken = list(self._walks)
        self._walks.clear()
        self._blocks = self.nbytes = 0
        return taken

    @property
    def _is_full(self) -> bool:
        return len(self._walks) > _MOST_WALKS or self._blocks > MOST_BLOCKS

    def _count(self, heard: Heard, sign: int) -> None:
        self._blocks += sign * len(heard.rows)
        self.nbytes += sign * (heard.rows.nbytes + heard.keys.nbytes)
