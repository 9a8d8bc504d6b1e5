"""``Upstream``: an engine behind the proxy, its connections and answers; the list of engines."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from ...graph.errors import ConfigError
from .callers import Call, check_path

FIRST_BYTE_S: Final = 600.0
"""Seconds for which an engine may be silent before an answer's first byte; chosen: twice as long as
admission holds a request, and as long as OpenAI's clients wait.
"""
MOST_ENGINES: Final = 1024  # chosen: decisions are measured with 1,000

MOST_SHOWN: Final = 80  # characters of a bad address shown in an error; chosen


class EngineAddress(NamedTuple):
    url: str
    drains: bool = False


def engine_in(words: str) -> EngineAddress:
    """Parse ``URL`` or ``URL drain``; raises ConfigError."""
    url, *rest = words.split() or [""]
    if not is_address(url) or rest not in ([], ["drain"]):
        raise ConfigError(
            f"engine {words[:MOST_SHOWN]!r}: allowed: http://HOST:PORT or http://HOST:PORT drain"
        )
    return EngineAddress(url.rstrip("/").removesuffix("/v1"), bool(rest))


def is_address(url: str) -> bool:
    """Return whether this is ``http(s)://HOST[:PORT][/PATH]`` without user, password, query or
    fragment.
    """
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")  # a name that cannot be looked up raises
        more = parts.query or parts.fragment or "@" in parts.netloc or parts.port == 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return plain and parts.scheme in ("http", "https") and bool(host) and not more


def engines_in(path: Path) -> list[EngineAddress]:
    """Read engines, one a line; empty ones and those after a # are skipped. Raises ConfigError."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"--engines {str(path)!r}: cannot be read: {reason}") from None
    found = [
        engine_in(line) for line in lines if line.strip() and not line.lstrip().startswith("#")
    ]
    return checked(found)


def checked(engines: list[EngineAddress]) -> list[EngineAddress]:
    """Return the engines unchanged, if their list is valid; raises ConfigError."""
    urls = [each.url for each in engines]
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"engines that are listed twice: {', '.join(sorted(twice))}")
    if not urls or len(urls) > MOST_ENGINES:
        raise ConfigError(f"{len(urls)} engines: allowed: 1 to {MOST_ENGINES}")
    return engines


CONNECT_S: Final = 2.0
"""Seconds in which to connect; chosen: engines are on this machine or next to it."""
IDLE_S: Final = 3.0  # seconds that an idle connection is kept: uvicorn closes one after five
HEALTH_S: Final = 2.0  # timeout of an engine's health check after it answered an error; chosen
_LEAST_ERROR, _LEAST_OF_SERVER = 400, 500  # statuses
_STATUSES: Final = range(200, 600)  # statuses that an answer may end with; servers send no others
_ERRORS: Final = (b'data: {"error"', b"event: error")
"""First bytes of a streamed answer for which the engine computed nothing."""
_LAST: Final = (b"data: [DONE]", b'data: {"type":"message_stop"}')
"""Ends of streamed answers of OpenAI's and Anthropic's APIs; the connection is closed after it."""
_PREAMBLES: Final = (b"event: response.created", b"event: response.in_progress")
"""Events of a streamed response that an engine sends before computing."""
_LONGEST_PREAMBLE: Final = 1 << 20  # bytes; such events repeat the request; chosen
_MOST_LINE: Final = 64 << 10  # bytes of one header of an answer; chosen
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
"""TCP keepalive: a machine that is gone is noticed after 15 s; a busy one still replies. Chosen."""
ENGINE_HEADER: Final = b"x-kvgraph-engine"
"""Header of an answer with the engine's number, as in ``GET /fleet``."""
MOST_ANSWER: Final = 16 << 20
"""Largest answer to the proxy's own requests; chosen: several times the largest ``/metrics``."""
AS_IT_IS: Final = {"Accept-Encoding": "identity"}  # headers of such a request
_OF_JSON: Final = {"Content-Type": "application/json"}
_OURS: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
"""Errors of a machine that lacks descriptors, memory or ports for another connection."""
_DROPPED: Final = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade date server".split()
) | {ENGINE_HEADER}


class NothingAnsweredError(Exception):
    """An engine failed before the first byte of its answer.

    Attributes:
        sent: It may have received the request.
        refused: Nothing listens at any address of its host.
        ours: This process could not open a connection, which shows nothing about the engine.
    """

    def __init__(
        self, why: str, sent: bool = True, refused: bool = False, ours: bool = False
    ) -> None:
        super().__init__(why)
        self.sent, self.refused, self.ours = sent, refused, ours


