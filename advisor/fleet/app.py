"""The HTTP surface of `kvgraph route`: ``/v1/…`` goes to an engine, the rest is about the proxy.

``Relay`` is shared with `kvgraph memory`: it serves any proxy that satisfies ``Passing``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import fields
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Message, Receive, Scope, Send

from ..process.process import PROBES
from .callers import MOST_BODY, BadRequestError, Callers, ParsedRequest, is_served
from .proxy import Counts, FleetProxy
from .residency import ResidencyView
from .router import NoEngineError
from .upstream import BrokenAnswerError, NothingAnsweredError, Reply

_COUNTS = tuple(each.name for each in fields(Counts))


def proxy_status(proxy: FleetProxy) -> dict[str, Any]:
    """Return what ``GET /fleet`` shows: engines, routing decisions, request counts; no session is
    named."""
    board, health = proxy.board, proxy.health
    engines = [
        {
            "number": each.number,
            "url": each.url,
            "up": bool(board.up[each.number]),
            "drains": bool(board.draining[each.number]),
            "asked": each.asked,
            "running": each.running,
            "refusing": int(board.refusing[each.number]),
            "waiting_tokens": int(board.waiting[each.number]),
            "live_tokens": int(board.live[each.number]),
            "prefill_tokens_per_s": _speed(proxy, each.number),
            "why": health.why.get(each.number),
            "wants_key": each.number in health.keyed,
            "refused": health.refused.get(each.number),
            "differs": health.differs(each.number),
        }
        for each in proxy.engines.shown
    ]
    return {
        "engines": engines,
        "decisions": {str(reason): number for reason, number in proxy.router.counts.items()},
        "requests": {name: getattr(proxy.counts, name) for name in _COUNTS},
        "sessions": len(proxy.router.homes),
        "sessions_of_sidecars": 0 if proxy.residency is None else len(proxy.residency),
        "sidecars": [] if proxy.residency is None else _sidecars(proxy.residency),
        "failed_rounds": 0 if proxy.residency is None else proxy.residency.failed,
        "decision_p99_ms": decision_ms(proxy, 99),
    }


def _speed(proxy: FleetProxy, number: int) -> int | None:
    """Return prompt tokens per second, or None until they were measured."""
    board = proxy.board
    return round(1 / float(board.compute_s[number])) if board.timed[number] else None


def _sidecars(residency: ResidencyView) -> list[dict[str, Any]]:
    return [
        {"url": url, "silent": silent, "unheard_s": round(residency.unheard_s(url), 1)}
        for url, silent in residency.silent.items()
    ]


def decision_ms(proxy: FleetProxy, percentile: float) -> float:
    """Return a percentile of the time that recent routing decisions took, in milliseconds."""
    times = proxy.decided_s
    return 1e3 * float(np.percentile(list(times), percentile)) if times else 0.0


def exposition(proxy: FleetProxy) -> bytes:
    """Return the proxy's metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_ProxyCollector(proxy))
    return generate_latest(registry)


class _ProxyCollector(Collector):
    def __init__(self, proxy: FleetProxy) -> None:
        self._proxy = proxy

    def collect(self) -> Iterator[Metric]:
        yield from self._engines()
        decisions = CounterMetricFamily(
            "kvgraph_route_decisions", "Requests by why they went where.", labels=["reason"]
        )
        for reason, number in self._proxy.router.counts.items():
            decisions.add_metric([str(reason)], number)
        yield decisions
        requests = CounterMetricFamily(
            "kvgraph_route_requests", "Requests by what happened to them.", labels=["outcome"]
        )
        for name in _COUNTS:
            requests.add_metric([name], getattr(self._proxy.counts, name))
        yield requests

    def _engines(self) -> Iterator[Metric]:
        board = self._proxy.board
        columns = {
            "up": ("Whether the engine answers.", board.up),
            "draining": ("Whether it gets no further requests.", board.draining),
            "refusing": ("Requests that it refused, one after the other.", board.refusing),
            "waiting_tokens": ("Prompt tokens that wait there.", board.waiting),
            "live_tokens": ("Tokens of live sessions at home there.", board.live),
        }
        for name, (words, column) in columns.items():
            gauge = GaugeMetricFamily(f"kvgraph_route_engine_{name}", words, labels=["engine"])
            for each in self._proxy.engines.shown:
                gauge.add_metric([each.url], float(column[each.number]))
            yield gauge
        flying = GaugeMetricFamily(
            "kvgraph_route_engine_in_flight",
            "Requests that it has not answered to the end.",
            labels=["engine"],
        )
        for each in self._proxy.engines.shown:
            flying.add_metric([each.url], each.asked + each.running)
        yield flying


