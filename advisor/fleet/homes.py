"""Where sessions live: each one's engine, and how much KV live sessions have on each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, NamedTuple

from .engine_board import EngineBoard
from .measured_speeds import Floats

LIVE_S: Final = 600.0
"""Idle seconds after which a session no longer counts as live, as for admission."""
MOST_SESSIONS: Final = 1_000_000
"""Sessions whose home is remembered; the longest idle are forgotten first. Chosen: 300 MB."""


class Home(NamedTuple):
    """A session's engine, the tokens of its last context, when it was last heard of, and whether it
    has had one turn so far."""

    engine: int
    tokens: int
    heard_at: float
    fresh: bool = True


class Homes:
    """Homes of sessions, the longest idle first; keeps the board's ``live`` and ``fresh`` columns.

    Args:
        board: Whose engines they are.
        live_s: Idle seconds after which a session's KV no longer counts.
        most: Sessions that are remembered.
    """

    def __init__(
        self, board: EngineBoard, live_s: float = LIVE_S, most: int = MOST_SESSIONS
    ) -> None:
        self._board = board
        self._live_s = live_s
        self._most = most
        self._live: OrderedDict[Hashable, Home] = OrderedDict()
        self._idle: OrderedDict[Hashable, Home] = OrderedDict()  # their KV does not count
        self._began = self._came_back = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._idle)

    @property
    def return_rate(self) -> float:
        """Share of sessions so far that came back after their first turn; 1 before any began."""
        return (self._came_back + 1) / (self._began + 1)

    def counted(self, session: Hashable) -> float:
        """Expected live tokens of a session: its last context, times ``return_rate`` if it has had
        one turn."""
        home = self._live.get(session)
        if home is None:
            return 0.0
        return home.tokens * (self.return_rate if home.fresh else 1.0)

    def live(self) -> Floats:
        """float64 ``[engines]``: tokens of live sessions, each counted as it may come back."""
        board = self._board
        expected: Floats = board.live - (1.0 - self.return_rate) * board.fresh
        return expected

    def of(self, session: Hashable) -> Home | None:
        """A session's home; None for a session that is not known."""
        return self._live.get(session) or self._idle.get(session)

    def settle(self, session: Hashable, engine: int, tokens: int, now: float) -> None:
        """Note that a session's newest context, of ``tokens``, is at this engine."""
        home = self.of(session)
        self._began += home is None
        self._came_back += home is not None and home.fresh
        self.forget(session)
        self._join(session, Home(engine, tokens, now, home is None))
        self._let_go(now)

    def put_back(self, session: Hashable, made: Home | None, before: Home | None) -> None:
        """Note that a turn of a session was not answered: unless there was a later one, its home is
        the one before.

        Args:
            made: The home that the turn made.
            before: The one before the turn; None: it was the session's first.
        """
        if made is None or self.of(session) is not made:
            return
        self._began -= before is None
        self._came_back -= before is not None and before.fresh
        self.forget(session)
        if before is not None:
            self._join(session, before)

    def forget(self, session: Hashable) -> None:
        """Forget a session: it has ended."""
        if (home := self._live.pop(session, None)) is not None:
            self._count(home, -1)
        else:
            self._idle.pop(session, None)

    def _join(self, session: Hashable, home: Home) -> None:
        self._live[session] = home
        self._count(home, 1)

    def _count(self, home: Home, sign: int) -> None:
        self._board.live[home.engine] += sign * home.tokens
        self._board.fresh[home.engine] += sign * home.tokens * home.fresh

    def _let_go(self, now: float) -> None:
        """No longer count who is idle for too long, and forget whom there is no room for."""
        while self._live:
            session, home = next(iter(self._live.items()))
            if home.heard_at > now - self._live_s and len(self._live) <= self._most:
                break
            self.forget(session)
            self._idle[session] = home
        while len(self) > self._most:
            self._idle.popitem(last=False)
