"""Serves the application from its own thread."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

# Deadlines for HTTP connections: silent clients and slow readers are cut off.

# For a whole request to arrive, and for its answer to be read; chosen, far above what is needed.
DEADLINE_S: Final = 8.0
# Then the kernel drops data of a closed connection that its client does not take.
_ORPHAN_MS: Final = int(2e3 * DEADLINE_S)
MAX_CONNECTIONS: Final = 256
# Per remote address. On loopback all clients share one address, so only silence is bounded.
MAX_OF_A_CLIENT: Final = 64
LOOPBACK: Final = frozenset({"127.0.0.1", "::1"})


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with deadlines; its own waits forever for a request to arrive.
    With too many connections, the one silent for longest is closed.
    """

    deadline_s: float = DEADLINE_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ORPHAN_MS)
        self._watch()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        # Not while an answer is unread: the kernel would keep it and the client not notice. Such a
        # connection is cut at its deadline.
        if not self._unread:
            super().timeout_keep_alive_handler()

    @property
    def _is_computing(self) -> bool:
        """Whether the client waits for our answer, not we for the client."""
        asked = self.cycle is not None and not self.cycle.response_complete
        return asked and not self.cycle.more_body and not self._unread

    @property
    def _unread(self) -> int:
        """Bytes of answers that have not reached the client, including megabytes in the kernel."""
        return self.transport.get_write_buffer_size() + held_by_kernel(
            self.transport.get_extra_info("socket")
        )

    @property
    def _unheard(self) -> int:
        return held_by_kernel(self.transport.get_extra_info("socket"), termios.FIONREAD)

    def _watch(self) -> None:
        left = self._since + self.deadline_s - self.loop.time()
        self._timer = self.loop.call_later(max(0.0, min(left, self.deadline_s / 4)), self._judge)

    def _judge(self) -> None:
        if self._is_computing:
            self._since = self.loop.time()
        elif self.loop.time() - self._since >= self.deadline_s:
            self._cut()
            return
        self._watch()

    def _cut(self) -> None:
        self.connections.discard(self)  # the loop calls connection_lost later only
        reset(self.transport)

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, TimeoutProtocol)]
        if self.client is not None and self.client[0] not in LOOPBACK:
            own = [each for each in others if each.client and each.client[0] == self.client[0]]
            if len(own) > MAX_OF_A_CLIENT:
                self._cut()
                return
        if len(others) <= MAX_CONNECTIONS:
            return
        idle = [each for each in others if not each._is_computing]
        idle.sort(key=lambda each: each._since)
        # One whose request waits in the kernel is not silent: we are late to read it.
        silent = (each for each in idle if not each._unheard)
        next(silent, (idle or [self])[0])._cut()


def reset(transport: asyncio.BaseTransport) -> None:
    """End a connection and drop what the kernel buffers for its peer."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


def held_by_kernel(connection: socket.socket | None, queue: int = termios.TIOCOUTQ) -> int:
    """Return the bytes written to a connection that its peer has not acknowledged; or in another
    ``queue``.
    """
    if connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), queue, bytes(4)), "little")


# Lines that any client can make uvicorn log by malformed requests, as often as it likes.
_ODD: Final = (
    "Invalid HTTP request received", "Unsupported upgrade request",
    "No supported WebSocket library detected", "Exception in ASGI application",
)  # fmt: skip
_LOG_EVERY_S: Final = 10.0  # of each of them; chosen


class OddRequestFilter(logging.Filter):
    """Passes one line in ten seconds for each kind of malformed request, and no line about an
    answer that came too late because such a request had ended its connection.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        kind = next((each for each in _ODD if said.startswith(each)), None)
        if kind is None:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:  # of ours, unless h11 was done with this client: it had its 400
            return not (isinstance(error, h11.LocalProtocolError) and _OVER in str(error))
        now = self._clock()
        if now - self._last.get(kind, float("-inf")) < _LOG_EVERY_S:
            return False
        self._last[kind] = now
        return True


