"""``/v1/events``: news as server-sent events, each with an id to resume from.

Every second (``BEAT_S``) in which something changed there is one event of type ``news`` whose data
is ``News``; in others a comment, so that a dead connection is noticed. ``id`` is the newest
request's; a reader that reconnects with it in ``Last-Event-ID``, as browsers do by themselves, gets
the requests since. Where more of them passed than are kept, ``is_gap`` says so: ask for all again.
The first event on a connection has the whole of Now's history; the others have its last steps. A
reader that does not read is cut by the server (``dashboards.timeouts``) and holds nobody up.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable
from typing import Final

import orjson
from starlette.concurrency import run_in_threadpool

from ...graph.errors import KvGraphError
from ..answers.answer import Answer
from ..answers.misses import RequestView
from ..answers.now import Now, TokenHistory
from .page_source import PageSource

BEAT_S: Final = 1.0
RECENT: Final = 200  # requests that one event brings at most; chosen


class News(Answer):
    """What changed since the event before.

    Attributes:
        version: The graph's; another one means that ``/v1/graph`` has changed.
        now: The first screen; of its history the steps that are new or may have changed.
        steps: How many steps the whole history has; those that are not in ``now.history`` are its
            first ones, and earlier events told them.
        requests: New ones, the oldest first.
        is_gap: Some before them are not here.
    """

    version: int
    now: Now
    steps: int
    requests: list[RequestView]
    is_gap: bool


class NewsStream:
    """One look at the source a beat, however many follow."""

    def __init__(self, page: Callable[[], PageSource]) -> None:
        self._page = page
        self._latest: News | None = None
        self._fresh_until = 0.0
        self._looking = asyncio.Lock()

    async def follow(self, last_event_id: str) -> AsyncIterator[bytes]:
        """Frames for one reader, who has seen the request ``last_event_id``."""
        seen = int(last_event_id) if last_event_id.isascii() and last_event_id.isdigit() else None
        told: News | None = None
        yield b"retry: 2000\n\n"
        while True:
            news = await self._look()
            if news is None:
                yield b": busy\n\n"
            else:
                frame, seen = _frame(news, seen, told)
                changed = told is None or news.version != told.version
                if changed:
                    told = news
                yield frame if changed else b": nothing new\n\n"
            await asyncio.sleep(BEAT_S)

    async def _look(self) -> News | None:
        """The latest news, looked up anew where it is a beat old; None while too many ask."""
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
        page = self._page()
        version, now, recent = page.graph_version(), page.now(), page.requests(RECENT)
        steps, requests = len(now.history.starts), recent.requests[::-1]
        return News(
            at=now.at, version=version, now=now, steps=steps, requests=requests, is_gap=False
        )


def _frame(news: News, seen: int | None, told: News | None) -> tuple[bytes, int | None]:
    """One event, and the newest request that it tells of.

    Args:
        seen: The newest request that the reader knows.
        told: The news that the reader was told last.
    """
    requests = news.requests
    is_anothers = seen is not None and bool(requests) and requests[-1].id < seen
    if is_anothers:  # the number is of a sidecar before this one
        seen = None
    fresh = [each for each in requests if seen is None or each.id > seen]
    is_gap = seen is not None and bool(requests) and requests[0].id > seen + 1
    is_gap |= is_anothers
    newest = requests[-1].id if requests else seen
    now = news.now
    if told is not None:
        now = now.model_copy(update={"history": _since(now.history, told.now.history)})
    said = news.model_copy(update={"now": now, "requests": fresh, "is_gap": is_gap})
    head = b"event: news\n" if newest is None else b"event: news\nid: %d\n" % newest
    return head + b"data: " + orjson.dumps(said.model_dump()) + b"\n\n", newest


def _since(history: TokenHistory, told: TokenHistory) -> TokenHistory:
    """The steps that a reader lacks, and before them the last two that it was told: these may
    have counted more since. All steps, where they have another length by now."""
    if told.step_s != history.step_s or len(told.starts) < 2:
        return history
    # Clocks drift: the same step's start may be told a little earlier or later.
    first = bisect_left(history.starts, told.starts[-2] - history.step_s / 2)
    return history.model_copy(
        update={name: column[first:] for name, column in history if isinstance(column, list)}
    )
