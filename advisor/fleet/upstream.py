"""``Upstream``: one engine behind the proxy, its connections and its answers; and the list of
engines."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import httpx

from ...graph.errors import ConfigError
from .callers import BadRequestError, Call, is_served

FIRST_BYTE_S: Final = 600.0
"""Seconds for which an engine may be silent before an answer's first byte; chosen: twice as long as
admission holds a request, and as long as OpenAI's clients wait."""
MOST_ENGINES: Final = 1024
"""Chosen: decisions are measured with 1,000."""

MOST_SHOWN: Final = 80
"""Characters of a bad address that an error shows; chosen."""


class Listed(NamedTuple):
    """An engine's address, and whether it drains."""

    url: str
    drains: bool = False


def engine_in(words: str) -> Listed:
    """Parse ``URL`` or ``URL drain``.

    Raises:
        ConfigError: The line is something else.
    """
    url, *rest = words.split() or [""]
    if not is_address(url) or rest not in ([], ["drain"]):
        raise ConfigError(
            f"engine {words[:MOST_SHOWN]!r}: allowed: http://HOST:PORT, and behind it the word "
            "drain"
        )
    return Listed(url.rstrip("/").removesuffix("/v1"), bool(rest))


def is_address(url: str) -> bool:
    """Tell whether this is ``http(s)://HOST[:PORT][/PATH]``, without user, password, query,
    fragment."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # a name that cannot be looked up raises
        more = parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return plain and parts.scheme in ("http", "https") and bool(host) and not more


def engines_in(path: Path) -> list[Listed]:
    """Read a file with one engine a line; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: It cannot be read, or has a bad line.
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
    """Return the same engines.

    Raises:
        ConfigError: There are none, too many, or one twice.
    """
    urls = [each.url for each in engines]
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"engines that are listed twice: {', '.join(sorted(twice))}")
    if not urls or len(urls) > MOST_ENGINES:
        raise ConfigError(f"{len(urls)} engines: allowed: 1 to {MOST_ENGINES}")
    return engines


CONNECT_S: Final = 2.0
"""Seconds until a connection stands; chosen: engines are on this machine or beside it."""
IDLE_S: Final = 3.0
"""Seconds for which an idle connection is kept: uvicorn closes one after five."""
HEALTH_S: Final = 2.0
"""Seconds for an engine's health after it answered an error; chosen."""
_LEAST_ERROR, _LEAST_OF_SERVER = 400, 500  # statuses
_ERRORS: Final = (b'data: {"error"', b"event: error")
"""First bytes of a streamed answer of which the engine computed nothing."""
_PREAMBLES: Final = (b"event: response.created", b"event: response.in_progress")
"""Events of a streamed response that an engine sends before computing."""
_LONGEST_PREAMBLE: Final = 1 << 20  # bytes: such events repeat what was asked; chosen
_POOLS: Final = (
    16  # of connections to one engine; chosen: 1,000 requests in flight then cost a third
)
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""TCP keepalive: a machine that is gone is noticed after 15 s; one that is busy still replies.
Chosen."""
ENGINE_HEADER: Final = b"x-kvgraph-engine"
"""Header of an answer with the engine's number, as in ``GET /fleet``."""
MOST_ANSWER: Final = 16 << 20
"""Bytes of an answer to a question of the proxy's own; chosen: several times the largest
``/metrics``."""
_OF_LENGTH: Final = frozenset({b"content-encoding", b"content-length", b"transfer-encoding"})
_DROPPED: Final = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade date server".split()
) | {ENGINE_HEADER}


class _SpreadTransport(httpx.AsyncBaseTransport):
    """Spreads requests over several pools: httpx scans all of a pool's connections for each
    request."""

    def __init__(self, pools: Sequence[httpx.AsyncBaseTransport]) -> None:
        self._pools, self._next = pools, cycle(pools)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await next(self._next).handle_async_request(request)

    async def aclose(self) -> None:
        for each in self._pools:
            await each.aclose()


