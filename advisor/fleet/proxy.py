"""``FleetProxy``: sends a request to the engine that the router chooses, else to another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from .board import EngineBoard
from .callers import Call, Callers, SideEffect
from .engines import NEEDS_KEY, EngineRoster, HealthWatch
from .pools import PoolShadows
from .residency import ResidencyView
from .router import Choice, FleetRouter, Holdings, Home, NoEngineError, RoutingRequest
from .upstream import (
    ENGINE_HEADER,
    FIRST_BYTE_S,
    BrokenAnswerError,
    EngineAddress,
    NothingAnsweredError,
    Reply,
    SilentError,
    Upstream,
)

DECISIONS: Final = 10_000
"""Decisions whose durations are kept, for percentiles; chosen: a hundred lie beyond the p99."""
MOST_TRIES: Final = 3  # engines that may fail on one request; chosen
MOST_DROPS: Final = 2
"""Of these, engines that may drop a request that they received; chosen: the request may be what
kills them, and must not reach all engines.
"""
PAUSE_S: Final = 5.0
"""Seconds for which a request waits while no engine takes requests; chosen: an engine that was
slow, or dropped a request, is trusted again by then.
"""
_LOOK_S: Final = 0.05  # between two checks of the engines meanwhile; chosen
_ELSEWHERE: Final = frozenset({401, 403, 404, 429, 503})
"""Statuses with which an engine refuses a request that another one may answer: it expects another
key, lacks an adapter, or is overloaded.
"""
_BEFORE_IT_BEGAN: Final = frozenset({401, 403, 404, 429})
"""Those of ``_ELSEWHERE`` with which a request is refused before any work on it began."""
_BROKEN: Final = 2  # consecutive errors that are blamed on the engine and not on a request; chosen
_LEAST_TIMED: Final = 512  # with fewer tokens to compute, no speed is measured; chosen


@dataclass
class Counts:
    answered: int = 0  # answered completely
    retried: int = 0  # sent to another engine because the first failed without answering
    turned_away: int = 0  # sent to another engine because the first refused it
    hung: int = 0  # given up because an engine was silent too long
    broken: int = 0  # the engine failed in the middle of the answer
    left: int = 0  # the client disconnected before the end
    refused: int = 0  # not sent to any engine, because the request is invalid
    unserved: int = 0  # no engine answered


class Placed(NamedTuple):
    """Where a request was sent, and what must be undone if it is not answered there."""

    choice: Choice
    wanted: RoutingRequest
    # ``before``, ``made``: its session's home before, and the home set by the request.
    before: Home | None = None
    made: Home | None = None
    new: Sequence[Hashable] = ()  # links of its prompt that the engine did not hold


class _Drop(NamedTuple):
    """One time that a request was sent to an engine and not answered."""

    upstream: Upstream
    at: float
    look: asyncio.Task[None]  # ends once the engine's state is known


class FleetProxy:
    """Serves several engines as one."""

    def __init__(
        self,
        engines: Sequence[EngineAddress],  # at first; the roster's `list_again` changes them
        # what sidecars report; None: the proxy goes by its own memory alone
        residency: ResidencyView | None = None,
        # seconds for which an engine may be silent before an answer's first byte
        first_byte_s: float = FIRST_BYTE_S,
    ) -> None:
        self.board = EngineBoard()
        self.router = FleetRouter(self.board)
        self.pools = PoolShadows()
        self.callers = Callers()
        self.residency = residency
        self.health = HealthWatch(
            self.board,
            lambda engine: self.pools.forget(engine.number),
            lambda number: "" if residency is None else residency.hashing(number),
        )
        self.engines = EngineRoster(self.board, self.health, first_byte_s)
        self.engines.list_again(engines)
        self.counts = Counts()
        self.decided_s: deque[float] = deque(maxlen=DECISIONS)
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.engines.start()
        if self.residency is not None:
            self._asking = asyncio.create_task(self.residency.watch())

    async def close(self) -> None:
        await self.engines.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def begin(self, asked: Call) -> tuple[Reply, Upstream]:
        """Get the first bytes of an answer; afterwards the request's body is dropped.

        A request refused by one engine is sent to one other engine, if that may answer it. Raises
        NoEngineError or NothingAnsweredError.
        """
        reply, upstream, placed = await self._begun(asked, frozenset())
        if reply.failed and self._refused(asked, placed, reply):
            self.counts.turned_away += 1
            reply, upstream = await self._elsewhere(asked, reply, upstream)
        asked.body.release()
        reply.headers.append((ENGINE_HEADER, b"%d" % upstream.number))
        return reply, upstream

    async def _elsewhere(
        self, asked: Call, refusal: Reply, refuser: Upstream
    ) -> tuple[Reply, Upstream]:
        """Ask another engine; return the first refusal if none answers, or all want another key."""
        try:
            reply, upstream, placed = await self._begun(asked, frozenset({refuser.number}))
        except (NoEngineError, NothingAnsweredError):
            return refusal, refuser
        except BaseException:
            refusal.close()
            raise
        if reply.failed:
            self._refused(asked, placed, reply)
        keeps = reply.status in NEEDS_KEY and refusal.status not in NEEDS_KEY
        (reply if keeps else refusal).close()
        return (refusal, refuser) if keeps else (reply, upstream)

    async def _begun(
        self, asked: Call, refused_by: frozenset[int]
    ) -> tuple[Reply, Upstream, Placed]:
        """Get the first bytes of an answer or refusal from any engine; raises as ``begin`` does."""
        drops: list[_Drop] = []
        for tries in count(1):
            placed = await self._place_soon(asked, refused_by, drops)
            engine, start = placed.choice.engine, time.monotonic()
            upstream, queued = self.engines.upstreams[engine], int(self.board.waiting[engine])
            upstream.asked += 1
            try:
                reply = await upstream.begin(asked)
            except NothingAnsweredError as error:
                self._take_back(placed)
                self.counts.hung += isinstance(error, SilentError)
                if error.sent:
                    look = self.health.look_at(upstream, str(error))
                    drops.append(_Drop(upstream, time.monotonic(), look))
                elif not error.ours:  # nothing was sent: no request can be at fault
                    self.health.dropped(upstream, str(error))
                may_go_on = asked.repeatable and len(drops) < MOST_DROPS
                if tries == MOST_TRIES or (error.sent and not may_go_on):
                    raise
                self.counts.retried += 1
                continue
            finally:
                upstream.asked -= 1
                self.router.computed(placed.choice)
            if not reply.failed:
                self._taken(asked, placed, queued, time.monotonic() - start)
                for drop in drops:
                    if drop.upstream is not upstream:
                        self.health.outdone(drop.upstream, drop.at)
                if asked.turn is not None and asked.effect is not SideEffect.NONE:
                    self.callers.answered(asked.turn, reply.first)
            return reply, upstream, placed
        raise AssertionError("unreachable")

    async def rest(self, reply: Reply, upstream: Upstream) -> AsyncGenerator[bytes, None]:
        """Yield all bytes of a started answer; raises BrokenAnswerError."""
        upstream.running += 1
        try:
            async with contextlib.aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BrokenAnswerError as error:
            self.counts.broken += 1
            self.health.look_at(upstream, f"in the middle of an answer: {error}")
            raise
        finally:
            upstream.running -= 1
        self.counts.answered += 1
        self.health.served(upstream)

    def why(self, call: Call, error: NothingAnsweredError) -> str:
        if error.sent and not call.repeatable:
            return f"the engine dropped this request, and may have done what it asks: {error}"
        if error.sent:
            return f"engines dropped this request, so it is sent to no further one: {error}"
        return f"engines cannot be reached: {error}"

    def finished(self, asked: Call) -> None:
        if asked.turn is not None and asked.turn.ends:
            self.router.homes.forget(asked.turn.session)

    async def _place_soon(
        self, asked: Call, refused_by: frozenset[int], drops: Sequence[_Drop]
    ) -> Placed:
        """Choose an engine, one that dropped this request only if there is no other; wait up to
        ``PAUSE_S`` for one that may take requests again.
        """
        avoided = refused_by.union(drop.upstream.number for drop in drops)
        if self._takes_beside(avoided):
            return self._place(asked, avoided)
        if drops:  # whether those that dropped it are well decides who takes it
            await asyncio.wait({drop.look for drop in drops})
        until = time.monotonic() + PAUSE_S
        while not self.board.takes.any():
            if time.monotonic() >= until or not self.engines.may_come_back:
                raise NoEngineError(self.engines.why_none())
            await asyncio.sleep(_LOOK_S)
        return self._place(asked, avoided if self._takes_beside(avoided) else refused_by)

    def _takes_beside(self, avoided: frozenset[int]) -> bool:
        """Tell whether any other engine than these takes requests."""
        takes = self.board.takes
        takes[list(avoided)] = False
        return bool(takes.any())

    def _place(self, asked: Call, refused_by: frozenset[int]) -> Placed:
        start = time.perf_counter()
        turn, now = asked.turn, time.monotonic()
        if turn is None:
            wanted = RoutingRequest(None, 1, refused_by)
            return Placed(self.router.route(wanted, Holdings(), now), wanted)
        homes = self.router.homes
        before = homes.of(turn.session)
        holdings = self.pools.holdings(turn.prompt.links, len(self.board))
        if self.residency is not None:
            if before is not None:
                self.residency.note_home(turn.engine_name, before.engine)
            holdings = self.residency.corrected(turn.engine_name, holdings)
        wanted = RoutingRequest(turn.session, max(turn.prompt.tokens, 1), refused_by)
        choice = self.router.route(wanted, holdings, now)
        pool_tokens = int(self.board.pool[choice.engine])
        new = self.pools.offered(turn.prompt.links, choice.engine, pool_tokens)
        self.decided_s.append(time.perf_counter() - start)
        return Placed(choice, wanted, before, homes.of(turn.session), new)

    def _taken(self, asked: Call, placed: Placed, queued: int, seconds: float) -> None:
        """Note that an engine began to answer ``seconds`` after it was asked, and learn its speed;
        ``queued`` tokens had to be computed until then, the request's own among them.
        """
        engine = placed.choice.engine
        self.board.note_answer(engine, refused=False)
        if asked.turn is not None:
            self.pools.taken(engine, int(self.board.pool[engine]))
            self.callers.sent(asked.turn)
        if asked.streams and queued >= _LEAST_TIMED:
            self.board.measured(engine, queued, seconds)

    def _refused(self, asked: Call, placed: Placed, reply: Reply) -> bool:
        """Note that an engine refused a request; returns whether another one may answer it."""
        engine = placed.choice.engine
        self._take_back(placed)
        if reply.status not in _ELSEWHERE and not reply.is_of_server:
            return False  # it is the request's fault
        self.board.note_answer(engine, refused=True)
        others = self.board.takes
        others[engine] = False
        if reply.status in _BEFORE_IT_BEGAN:
            may = asked.repeatable_if_refused
        else:
            may = reply.status in _ELSEWHERE or self.board.refusing[engine] >= _BROKEN
            may = may and asked.repeatable
        return may and bool(others.any())

    def _take_back(self, placed: Placed) -> None:
        """Undo the notes of a request that an engine refused or dropped."""
        if placed.wanted.session is not None:
            self.router.homes.put_back(placed.wanted.session, placed.made, placed.before)
        self.pools.refused(placed.new, placed.choice.engine)