class SilentError(NothingAnsweredError):
    """An engine holds a request too long without a byte of its answer."""


class BrokenAnswerError(Exception):
    """An engine failed in the middle of its answer."""


class Reply(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes  # its first bytes; empty if it has none
    response: aiohttp.ClientResponse

    @property
    def failed(self) -> bool:
        """Whether the engine computed nothing: an error status, or an error sent as a stream."""
        return self.status >= _LEAST_ERROR or self.first.startswith(_ERRORS)

    @property
    def is_of_server(self) -> bool:
        """Whether the engine failed, rather than refused the request."""
        return self.status >= _LEAST_OF_SERVER

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's bytes as they arrive; raises BrokenAnswerError."""
        try:
            chunk = self.first
            while chunk:
                yield chunk
                chunk = await self.response.content.readany()
        except aiohttp.ClientError as error:
            raise BrokenAnswerError(type(error).__name__) from None
        finally:
            self.close()

    def ends_with(self, chunk: bytes) -> bool:
        """Return whether nothing comes after this chunk that a client would wait for."""
        return self.response.content.at_eof() or chunk.rstrip().endswith(_LAST)

    def close(self) -> None:
        """Discard what has not been read; the engine notices the closed connection."""
        self.response.close()


class OwnAnswer(NamedTuple):
    status: int
    content: bytes


class Upstream:
    """An engine behind the proxy; must be created within a running event loop.

    Attributes:
        asked: Requests sent to it whose answers have not begun.
        running: Requests whose answers have begun and not ended.
        is_silent: Whether it leaves health checks unanswered.
    """

    def __init__(self, number: int, url: str, first_byte_s: float = FIRST_BYTE_S) -> None:
        self.number, self.url = number, url
        self.is_silent = False
        self._first_byte_s = first_byte_s
        self.asked = self.running = 0
        self._unanswered: set[asyncio.Task[Reply]] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            middlewares=(_once,),
            request_class=_RequestAsItCame,
            # What the client sent, and nothing more; and what the engine answered, to the byte.
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            auto_decompress=False,
            # One caller's cookies must not go out with another's request.
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=_MOST_LINE,
            max_field_size=_MOST_LINE,
        )

    async def begin(self, call: Call) -> Reply:
        """Send a request and wait for the first bytes of its answer.
        Raises BadRequestError, NothingAnsweredError or SilentError.
        """
        asking = asyncio.create_task(self._begin(call))
        self._unanswered.add(asking)
        asking.add_done_callback(self._unanswered.discard)
        try:
            while not (await asyncio.wait({asking}, timeout=self._first_byte_s))[0]:
                # The first byte of an answer that is not streamed comes with the last: silence
                # means something only where health checks are unanswered too.
                if call.streams or self.is_silent:
                    raise SilentError(f"no first byte in {self._first_byte_s:g} s")
        except BaseException:
            if not asking.cancel() and not asking.cancelled() and asking.exception() is None:
                asking.result().close()  # it came at the same moment
            raise
        if asking.cancelled():
            raise NothingAnsweredError("it does not answer any more")
        return asking.result()

    async def ask(self, path: str, timeout_s: float, body: bytes | None = None) -> OwnAnswer:
        """Return the answer to one of the proxy's own requests, with a JSON body or none. Raises
        SilentError or NothingAnsweredError.
        """
        method, headers = ("GET", AS_IT_IS) if body is None else ("POST", AS_IT_IS | _OF_JSON)
        unlimited = aiohttp.ClientTimeout(total=None)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, self.url + path, data=body, timeout=unlimited, allow_redirects=False,
                    headers=headers,
                ) as answer,
            ):  # fmt: skip
                return OwnAnswer(answer.status, await whole_answer(answer))
        except TimeoutError:
            raise SilentError(f"not all of the answer came in {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise NothingAnsweredError(_why(error)) from None

    def drop_unanswered(self) -> None:
        """Give up unanswered requests, because nothing listens at the engine's port any more."""
        for each in self._unanswered:
            each.cancel()

    async def close(self) -> None:
        await self._session.close()

    async def _begin(self, call: Call) -> Reply:
        check_path(call.path)
        size = len(call.body.data)
        headers = [(_in_latin1(key), _in_latin1(value)) for key, value in call.headers]
        if size:
            headers.append(("content-length", str(size)))
        response = await self._session.request(
            call.method,
            URL(self.url + call.path, encoded=True),
            headers=headers,
            data=call.body if size else None,
            allow_redirects=False,
        )
        try:
            return await self._begun(response)
        except BaseException as error:
            response.close()
            if isinstance(error, aiohttp.ClientError):
                raise NothingAnsweredError(_why(error)) from None
            raise

    async def _begun(self, response: aiohttp.ClientResponse) -> Reply:
        if response.status not in _STATUSES:  # 101 among them: no upgrade is passed on
            raise NothingAnsweredError(f"it answers with status {response.status}")
        first = await response.content.readany()
        while _is_preamble(first) and (more := await response.content.readany()):
            first += more
        is_error = response.status >= _LEAST_OF_SERVER or first.startswith(_ERRORS)
        if is_error and not await self._is_well():  # vLLM's server outlives its engine for a while
            raise NothingAnsweredError("it answers an error, and is not well")
        headers = [
            (key, self._without_origin(key, value))
            for key, value in response.raw_headers
            if key.lower() not in _DROPPED
        ]
        return Reply(response.status, headers, first, response)

    def _without_origin(self, key: bytes, value: bytes) -> bytes:
        """Make redirects relative, so that the client asks the proxy again."""
        own = self.url.encode()
        return value.removeprefix(own) if key.lower() == b"location" else value

    async def _is_well(self) -> bool:
        try:
            return (await self.ask("/health", HEALTH_S)).status == 200
        except NothingAnsweredError:
            return False


async def _once(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request once; what fails is not repeated by aiohttp, which repeats PUT and DELETE."""
    try:
        return await send(request)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        cause = getattr(error, "os_error", None)
        refused = isinstance(cause, ConnectionRefusedError)
        ours = isinstance(cause, OSError) and cause.errno in _OURS
        raise NothingAnsweredError(_why(error), False, refused, ours) from None
    except (aiohttp.ClientError, OSError) as error:
        raise NothingAnsweredError(_why(error)) from None


_END_OF_HEAD: Final = b"\r\n\r\n"


def _in_latin1(value: bytes) -> str:
    """Return a text with a character for each byte, as ``_RequestAsItCame`` sends it."""
    return value.decode("latin-1")


class _RequestAsItCame(aiohttp.ClientRequest):
    """A request whose headers go out in Latin-1, as they came, not in aiohttp's UTF-8."""

    async def send(self, conn: Any) -> aiohttp.ClientResponse:
        plain = all(map(str.isascii, (*self.headers.keys(), *self.headers.values())))
        return await super().send(conn if plain else _written_in_latin1(conn))


class _Around:
    """Stands for another object and answers like it, but for what ``own`` has."""

    def __init__(self, inner: Any, **own: Any) -> None:
        self._inner = inner
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _written_in_latin1(conn: Any) -> Any:
    """The connection, with a transport that writes one request's headers in Latin-1."""
    transport = conn.protocol.transport  # None once the connection is lost
    if transport is None:
        return conn
    return _Around(conn, protocol=_Around(conn.protocol, transport=_Transport(transport)))


class _Transport(_Around):
    """A transport that turns the head of a request, its first bytes, from UTF-8 into Latin-1."""

    _written = False

    def write(self, data: bytes) -> None:
        if not self._written:
            self._written = True
            head, end, body = bytes(data).partition(_END_OF_HEAD)
            data = head.decode().encode("latin-1") + end + body
        self._inner.write(data)

    def writelines(self, chunks: Iterable[bytes]) -> None:
        self.write(b"".join(chunks))


class TooLargeError(aiohttp.ClientError, ValueError):
    """An answer to one of the proxy's own requests has more than ``MOST_ANSWER`` bytes."""


async def whole_answer(answer: aiohttp.ClientResponse) -> bytes:
    """Return all bytes of an answer, from a client session that does not decompress; raises
    aiohttp.ClientError if it ends early or is too large.

    An answer compressed although we requested it uncompressed stays compressed: a few KiB may
    become gigabytes, for which all other requests would wait.
    """
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > MOST_ANSWER:
            raise TooLargeError(f"an answer of more than {MOST_ANSWER >> 20} MiB")
    return bytes(content)


def _is_preamble(first: bytes) -> bool:
    """Tell whether an answer consists of events that are sent before any token is computed."""
    events = first.split(b"\n\n")
    return (
        first.startswith(_PREAMBLES)
        and len(first) < _LONGEST_PREAMBLE
        and all(each.startswith(_PREAMBLES) for each in events if each)
    )


def _why(error: Exception) -> str:
    """Say what went wrong, without the answer, which aiohttp quotes: it belongs in no log."""
    name = type(error).__name__
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):
        return f"{name}: its answer is no HTTP"
    return f"{name} {error}" if isinstance(error, OSError | TooLargeError) else name


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Make a socket that fails by keepalive when the engine's machine is gone."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
