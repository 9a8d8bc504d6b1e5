"""``/v1/events``: changes as server-sent events, each with an id to resume from.

Once a second (``BEAT_S``) a connection gets an event of type ``news``, whose data is ``News``, or a
comment if nothing changed, so that a dead connection is noticed. An event carries those of the last
200 requests (``RECENT``) that started or ended since the previous event; how older ones ended is
only in ``/v1/requests``. Its ``id`` is the newest request up to which all have ended. A client that
reconnects with that id in ``Last-Event-ID``, as browsers do, gets the requests after it; if more
have passed than are kept, ``is_gap`` is true and the event carries all that are left. The first
event of a connection has the whole history of Now, later ones its last steps. The server
disconnects a client that stops reading (``dashboards.server``); it delays no other client.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Header
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from ...dashboards.answer import Answer, mark_of, number_in
from ...graph.errors import KvGraphError
from .misses import RequestQuery, RequestView, requests_of
from .now import Now, TokenHistory, now_of
from .page import HEADERS, Page

BEAT_S: Final = 1.0
RECENT: Final = 200  # most requests in one event; chosen, as many as the page lists
_NEVER: Final = -2  # no request has this number


class News(Answer):
    """Changes since the previous event.

    Attributes:
        version: The graph's version; a new one means that ``/v1/graph`` has changed.
        now: The first screen; of its history, the steps that are new or may have changed.
        steps: Number of steps in the whole history; those not in ``now.history`` are its first
            ones, sent by earlier events.
        requests: Requests that started or ended since, the oldest first.
        is_gap: Whether earlier requests are missing, or are another sidecar's: forget the others.
    """

    version: int
    now: Now
    steps: int
    requests: list[RequestView]
    is_gap: bool

    @property
    def newest(self) -> int | None:
        return self.requests[-1].id if self.requests else None


def add_routes(paths: APIRouter, page: Page) -> None:
    news = NewsStream(page)

    @paths.get("/events")
    async def events(last_event_id: Annotated[str, Header(max_length=64)] = "") -> Response:
        """Server-sent events; see ``stream``."""
        return StreamingResponse(
            news.follow(last_event_id), headers=HEADERS, media_type="text/event-stream"
        )


class NewsStream:
    """Reads the page's data once per beat, however many clients follow."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._name = token_hex(4)  # a sidecar that comes next counts its requests anew
        self._latest: News | None = None
        self._fresh_until = 0.0
        self._looking = asyncio.Lock()

    async def follow(self, last_event_id: str) -> AsyncIterator[bytes]:
        """Yield frames for a client that saw all up to ``last_event_id``; "": nothing."""
        told: News | int | None = self._resumed(last_event_id)
        yield b"retry: 2000\n\n"
        while True:
            news = await self._look()
            if news is None:
                yield b": busy\n\n"
            elif (fresh := _fresh(news, told)) is None:
                yield b": nothing new\n\n"
            else:
                told = news
                yield self._frame(fresh, _settled(news))
            await asyncio.sleep(BEAT_S)

    def _resumed(self, last_event_id: str) -> int | None:
        """The request that an id names; None without an id; ``_NEVER`` for another sidecar's."""
        if not last_event_id:
            return None
        number = number_in(last_event_id, self._name)
        return _NEVER if number is None else number

    async def _look(self) -> News | None:
        """The latest news, read again once it is a beat old; None while the graph is busy."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if loop.time() < self._fresh_until:
                return self._latest
            try:
                self._latest = await run_in_threadpool(self._gather)
            except KvGraphError:
                return None
            self._fresh_until = loop.time() + 0.9 * BEAT_S
            return self._latest

    def _gather(self) -> News:
        version, now = self._page.graph.changes.total, now_of(self._page)
        recent = requests_of(self._page, RequestQuery(RECENT))
        steps, requests = len(now.history.starts), recent.requests[::-1]
        return News(
            at=now.at, version=version, now=now, steps=steps, requests=requests, is_gap=False
        )

    def _frame(self, news: News, settled: int | None) -> bytes:
        mark = ""
        if settled is not None and settled >= 0:
            mark = f"id: {mark_of(self._name, settled)}\n"
        data = orjson.dumps(news.model_dump())
        return b"event: news\n%sdata: %s\n\n" % (mark.encode(), data)


def _settled(news: News) -> int | None:
    """The last request before the first that may still change; None before any request."""
    changeable = (each.id - 1 for each in news.requests if each.is_awaited)
    return next(changeable, news.newest)


def _changeable(request: RequestView) -> tuple[str | None, str | None]:
    # Not its times: they differ by a millisecond from one read to the next.
    return request.finished, None if request.miss is None else request.miss.reason


def _fresh(news: News, told: News | int | None) -> News | None:
    """What a client has not seen since ``told``, the last news sent on this connection, or before
    any the request that it resumes from; None if it has seen everything.
    """
    requests, now = news.requests, news.now
    last = told.newest if isinstance(told, News) else told
    newest, oldest = news.newest, requests[0].id if requests else 0
    is_gap = last is not None and (newest is None or not oldest - 1 <= last <= newest)
    if is_gap:  # too much passed, or the number is of a sidecar before this one
        fresh = requests
    elif isinstance(told, News):
        known = {each.id: _changeable(each) for each in told.requests}
        fresh = [each for each in requests if known.get(each.id) != _changeable(each)]
    else:
        fresh = [each for each in requests if last is None or each.id > last]
    if isinstance(told, News):
        if told.version == news.version and not fresh:
            return None
        now = now.model_copy(update={"history": _since(now.history, told.now.history)})
    return news.model_copy(update={"now": now, "requests": fresh, "is_gap": is_gap})


def _since(history: TokenHistory, told: TokenHistory) -> TokenHistory:
    """The steps that a client lacks, and its last two, which may have grown; or all steps."""
    if told.step_s != history.step_s or len(told.starts) < 2:
        return history
    # Clocks drift: the same step may seem to start a little earlier or later.
    first = bisect_left(history.starts, told.starts[-2] - history.step_s / 2)
    return history.model_copy(
        update={name: column[first:] for name, column in history if isinstance(column, list)}
    )
