"""``FleetRouter``: chooses the engine for a request, for the lab and the proxy alike."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from .board import EngineBoard, Floats, Mask, Tokens

LIVE_S: Final = 600.0
"""Idle seconds after which a session no longer counts as live, as for admission."""
MOST_SESSIONS: Final = 1_000_000
"""Sessions whose home is remembered; those idle longest are forgotten first. Chosen: 300 MB."""


class Home(NamedTuple):
    """The engine that has a session's KV, and the tokens of its last context."""

    engine: int
    tokens: int
    seen_at: float  # time of its last turn
    fresh: bool = True  # whether it has had only one turn so far


class Homes:
    """Sessions' homes, the longest idle first; keeps the board's ``live`` and ``fresh``."""

    def __init__(self, board: EngineBoard, most: int = MOST_SESSIONS) -> None:
        self._board = board
        self._most = most
        self._live: OrderedDict[Hashable, Home] = OrderedDict()
        self._idle: OrderedDict[Hashable, Home] = OrderedDict()  # their KV does not count
        self._began = self._came_back = 0

    def __len__(self) -> int:
        return len(self._live) + len(self._idle)

    @property
    def return_rate(self) -> float:
        """Return the share of sessions that returned after their first turn; 1 before any did."""
        return (self._came_back + 1) / (self._began + 1)

    def counted(self, session: Hashable) -> float:
        """Return a session's expected live tokens: ``return_rate`` of a first turn's context."""
        home = self._live.get(session)
        if home is None:
            return 0.0
        return home.tokens * (self.return_rate if home.fresh else 1.0)

    def live(self) -> Floats:
        """Return the expected tokens of live sessions, float64 ``[engines]``; see ``counted``."""
        board = self._board
        expected: Floats = board.live - (1.0 - self.return_rate) * board.fresh
        return expected

    def of(self, session: Hashable) -> Home | None:
        return self._live.get(session) or self._idle.get(session)

    def settle(self, session: Hashable, engine: int, tokens: int, now: float) -> None:
        """Make an engine the home of a session, whose newest context has ``tokens`` tokens."""
        home = self.of(session)
        self._began += home is None
        self._came_back += home is not None and home.fresh
        self.forget(session)
        self._join(session, Home(engine, tokens, now, home is None))
        self._expire(now)

    def put_back(self, session: Hashable, made: Home | None, before: Home | None) -> None:
        """Undo ``settle`` for a turn that was not answered, unless a later turn followed."""
        if made is None or self.of(session) is not made:
            return
        self._began -= before is None
        self._came_back -= before is not None and before.fresh
        self.forget(session)
        if before is not None:
            self._join(session, before)

    def forget(self, session: Hashable) -> None:
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

    def _expire(self, now: float) -> None:
        """Stop counting sessions idle for too long; forget the oldest beyond ``most``."""
        while self._live:
            session, home = next(iter(self._live.items()))
            if home.seen_at > now - LIVE_S and len(self._live) <= self._most:
                break
            self.forget(session)
            self._idle[session] = home
        while len(self) > self._most:
            self._idle.popitem(last=False)


_NOTHING: Final = np.zeros(1, dtype=np.int64)
_NONE_LOST: Final = np.zeros(1, dtype=np.bool_)


class Reason(StrEnum):
    """Why a request goes to its engine."""

    HOME = "home"
    NEW = "new"
    HOME_DOWN = "home_down"
    HOME_DRAINS = "home_drains"
    HOME_REFUSED = "home_refused"
    HOME_OVERLOADED = "home_overloaded"
    HOME_FORGOT = "home_forgot"


class Holdings(NamedTuple):
    """What each engine holds of one prompt, in tokens from the prompt's start."""

    pool: Tokens = _NOTHING  # int64 ``[engines]`` (or ``[1]``, for all): in the engine's pool
    copied: Tokens = _NOTHING  # int64, likewise: in its pool or its own tiers; at least ``pool``
    shared: int = 0  # tokens in a store that engines share
    # bool ``[engines]`` (or ``[1]``, for all): whether the missing part was evicted; False: it may
    # never have been sent.
    lost: Mask = _NONE_LOST

    def within(self, tokens: int) -> Holdings:
        """Limit to a prompt's length, since a session's last context may have been longer."""
        return Holdings(
            np.minimum(self.pool, tokens),
            np.minimum(self.copied, tokens),
            min(self.shared, tokens),
            self.lost,
        )


class RoutingRequest(NamedTuple):
    session: Hashable | None  # session of the turn; None: unknown
    tokens: int  # tokens of its prompt
    refused_by: frozenset[int] = frozenset()  # numbers of engines that have refused it


class Choice(NamedTuple):
    """The engine for a request, and the reason."""

    engine: int  # its number
    seconds: float  # expected time to first token there
    reason: Reason
    tokens: int  # prompt tokens to compute: what the request adds to the engine's queue


class NoEngineError(Exception):
    """No engine takes requests at present."""


OVERLOAD: Final = 4.0
"""How much more a session's home may cost than the best other engine, in units of the time that the
home takes to compute the whole prompt: what is short for a slow engine is long for a fast one.
Chosen: of 0 to 4 and none, recorded agents' prompts wait least with it.
"""
_KEPT: Final = 0.5
"""Share of its last context that a session's home must hold. Chosen: with less, most of it must be
computed again on any engine.
"""


