"""One engine as the proxy sees it: its connections, and what it answers."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from ...graph.errors import ConfigError
from .callers import BadRequestError, Call, is_served

# The engines that the proxy is told of: by the command line, or by a file that may change.

FIRST_BYTE_S: Final = 600.0
"""For which an engine may be silent before the first byte of an answer; chosen: twice as long as
admission holds a request, and as long as OpenAI's clients wait."""
MOST_ENGINES: Final = 1024
"""Chosen: decisions are measured with 1,000."""

MOST_SHOWN: Final = 80
"""Characters of a bad address that an error shows; chosen."""


class Listed(NamedTuple):
    """An engine's address, and whether it shall get no further requests."""

    url: str
    drains: bool = False


def engine_in(words: str) -> Listed:
    """An engine as a line says it: ``URL``, or ``URL drain``.

    Raises:
        ConfigError: It says something else.
    """
    url, *rest = words.split() or [""]
    if not is_address(url) or rest not in ([], ["drain"]):
        raise ConfigError(
            f"engine {words[:MOST_SHOWN]!r}: allowed: http://HOST:PORT, and behind it the word "
            "drain"
        )
    return Listed(url.rstrip("/").removesuffix("/v1"), bool(rest))


def is_address(url: str) -> bool:
    """Whether this is ``http(s)://HOST[:PORT][/PATH]``, without user, password, query, fragment."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # a name that cannot be looked up raises
        more = parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return plain and parts.scheme in ("http", "https") and bool(host) and not more


def engines_in(path: Path) -> list[Listed]:
    """The engines that a file lists, one per line; empty lines and those that begin with # are
    skipped.

    Raises:
        ConfigError: It cannot be read, or a line is none.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"engines {str(path)!r}: {error}") from None
    found = [
        engine_in(line) for line in lines if line.strip() and not line.lstrip().startswith("#")
    ]
    return checked(found)


def checked(engines: list[Listed]) -> list[Listed]:
    """The same engines.

    Raises:
        ConfigError: There is none, there are too many, or one is listed twice.
    """
    urls = [each.url for each in engines]
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"engines that are listed twice: {', '.join(sorted(twice))}")
    if not urls or len(urls) > MOST_ENGINES:
        raise ConfigError(f"{len(urls)} engines: allowed: 1 to {MOST_ENGINES}")
    return engines