BODY_S: Final = 25.0
"""Seconds in which a whole body must arrive; chosen."""
MOST_BODIES: Final = 256 << 20
"""Bytes of all bodies that are held at a time; chosen: four of the largest."""
_SMALL: Final = 1 << 20
_FOR_LARGE: Final = 0.75
"""Share of ``MOST_BODIES`` open to bodies above ``_SMALL``; the rest is kept for small ones, so
that large or endless bodies do not keep everybody out. Chosen."""
_READ_APART: Final = 256 << 10  # bytes from which a body is parsed on a thread; chosen
_SOON: Final = [(b"retry-after", b"1")]
_JSON: Final = (b"content-type", b"application/json")


class LeftError(Exception):
    """The client disconnected."""


class FullError(Exception):
    """The bodies that are held leave no room for another one."""


class BodyRoom:
    """The memory that all request bodies share until they were sent on.

    Attributes:
        most: Bytes that may be taken.
        taken: Bytes that are taken now.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.taken = MOST_BODIES if most is None else most, 0


class BodyShare:
    """The part of ``BodyRoom`` that one request's body takes."""

    def __init__(self, room: BodyRoom) -> None:
        self._room, self._bytes = room, 0

    def of(self, receive: Receive) -> Receive:
        """Wrap ``receive`` so that each chunk of the body takes room; it raises ``FullError``."""

        async def taking() -> Message:
            message = await receive()
            self.take(len(message.get("body", b"")))
            return message

        return taking

    def take(self, more: int) -> None:
        """Take ``more`` bytes of room; raises ``FullError`` if they are not free."""
        room = self._room
        large = self._bytes + more > _SMALL
        if room.taken + more > room.most * (_FOR_LARGE if large else 1):
            raise FullError
        room.taken += more
        self._bytes += more

    def release(self) -> None:
        """Give the room back; calling it again is harmless."""
        self._room.taken -= self._bytes
        self._bytes = 0


Known = TypeVar("Known")
"""What a proxy passes from ``begin`` to ``rest``."""


class Refusals(Protocol):
    """Counts of requests that got no whole answer."""

    refused: int
    unserved: int
    left: int


class Passing(Protocol[Known]):
    """A proxy that ``Relay`` can serve."""

    @property
    def callers(self) -> Callers: ...

    @property
    def counts(self) -> Refusals: ...

    async def begin(self, asked: ParsedRequest) -> tuple[Reply, Known]:
        """Get a request answered, as far as the answer's first bytes.

        Raises:
            BadRequestError: The request is refused.
            NoEngineError: No engine takes requests.
            NothingAnsweredError: No engine answered it.
        """
        ...

    def rest(self, reply: Reply, known: Known) -> AsyncGenerator[bytes, None]:
        """Yield all bytes of an answer that has begun.

        Raises:
            BrokenAnswerError: The engine went away before the end.
        """
        ...

    def finished(self, asked: ParsedRequest) -> None:
        """Note that a request was answered to its end."""
        ...