_OVER: Final = "state=MUST_CLOSE"  # part of h11's text about an answer after a client's error
ODD_REQUESTS: Final = OddRequestFilter()  # one per process, so that adding it twice has no effect


class HttpServer:
    """Listens at once, serves after ``start``; see ``TimeoutProtocol`` for its deadlines.
    Raises OSError.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        logging.getLogger("uvicorn.error").addFilter(ODD_REQUESTS)
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        named = f"[{host}]" if ":" in host else host
        self.url = f"http://{named}:{self._socket.getsockname()[1]}"
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                lifespan="off",
                loop="asyncio",
                http=TimeoutProtocol,
                ws="none",
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
                server_header=False,
                date_header=False,
                log_config=None,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="kvgraph-http", daemon=True
        )

    @property
    def is_serving(self) -> bool:
        return self._thread.is_alive()

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish open answers, for a second at most, and stop listening."""
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close()


class _QuietServer(uvicorn.Server):
    """Sleeps until it is stopped; uvicorn's own loop wakes ten times per second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    def stop(self) -> None:
        """End ``main_loop``, from any thread, even before it began."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        if not self.should_exit:
            await self._ended.wait()


# Refuses bodies longer than any valid request, since they are read before a token is checked.

MOST_BODY_BYTES: Final = 2 << 20  # chosen: the longest valid body (256 wishes) has 1.2 MB
_REFUSED: Final = f"the body is too long; allowed: {MOST_BODY_BYTES} bytes"
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD"})  # their bodies are not read


class BodyLimit:
    """ASGI middleware: answers 413 to a longer body, by its announced length or as it arrives."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        lengths = [int(value) for key, value in scope["headers"] if key == b"content-length"]
        if any(length > MOST_BODY_BYTES for length in lengths):
            refusal = JSONResponse({"detail": _REFUSED}, 413, _HEADERS)
            return await refusal(scope, receive, send)
        if scope["method"] not in _WITHOUT_BODY:
            receive = _Counted(receive)
        return await self._app(scope, receive, send)


class _Counted:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> Any:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > MOST_BODY_BYTES:
            raise HTTPException(413, _REFUSED, _HEADERS)
        return message


# Refuses requests that a foreign web page made a browser send (DNS rebinding).

_MOST_NAMED: Final = 64  # refused names to log; chosen
_LONGEST_NAME: Final = 80  # characters of a name in the log; chosen

_log = logging.getLogger(__name__)


class TrustedHosts:
    """ASGI middleware: answers only requests whose Host, and Origin if any, is among ``hosts``.
    Each other name is logged once, with the setting ``option`` that would allow it.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], option: str = "http.allowed_hosts"
    ) -> None:
        self._app = app
        self._hosts = frozenset(host.lower().strip("[]") for host in hosts)
        self._option = option
        self._named: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = scope["headers"]
        named = [value.decode("latin-1") for key, value in headers if key == b"host"]
        origins = [value.decode("latin-1") for key, value in headers if key == b"origin"]
        if len(named) != 1 or host_name(named[0]) not in self._hosts:
            self._name("Host", ", ".join(named) or "none")
            refusal = PlainTextResponse("this Host is not served here\n", 400)
            return await refusal(scope, receive, send)
        if any(host_name(origin.partition("://")[2]) not in self._hosts for origin in origins):
            self._name("Origin", ", ".join(origins))
            refusal = PlainTextResponse("requests of other origins are not served\n", 403)
            return await refusal(scope, receive, send)
        return await self._app(scope, receive, send)

    def _name(self, header: str, refused: str) -> None:
        said = f"{header} {refused[:_LONGEST_NAME]!r}"
        if said not in self._named and len(self._named) < _MOST_NAMED:
            self._named.add(said)
            _log.warning(
                "a request with %s is refused; allowed: %s; %s adds one",
                said, ", ".join(sorted(self._hosts)), self._option,
            )  # fmt: skip


def host_name(authority: str) -> str:
    """Return the name or address in ``host[:port]``, without the brackets of an IPv6 address and
    without the dot at the end of a fully qualified name.
    """
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].removesuffix(".").lower()