CONNECT_S: Final = 2.0
"""Until a connection stands; chosen: engines are on this machine or beside it."""
IDLE_S: Final = 3.0
"""For which an idle connection is kept: uvicorn closes one after five seconds."""
HEALTH_S: Final = 2.0
"""For an engine's word on its health, where it answers an error; chosen."""
_LEAST_ERROR, _LEAST_OF_SERVER = 400, 500  # statuses
_ERRORS: Final = (b'data: {"error"', b"event: error")
"""How an answer begins that is streamed and of which the engine computed nothing."""
_PREAMBLES: Final = (b"event: response.created", b"event: response.in_progress")
"""Events of a streamed response that an engine sends at once."""
_LONGEST_PREAMBLE: Final = 1 << 20  # bytes: such events repeat what was asked; chosen
_POOLS: Final = (
    16  # of connections to one engine; chosen: 1,000 requests in flight then cost a third
)
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""Of TCP: a machine that is gone is noticed after 15 s; one that is busy still replies. Chosen."""
ENGINE_HEADER: Final = b"x-kvgraph-engine"
"""Of an answer: by which number ``GET /fleet`` knows the engine that it came from."""
_DROPPED: Final = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade date server".split()
) | {ENGINE_HEADER}


class _SpreadTransport(httpx.AsyncBaseTransport):
    """Sends requests over several pools of connections in turn: one looks at all of its connections
    for every request that begins or ends."""

    def __init__(self, pools: Sequence[httpx.AsyncBaseTransport]) -> None:
        self._pools, self._next = pools, cycle(pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._next).handle_async_request(request)

    async def aclose(self) -> None:
        for each in self._pools:
            await each.aclose()


class NothingAnsweredError(Exception):
    """An engine is gone and has answered nothing.

    Args:
        sent: Whether it may have got the request.
    """

    def __init__(self, why: str, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class SilentError(NothingAnsweredError):
    """An engine has a request for too long without a byte of its answer."""


class BrokenAnswerError(Exception):
    """An engine is gone in the middle of its answer."""


class Reply(NamedTuple):
    """An answer that has begun.

    Attributes:
        first: Its first bytes; empty where it has none.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    response: httpx.Response
    rest: AsyncIterator[bytes]

    @property
    def failed(self) -> bool:
        """Whether the engine computed nothing for it: an error, or one in the form of a stream."""
        return self.status >= _LEAST_ERROR or self.first.startswith(_ERRORS)

    @property
    def is_of_server(self) -> bool:
        """Whether it says that the engine failed, and not the request."""
        return self.status >= _LEAST_OF_SERVER

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Its bytes as they come.

        Raises:
            BrokenAnswerError: The engine is gone before the end.
        """
        try:
            if self.first:
                yield self.first
            async for chunk in self.rest:
                yield chunk
        except httpx.TransportError as error:
            raise BrokenAnswerError(type(error).__name__) from None
        finally:
            await self.response.aclose()


class Upstream:
    """An engine behind the proxy.

    Args:
        number: Of the router's board.
        url: Where it answers, without ``/v1``.
        first_byte_s: For which it may be silent before the first byte of an answer.

    Attributes:
        asked: Requests that it has and has not begun to answer.
        running: Requests whose answers it has begun and not ended.
        is_silent: Whether it leaves questions after its health unanswered.

    Raises:
        ConfigError: The address is none.
    """

    def __init__(self, number: int, url: str, first_byte_s: float = FIRST_BYTE_S) -> None:
        self.number, self.url = number, url
        self.is_silent = False
        self._first_byte_s = first_byte_s
        self.asked = self.running = 0
        self._gone = asyncio.Event()
        try:
            self._client = httpx.AsyncClient(
                base_url=url,
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                transport=_SpreadTransport([_transport() for _ in range(_POOLS)]),
                trust_env=False,
                # One caller's cookies must not go out with another's request.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"engine {url[:MOST_SHOWN]!r}: {error}") from None
        self._client.headers.clear()  # what the client sent, and nothing more

    async def begin(self, call: Call) -> Reply:
        """Send a request and wait for the first bytes of its answer.

        Raises:
            BadRequestError: Its path is none that is passed on.
            NothingAnsweredError: The engine cannot be reached, or is gone before it answered.
            SilentError: It is there, and says nothing for too long.
        """
        asking = asyncio.ensure_future(self._begin(call))
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await self._wait(call, asking, gone)
            if asking.done():
                return asking.result()
        except asyncio.CancelledError:
            await _dismiss(asking)
            raise
        finally:
            gone.cancel()
        await _dismiss(asking)
        if gone.done() and not gone.cancelled():
            raise NothingAnsweredError("it does not answer any more")
        raise SilentError(f"no first byte in {self._first_byte_s:g} s")

    async def ask(self, path: str, timeout_s: float) -> httpx.Response:
        """The answer to a question of our own.

        Raises:
            httpx.RequestError: There is none, it cannot be read, or not all of it is there in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._client.get(path, timeout=timeout_s)
        except TimeoutError:
            raise httpx.ReadTimeout(f"not all of the answer came in {timeout_s:g} s") from None

    def is_gone(self) -> None:
        """Give up requests that it has not answered yet: nothing listens there any more."""
        self._gone.set()
        self._gone = asyncio.Event()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _wait(
        self, call: Call, asking: asyncio.Future[Reply], gone: asyncio.Future[Any]
    ) -> None:
        """Until its answer begins, it is gone, or its silence means that it hangs.

        An answer that is not streamed has its first byte when all of it is there: then silence
        means something only where questions after its health are unanswered too.
        """
        either: set[asyncio.Future[Any]] = {asking, gone}
        while True:
            done, _ = await asyncio.wait(
                either, timeout=self._first_byte_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done or call.streams or self.is_silent:
                return

    async def _begin(self, call: Call) -> Reply:
        request = self._request(call)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NothingAnsweredError(_why(error), False) from None
        except httpx.TransportError as error:
            raise NothingAnsweredError(_why(error)) from None
        try:
            return await self._begun(response)
        except BaseException:
            await response.aclose()
            raise

    async def _begun(self, response: httpx.Response) -> Reply:
        rest = response.aiter_raw()
        try:
            first = await anext(rest, b"")
            while _is_preamble(first) and (more := await anext(rest, b"")):
                first += more
        except httpx.TransportError as error:
            raise NothingAnsweredError(_why(error)) from None
        is_error = response.status_code >= _LEAST_OF_SERVER or first.startswith(_ERRORS)
        if is_error and not await self._is_well():  # vLLM's server outlives its engine for a while
            raise NothingAnsweredError("it answers an error, and is not well")
        headers = [
            (key, self._without_origin(key, value))
            for key, value in response.headers.raw
            if key.lower() not in _DROPPED
        ]
        return Reply(response.status_code, headers, first, response, rest)

    def _without_origin(self, key: bytes, value: bytes) -> bytes:
        """A header's value; a client that is sent elsewhere asks the proxy again."""
        own = self.url.encode()
        return value.removeprefix(own) if key.lower() == b"location" else value

    async def _is_well(self) -> bool:
        try:
            return (await self.ask("/health", HEALTH_S)).status_code == 200
        except httpx.RequestError:
            return False

    def _request(self, call: Call) -> httpx.Request:
        """A request as it goes out; httpx may have made another path of the caller's."""
        size, headers = len(call.body.data), call.headers
        if size:
            headers = [*headers, (b"content-length", str(size).encode())]
        try:
            request = self._client.build_request(
                call.method, call.path, headers=headers, content=call.body if size else None
            )
        except httpx.InvalidURL as error:
            raise BadRequestError(f"the path cannot be passed on: {error}") from None
        base = self._client.base_url.raw_path.rstrip(b"/")
        path = request.url.raw_path.partition(b"?")[0]
        if not path.startswith(base) or not is_served(path[len(base) :].decode("ascii")):
            raise BadRequestError("the path leads elsewhere than to /v1/…")
        return request


def _is_preamble(first: bytes) -> bool:
    """Whether an answer has not got beyond events that come before any token is computed."""
    events = first.split(b"\n\n")
    return (
        first.startswith(_PREAMBLES)
        and len(first) < _LONGEST_PREAMBLE
        and all(each.startswith(_PREAMBLES) for each in events if each)
    )


def _why(error: httpx.TransportError) -> str:
    return f"{type(error).__name__} {error}".strip()


def refuses(error: BaseException) -> bool:
    """Whether a connection failed since nothing listens there, at no address of the host."""
    if isinstance(error, BaseExceptionGroup):
        return all(refuses(each) for each in error.exceptions)
    cause = error.__cause__ or error.__context__  # httpx's own, and below it the system's
    return isinstance(error, ConnectionRefusedError) or (cause is not None and refuses(cause))


def _transport() -> httpx.AsyncHTTPTransport:
    """Connections that fail by themselves when the engine's machine is gone without a word."""
    options: list[tuple[int, int, int]] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    limits = httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S)
    return httpx.AsyncHTTPTransport(
        verify=_tls(), trust_env=False, limits=limits, socket_options=options
    )


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all engines: each takes 20 ms to make, and half a MiB."""
    return httpx.create_ssl_context(trust_env=False)


async def _dismiss(asking: asyncio.Future[Reply]) -> None:
    """Give up an answer, whether it has begun or not."""
    asking.cancel()
    await asyncio.wait({asking})  # which its caller's cancellation ends
    if not asking.cancelled() and asking.exception() is None:
        await asking.result().response.aclose()
