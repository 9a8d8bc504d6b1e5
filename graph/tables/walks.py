"""Which blocks requests walked, in order: what a shadow of an engine's pool replays."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from ..types import Rows

MAX_WALKS: Final = 65_536
"""Kept for one engine between two rankings; at 200 requests a second, those of minutes; chosen."""


class Walk(NamedTuple):
    """A request's pass down its chain, noted at its start and at its end.

    Attributes:
        rows: int32, its chain's block rows, the first block first.
        reach: How many of them a prefix match could have covered.
        found: How many of them the engine's pool held; -1 at the request's end.
    """

    rows: Rows
    reach: int
    found: int


class WalkLog:
    """Walks by engine since they were last taken; nothing is kept of engines that nobody
    watches."""

    def __init__(self) -> None:
        self._walks: dict[int, deque[Walk]] = {}

    def watch(self, engine: int) -> bool:
        """Keep this engine's walks from now on; True if that is new, or begins anew."""
        new = engine not in self._walks
        if new:
            self._walks[engine] = deque(maxlen=MAX_WALKS)
        return new

    def add(self, engine: int, walk: Walk) -> None:
        """Note a walk; beyond ``MAX_WALKS`` the oldest is dropped."""
        walks = self._walks.get(engine)
        if walks is not None:
            walks.append(walk)

    def take(self, engine: int) -> list[Walk]:
        """Take this engine's walks since the last call."""
        walks = self._walks.get(engine)
        if not walks:
            return []
        taken = list(walks)
        walks.clear()
        return taken

    def forget(self, engine: int) -> None:
        """Forget an engine that is gone, or emptied its cache."""
        self._walks.pop(engine, None)
