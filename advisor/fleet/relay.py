"""``Relay``: the HTTP side of `kvgraph route` and `kvgraph memory`: bodies in, answers out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import Lifespan, Receive, Scope, Send

from ..process.process import METHODS
from .callers import MOST_BODY, BadRequestError, Call, Callers, is_served
from .router import NoEngineError
from .upstream import BrokenAnswerError, NothingAnsweredError, Reply

BODY_S: Final = 25.0  # seconds within which a whole body must arrive; chosen
MOST_BODIES: Final = 256 << 20  # bytes of all bodies held at a time; chosen: four of the largest
_SMALL: Final = 1 << 20
_FOR_LARGE: Final = 0.75
"""Share of ``MOST_BODIES`` open to bodies above ``_SMALL``; the rest is reserved for small ones, so
that large or endless bodies do not block everyone. Chosen.
"""
NOT_SERVED: Final = "not served here; requests go to /v1/…"
_NO_SOCKETS: Final = "WebSockets are not passed on: connect to an engine itself"
_READ_APART: Final = 256 << 10  # size in bytes from which a body is parsed on a thread; chosen

_NOTED_S: Final = 10.0  # for noting an answer whose client hung up, having it; chosen


class FullError(BadRequestError):
    """The bodies already held leave no room for another one."""

    def __init__(self) -> None:
        super().__init__("too many large requests at a time; try again soon", 503)


class BodyRoom:
    """Memory shared by request bodies until sent: ``taken`` of ``most`` bytes are in use."""

    def __init__(self, most: int | None = None) -> None:
        self.most, self.taken = MOST_BODIES if most is None else most, 0


class BodyShare:
    def __init__(self, room: BodyRoom) -> None:
        self._room, self._bytes = room, 0

    def take(self, more: int) -> None:
        """Take ``more`` bytes of room; raises FullError or BadRequestError."""
        room = self._room
        large = self._bytes + more > _SMALL
        if room.taken + more > room.most * (_FOR_LARGE if large else 1):
            raise FullError
        room.taken += more
        self._bytes += more
        if self._bytes > MOST_BODY:
            raise BadRequestError(f"the body has more than {MOST_BODY >> 20} MiB", 413)

    def release(self) -> None:
        self._room.taken -= self._bytes
        self._bytes = 0


Known = TypeVar("Known")  # what a proxy passes from ``begin`` to ``rest``


class Refusals(Protocol):
    """Counts of requests that were not answered completely."""

    refused: int
    unserved: int
    left: int


class RelayedProxy(Protocol[Known]):
    """A proxy that ``Relay`` can serve."""

    @property
    def callers(self) -> Callers: ...

    @property
    def counts(self) -> Refusals: ...

    async def begin(self, asked: Call) -> tuple[Reply, Known]:
        """Get a request answered, as far as the answer's first bytes.
        Raises BadRequestError, NoEngineError or NothingAnsweredError.
        """
        ...

    def rest(self, reply: Reply, known: Known) -> AsyncGenerator[bytes, None]:
        """Yield all bytes of a started answer; raises BrokenAnswerError."""
        ...

    def why(self, call: Call, error: NothingAnsweredError) -> str:
        """Describe why ``begin`` got no answer."""
        ...

    def finished(self, asked: Call) -> None: ...


class Relay(Generic[Known]):
    """An ASGI application that sends requests on through a proxy and streams the answers back."""

    def __init__(self, proxy: RelayedProxy[Known]) -> None:
        self.room = BodyRoom()
        self._proxy = proxy
        self._apart = asyncio.Semaphore()  # one at a time: a parsed body takes more memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; stop when its client disconnects."""
        if not is_served(scope["path"]):
            return await refusal(404, NOT_SERVED)(scope, receive, send)
        if any(
            key == b"upgrade" and value.lower() == b"websocket" for key, value in scope["headers"]
        ):
            return await refusal(501, _NO_SOCKETS)(scope, receive, send)
        share, counts = BodyShare(self.room), self._proxy.counts
        try:
            asked, whole = await self._asked(Request(scope, receive), share), asyncio.Event()
            if not await _unless_left(receive, self._answer(asked, send, share, whole), whole):
                counts.left += 1
            return None
        except ClientDisconnect:
            counts.left += 1
            return None
        except BadRequestError as error:
            counts.refused += 1
            response = refusal(error.status, str(error))
        except NoEngineError as error:
            counts.unserved += 1
            response = refusal(503, str(error))
        except NothingAnsweredError as error:
            counts.unserved += 1
            response = refusal(502, self._proxy.why(asked, error))
            if error.sent:  # the clients of OpenAI and Anthropic would send it to two engines more
                response.headers["x-should-retry"] = "false"
        finally:
            share.release()
        await response(scope, receive, send)

    async def _asked(self, request: Request, share: BodyShare) -> Call:
        """Read a request; raises ``BadRequestError`` or ``ClientDisconnect``."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await read_body(request, share)
        except TimeoutError:
            raise BadRequestError(f"the body did not arrive in {BODY_S:g} s", 408) from None
        scope = request.scope
        path = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            path += "?" + scope["query_string"].decode("latin-1")
        asked = scope["method"], path, scope["headers"], body
        if len(body) > _READ_APART:  # so that other answers go on meanwhile
            async with self._apart:
                return await asyncio.to_thread(self._proxy.callers.read, *asked)
        return self._proxy.callers.read(*asked)

    async def _answer(
        self, asked: Call, send: Send, share: BodyShare, whole: asyncio.Event
    ) -> None:
        """Get a request answered; sets ``whole`` once all was sent. Raises what ``begin`` does."""
        reply, known = await self._proxy.begin(asked)
        asked.body.release()
        share.release()
        try:
            async with contextlib.aclosing(self._rest(asked, reply, known, whole)) as chunks:
                response = StreamingResponse(chunks, reply.status)
                response.raw_headers = reply.headers
                # Not called: who leaves is noticed by us, also before the answer begins.
                await response.stream_response(send)
        except BrokenAnswerError:
            return  # uvicorn then cuts the connection: the client sees that the answer broke
        finally:
            reply.close()

    async def _rest(
        self, asked: Call, reply: Reply, known: Known, whole: asyncio.Event
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._proxy.rest(reply, known)) as chunks:
            async for chunk in chunks:
                yield chunk
                if reply.ends_with(chunk):
                    whole.set()
        if not reply.failed:
            self._proxy.finished(asked)


async def read_body(request: Request, share: BodyShare) -> bytes:
    """Read a whole body, chunk by chunk, as ``share`` permits."""
    parts: list[bytes] = []
    async for chunk in request.stream():
        share.take(len(chunk))
        parts.append(chunk)
    return b"".join(parts)


async def _unless_left(
    receive: Receive, answer: Coroutine[Any, Any, None], whole: asyncio.Event
) -> bool:
    """Await an answer until its client disconnects before it has the whole; returns whether the
    answer ended first.
    """
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_left(receive))
    try:
        done, _ = await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if whole.is_set():  # clients hang up once they have it, while its end is noted here
            done, _ = await asyncio.wait({answering}, timeout=_NOTED_S)
    finally:
        leaving.cancel()
        answering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answering
    return answering in done


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def served_app(
    views: Mapping[str, Callable[[Request], Awaitable[Response]]],
    relay: Relay[Any],
    lifespan: Lifespan[Any],
) -> Router:
    """Return an ASGI application of views by path, which sends all other requests on."""
    routes = [Route(path, view, methods=METHODS) for path, view in views.items()]
    return Router(routes, default=relay, lifespan=lifespan, redirect_slashes=False)


def json_response(answer: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(answer), status, media_type="application/json")


def refusal(status: int, why: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    response = json_response({"error": {"message": why, "type": kind, "code": status}}, status)
    if status == 503:
        response.headers["retry-after"] = "1"
    return response