class FleetRouter:
    """Rates each engine by a cost in seconds; sends later turns to the session's home unless that
    is down, overloaded, or holds too little of the session's context.

    A request costs the time to compute what the engine does not hold, to load what it holds in
    tiers, and to compute the tokens queued there. A session without a home, or one that leaves it,
    also pays for what it displaces:

    - KV of live sessions beyond the pool's size, which must be computed again;
    - one token for each token that it computes, times this engine's share of recent requests
    relative to the mean;
    - the whole prompt for each consecutive request that this engine refused lately.

    Sessions with only one turn count by the share of such sessions that returned. Among equal
    costs, the engine whose live sessions have the least KV is chosen.
    """

    def __init__(self, board: EngineBoard, overload: float = OVERLOAD) -> None:
        self.board = board
        self.homes = Homes(board)  # where sessions live
        self.counts: Counter[Reason] = Counter()  # decisions by reason
        self._overload = overload

    def route(self, wanted: RoutingRequest, holdings: Holdings, now: float) -> Choice:
        """Choose the engine for a request, and note that it waits there; raises NoEngineError."""
        choice = self.choose(wanted, holdings)
        self.take(choice, wanted, now)
        return choice

    def take(self, choice: Choice, wanted: RoutingRequest, now: float) -> None:
        self.counts[choice.reason] += 1
        self.board.waiting[choice.engine] += choice.tokens
        self.board.ask(choice.engine, wanted.tokens)
        if wanted.session is not None:
            self.homes.settle(wanted.session, choice.engine, wanted.tokens, now)

    def computed(self, choice: Choice) -> None:
        """Note that an engine computed a request's prompt, or that the request never reached it."""
        self.board.waiting[choice.engine] -= choice.tokens

    def choose(self, wanted: RoutingRequest, holdings: Holdings) -> Choice:
        """Choose the engine for a request without noting anything; raises NoEngineError."""
        takes = self.board.takes
        takes[list(wanted.refused_by)] = False
        if not takes.any():
            raise NoEngineError("no engine takes requests: all are down, draining or refuse it")
        holdings = holdings.within(wanted.tokens)
        costs = np.where(takes, self._costs(wanted, holdings), np.inf)
        home = self.homes.of(wanted.session) if wanted.session is not None else None
        reason = self._reason(home, wanted, holdings, costs)
        if home is not None and reason is Reason.HOME:
            engine = home.engine
        else:
            engine = self._placed(home, wanted, holdings, costs)
            if home is not None and engine == home.engine:  # nowhere is better
                reason = Reason.HOME
        left = wanted.tokens - max(_at(holdings.copied, engine), holdings.shared)
        return Choice(engine, float(costs[engine]), reason, max(0, left))

    def costs(self, wanted: RoutingRequest, holdings: Holdings) -> Floats:
        """Return the seconds that a request takes at each engine, float64 ``[engines]``, up or
        not.
        """
        return self._costs(wanted, holdings.within(wanted.tokens))

    def _costs(self, wanted: RoutingRequest, holdings: Holdings) -> Floats:
        board = self.board
        reusable = np.maximum(holdings.copied, holdings.shared)
        seconds: Floats = (wanted.tokens - reusable + board.waiting) * board.compute_s
        # An engine computes what takes it longer to load.
        seconds += (holdings.copied - holdings.pool) * np.minimum(board.load_s, board.compute_s)
        seconds += (reusable - holdings.copied) * np.minimum(board.fetch_s, board.compute_s)
        return seconds

    def _placed(
        self, home: Home | None, wanted: RoutingRequest, holdings: Holdings, costs: Floats
    ) -> int:
        """Return the cheapest engine for a session without a home, or one that leaves it."""
        board = self.board
        live = self.homes.live()
        if home is not None:
            # It displaces nothing of its own.
            live[home.engine] -= self.homes.counted(wanted.session)
        beyond = np.clip(live + wanted.tokens - board.pool, 0, wanted.tokens)
        computed = wanted.tokens - np.maximum(holdings.copied, holdings.shared)
        displaced = np.where(board.pool > 0, beyond, 0) + computed * self._pressure()
        total = costs + (displaced + board.refusing * wanted.tokens) * board.compute_s
        cheapest = np.flatnonzero(total <= total.min())
        return int(cheapest[live[cheapest].argmin()])

    def _pressure(self) -> Floats:
        """float64 ``[engines]``: tokens asked of each lately, over the mean."""
        asked = self.board.asked
        pressure: Floats = asked / max(1.0, float(asked.mean()))
        return pressure

    def _reason(
        self, home: Home | None, wanted: RoutingRequest, holdings: Holdings, costs: Floats
    ) -> Reason:
        if home is None:
            return Reason.NEW
        if not self.board.up[home.engine]:
            return Reason.HOME_DOWN
        if self.board.draining[home.engine]:
            return Reason.HOME_DRAINS
        if home.engine in wanted.refused_by:
            return Reason.HOME_REFUSED
        whole_s = wanted.tokens * self.board.compute_s[home.engine]
        if costs[home.engine] - costs.min() > self._overload * whole_s:
            return Reason.HOME_OVERLOADED
        held = max(_at(holdings.copied, home.engine), holdings.shared)
        had = min(home.tokens, wanted.tokens)
        if _at(holdings.lost, home.engine) and held < _KEPT * had:
            return Reason.HOME_FORGOT
        return Reason.HOME


def _at(column: Tokens | Mask, engine: int) -> int:
    return int(column[engine if len(column) > 1 else 0])
