"""``FleetProxy``: sends each request to the engine that the router chooses, and to another one if
that answers nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from ..engine_board import EngineBoard, Speed
from ..fleet_router import Choice, FleetRouter, Holdings, NoEngineError, Wanted
from ..pool_shadows import PoolShadows
from ..residency.residency_view import ResidencyView
from .callers import Asked, Callers
from .engine_list import FIRST_BYTE_S, Listed
from .health import HealthWatch
from .upstream import BrokenAnswerError, NothingAnsweredError, Reply, SilentError, Upstream

DECISIONS: Final = 10_000
"""Of which the times are kept, for their percentiles; chosen: a hundred beyond the p99."""
MOST_TRIES: Final = 3
"""Engines that one request may see fail; chosen: one that kills engines must not get them all."""
PAUSE_S: Final = 5.0
"""For which a request waits where no engine takes any; chosen: one that was slow, or dropped a
request, is believed again by then."""
_LOOK_S: Final = 0.05  # between two looks at the engines meanwhile; chosen
_LEAST_TIMED: Final = 512  # tokens to compute from which an engine's speed is measured; chosen
_OK: Final = 200


@dataclass
class Counts:
    """What happened to requests.

    Attributes:
        answered: To the end.
        retried: Sent to another engine, since the first answered nothing.
        hung: Given up since an engine was silent for too long.
        broken: An engine was gone in the middle of its answer.
        left: The client was gone before the end.
        refused: Not passed on, for what it is.
        unserved: No engine answered.
    """

    answered: int = 0
    retried: int = 0
    hung: int = 0
    broken: int = 0
    left: int = 0
    refused: int = 0
    unserved: int = 0


class FleetProxy:
    """Several engines as one.

    Args:
        engines: At first; ``list_again`` changes them.
        residency: What sidecars say; None: the proxy goes by its own memory alone.
        speed: Of engines, until it is measured.
        first_byte_s: For which an engine may be silent before the first byte of an answer.
    """

    def __init__(
        self,
        engines: Sequence[Listed],
        residency: ResidencyView | None = None,
        speed: Speed | None = None,
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
        self.upstreams: list[Upstream] = []
        self.counts = Counts()
        self.decided_s: deque[float] = deque(maxlen=DECISIONS)
        self._speed, self._first_byte_s = speed, first_byte_s
        self._watching: list[asyncio.Task[None]] = []
        self.list_again(engines)

    def list_again(self, engines: Sequence[Listed]) -> None:
        """Take over a list of engines: new ones are added, missing ones get no further requests.

        Raises:
            ConfigError: One of them is no address; nothing has changed.
        """
        known = {upstream.url: upstream.number for upstream in self.upstreams}
        urls = [each.url for each in engines if each.url not in known]
        first = len(self.upstreams)  # all are made before any is added: a bad list changes nothing
        new = [Upstream(at, url, self._first_byte_s) for at, url in enumerate(urls, first)]
        for upstream in new:
            known[upstream.url] = number = self.board.add(upstream.url, self._speed)
            self.board.up[number] = False  # until it says that it is well
            self.upstreams.append(upstream)
            if self._watching:
                self._watch(upstream)
        self.board.draining[:] = True
        for each in engines:
            self.board.draining[known[each.url]] = each.drains

    async def start(self) -> None:
        """Look at all engines once, and then for ever; the first one's models count."""
        await self.health.look(self.upstreams[0])
        await asyncio.gather(*(self.health.look(each) for each in self.upstreams[1:]))
        for each in self.upstreams:
            self._watch(each)
        if self.residency is not None:
            self._watching.append(asyncio.create_task(self.residency.watch()))

    async def close(self) -> None:
        """Stop looking, and close all connections."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self.upstreams))
        if self.residency is not None:
            await self.residency.close()

    async def begin(self, asked: Asked) -> tuple[Reply, Upstream]:
        """The beginning of an answer, from the first engine that begins one; the body is gone.

        Raises:
            NoEngineError: No engine takes requests, nor does one for ``PAUSE_S``.
            NothingAnsweredError: So many engines in turn were gone that this request may be why,
                or one that is gone may have done what it asks.
        """
        for tries in count(1):
            choice = await self._choose_soon(asked)
            upstream = self.upstreams[choice.engine]
            queued = int(self.board.waiting[choice.engine])
            start = time.monotonic()
            upstream.asked += 1
            try:
                reply = await upstream.begin(asked.call)
            except NothingAnsweredError as error:
                self.health.dropped(upstream, str(error))
                self.counts.hung += isinstance(error, SilentError)
                if tries == MOST_TRIES or (error.sent and not asked.call.repeatable):
                    raise
                self.counts.retried += 1
                continue
            finally:
                upstream.asked -= 1
                self.router.computed(choice)
            asked.call.body.release()
            if asked.call.streams and reply.status == _OK:
                self._measure(choice, queued, time.monotonic() - start)
            return reply, upstream
        raise AssertionError("unreachable")

    async def rest(self, reply: Reply, upstream: Upstream) -> AsyncGenerator[bytes, None]:
        """All bytes of an answer that has begun.

        Raises:
            BrokenAnswerError: The engine is gone before the end.
        """
        upstream.running += 1
        try:
            async with contextlib.aclosing(reply.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except BrokenAnswerError as error:
            self.counts.broken += 1
            self.health.dropped(upstream, f"in the middle of an answer: {error}")
            raise
        finally:
            upstream.running -= 1
        self.counts.answered += 1
        self.health.served(upstream)

    def finished(self, asked: Asked) -> None:
        """Note that a request was answered to its end."""
        if asked.turn is not None and asked.turn.ends:
            self.router.homes.forget(asked.turn.session)

    async def _choose_soon(self, asked: Asked) -> Choice:
        """Choose an engine; where none takes requests, wait a while for one that may."""
        until = time.monotonic() + PAUSE_S
        while True:
            try:
                return self._choose(asked)
            except NoEngineError:
                if time.monotonic() >= until or not self._may_come_back():
                    raise
            await asyncio.sleep(_LOOK_S)

    def _may_come_back(self) -> bool:
        refused, drains = self.health.refused, self.board.draining
        return any(not drains[n] and n not in refused for n in range(len(self.board)))

    def _choose(self, asked: Asked) -> Choice:
        start = time.perf_counter()
        turn, now = asked.turn, time.monotonic()
        if turn is None:
            return self.router.route(Wanted(None, 1), Holdings(), now)
        holdings = self.pools.holdings(turn.prompt.links, len(self.board))
        if self.residency is not None:
            if (home := self.router.homes.of(turn.session)) is not None:
                self.residency.note_home(turn.name, home.engine)
            holdings = self.residency.corrected(turn.name, holdings)
        wanted = Wanted(turn.session, max(turn.prompt.tokens, 1))
        choice = self.router.route(wanted, holdings, now)
        pool_tokens = int(self.board.pool[choice.engine])
        self.pools.sent(turn.prompt.links, choice.engine, pool_tokens)
        self.callers.sent(turn)
        self.decided_s.append(time.perf_counter() - start)
        return choice

    def _measure(self, choice: Choice, queued: int, seconds: float) -> None:
        """Learn an engine's speed from the time to a first token.

        Args:
            queued: Tokens that were to be computed there by then, the request's own among them.
        """
        if queued >= _LEAST_TIMED:
            self.board.measured(choice.engine, queued, seconds)

    def _watch(self, upstream: Upstream) -> None:
        self._watching.append(asyncio.create_task(self.health.watch(upstream)))