class NothingAnsweredError(Exception):
    """An engine went away before the first byte of its answer.

    Args:
        sent: Whether it may have received the request.
    """

    def __init__(self, why: str, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class SilentError(NothingAnsweredError):
    """An engine holds a request for too long without a byte of its answer."""


class BrokenAnswerError(Exception):
    """An engine went away in the middle of its answer."""


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
        """Tell whether the engine computed nothing: an error status, or an error as a stream."""
        return self.status >= _LEAST_ERROR or self.first.startswith(_ERRORS)

    @property
    def is_of_server(self) -> bool:
        """Tell whether the engine failed, rather than refused the request."""
        return self.status >= _LEAST_OF_SERVER

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's bytes as they come.

        Raises:
            BrokenAnswerError: The engine went away before the end.
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
        number: Its index on the router's board.
        url: Its address, without ``/v1``.
        first_byte_s: Seconds for which it may be silent before an answer's first byte.

    Attributes:
        asked: Requests that it has and has not begun to answer.
        running: Requests whose answers it has begun and not ended.
        is_silent: Whether it leaves health checks unanswered.

    Raises:
        ConfigError: The address is invalid.
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
            BadRequestError: Its path is not allowed.
            NothingAnsweredError: The engine cannot be reached, or went away before it answered.
            SilentError: It is there, and silent for too long.
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
        """Return the answer to a request of the proxy's own.

        Raises:
            httpx.RequestError: There is none, it cannot be read, or not all of it arrives in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await whole_answer(self._client, path, timeout=timeout_s)
        except TimeoutError:
            raise httpx.ReadTimeout(f"not all of the answer came in {timeout_s:g} s") from None

    def drop_unanswered(self) -> None:
        """Give up unanswered requests: nothing listens at the engine's port any more."""
        self._gone.set()
        self._gone = asyncio.Event()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _wait(
        self, call: Call, asking: asyncio.Future[Reply], gone: asyncio.Future[Any]
    ) -> None:
        """Wait until the answer begins, the engine is gone, or its silence means that it hangs."""
        either: set[asyncio.Future[Any]] = {asking, gone}
        while True:
            done, _ = await asyncio.wait(
                either, timeout=self._first_byte_s, return_when=asyncio.FIRST_COMPLETED
            )
            # The first byte of an answer that is not streamed comes with the last: silence means
            # something only where health checks are unanswered too.
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
        """Make redirects relative, so that the client asks the proxy again."""
        own = self.url.encode()
        return value.removeprefix(own) if key.lower() == b"location" else value

    async def _is_well(self) -> bool:
        try:
            return (await self.ask("/health", HEALTH_S)).status_code == 200
        except httpx.RequestError:
            return False

    def _request(self, call: Call) -> httpx.Request:
        """Build the request that goes out; raises BadRequestError if httpx made another path of
        it."""
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


async def whole_answer(
    client: httpx.AsyncClient,
    url: str,
    headers: Mapping[str, str] = MappingProxyType({}),
    **more: Any,
) -> httpx.Response:
    """Return the whole answer to a GET, its content as it was sent.

    What is compressed nevertheless is not unpacked: a few KiB may become gigabytes, and everybody
    else's requests would wait for that.

    Raises:
        httpx.HTTPError: There is none, or it is larger than ``MOST_ANSWER``.
    """
    asked = {**headers, "Accept-Encoding": "identity"}
    content = bytearray()
    async with client.stream("GET", url, headers=asked, **more) as answer:
        async for chunk in answer.aiter_raw():
            content += chunk
            if len(content) > MOST_ANSWER:
                raise httpx.DecodingError(f"an answer of more than {MOST_ANSWER >> 20} MiB")
    kept = [each for each in answer.headers.raw if each[0].lower() not in _OF_LENGTH]
    return httpx.Response(
        answer.status_code, headers=kept, content=bytes(content), request=answer.request
    )


def _is_preamble(first: bytes) -> bool:
    """Tell whether an answer consists of events that are sent before any token is computed."""
    events = first.split(b"\n\n")
    return (
        first.startswith(_PREAMBLES)
        and len(first) < _LONGEST_PREAMBLE
        and all(each.startswith(_PREAMBLES) for each in events if each)
    )


def _why(error: httpx.TransportError) -> str:
    return f"{type(error).__name__} {error}".strip()


def refuses(error: BaseException) -> bool:
    """Tell whether a connection failed because nothing listens at any address of the host."""
    if isinstance(error, BaseExceptionGroup):
        return all(refuses(each) for each in error.exceptions)
    cause = error.__cause__ or error.__context__  # httpx's own, and below it the system's
    return isinstance(error, ConnectionRefusedError) or (cause is not None and refuses(cause))


def _transport() -> httpx.AsyncHTTPTransport:
    """Return a pool whose connections fail by keepalive when the engine's machine is gone."""
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
    """Return one context for all engines: each takes 20 ms and half a MiB."""
    return httpx.create_ssl_context(trust_env=False)


async def _dismiss(asking: asyncio.Future[Reply]) -> None:
    """Give up an answer, begun or not."""
    asking.cancel()
    await asyncio.wait({asking})  # which its caller's cancellation ends
    if not asking.cancelled() and asking.exception() is None:
        await asking.result().response.aclose()