class ProxyApp:
    """The ASGI application of `kvgraph route`.

    Attributes:
        room: Shared by the bodies of all requests.
    """

    def __init__(self, proxy: FleetProxy) -> None:
        self.room = BodyRoom()
        self._proxy = proxy
        self._relay = Relay(proxy, self.room)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; for ASGI's lifespan, start and close the proxy."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._proxy.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._proxy.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in PROBES:
            up = bool(self._proxy.board.takes.any())
            await send_json(send, 200 if up else 503, {"status": "ok" if up else "no engine is up"})
        elif path == "/fleet":
            await send_json(send, 200, proxy_status(self._proxy))
        elif path == "/metrics":
            await _send(
                send,
                200,
                [(b"content-type", b"text/plain; version=0.0.4")],
                exposition(self._proxy),
            )
        elif is_served(path):
            await self._relay.pass_on(scope, receive, send)
        else:
            await refuse(send, 404, "not served here; requests go to /v1/…")


class Relay(Generic[Known]):
    """Sends requests on through a proxy and streams the answers back."""

    def __init__(self, proxy: Passing[Known], room: BodyRoom | None = None) -> None:
        self._proxy = proxy
        self._room = room or BodyRoom()
        self._apart = asyncio.Semaphore()  # one at a time: a parsed body takes more memory

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; stop when its client disconnects."""
        share = BodyShare(self._room)
        try:
            await self._pass_on(scope, receive, send, share)
        finally:
            share.release()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, share: BodyShare) -> None:
        path = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            path += "?" + scope["query_string"].decode("latin-1")
        try:
            asked = await self._asked(path, scope, receive, share)
        except LeftError:
            self._proxy.counts.left += 1
            return
        except FullError:
            self._proxy.counts.refused += 1
            await refuse(send, 503, "too many large requests at a time; try again soon", _SOON)
            return
        except BadRequestError as error:
            self._proxy.counts.refused += 1
            await refuse(send, error.status, str(error))
            return
        except TimeoutError:
            self._proxy.counts.refused += 1
            await refuse(send, 408, f"the body did not arrive in {BODY_S:g} s")
            return
        answering = asyncio.ensure_future(self._answer(asked, send, share))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._proxy.counts.left += 1
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering

    async def _asked(
        self, path: str, scope: Scope, receive: Receive, share: BodyShare
    ) -> ParsedRequest:
        async with asyncio.timeout(BODY_S):
            body = await read_body(share.of(receive))
        asked = scope["method"], path, scope["headers"], body
        if len(body) > _READ_APART:  # so that other answers go on meanwhile
            async with self._apart:
                return await asyncio.to_thread(self._proxy.callers.read, *asked)
        return self._proxy.callers.read(*asked)

    async def _answer(self, asked: ParsedRequest, send: Send, share: BodyShare) -> None:
        try:
            reply, known = await self._proxy.begin(asked)
        except BadRequestError as error:
            self._proxy.counts.refused += 1
            await refuse(send, 400, str(error))
            return
        except NoEngineError as error:
            self._proxy.counts.unserved += 1
            await refuse(send, 503, str(error), _SOON)
            return
        except NothingAnsweredError as error:
            self._proxy.counts.unserved += 1
            why = "engines dropped this request one after the other"
            if error.sent and not asked.call.repeatable:
                why = "the engine dropped this request, and may have done what it asks"
            await refuse(send, 502, f"{why}: {error}")
            return
        asked.call.body.release()
        share.release()
        try:
            await self._forward(reply, known, send)
        except BrokenAnswerError:
            return  # uvicorn then cuts the connection: the client sees that the answer broke
        finally:
            await reply.response.aclose()
        if not reply.failed:
            self._proxy.finished(asked)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _forward(self, reply: Reply, known: Known, send: Send) -> None:
        start = {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        await send(start)
        async with contextlib.aclosing(self._proxy.rest(reply, known)) as chunks:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def read_body(receive: Receive) -> bytes:
    """Read a whole request body; raises ``LeftError`` or ``BadRequestError`` (413)."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise LeftError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BODY:
            raise BadRequestError(f"the body has more than {MOST_BODY >> 20} MiB", 413)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, answer: Any) -> None:
    """Send JSON."""
    await _send(send, status, [_JSON], orjson.dumps(answer))


async def refuse(
    send: Send, status: int, why: str, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send an error in the form of OpenAI's servers."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    error = {"message": why, "type": kind, "code": status}
    await _send(send, status, [_JSON, *(headers or [])], orjson.dumps({"error": error}))


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
