"""Ends with the parent process, limits repeated log lines, and serves HTTP in front of engines."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import termios
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...dashboards.server import ODD_REQUESTS, TrustedHosts, held_by_kernel, reset
from ...graph.errors import ConfigError, InUseError
from ...graph.wire.endpoints import LOOPBACK_HOSTS, is_alive, is_loopback


class ParentWatch:
    """Detects that process ``pid`` has ended; immediately if the kernel has pidfds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.fd: int | None = None  # becomes readable when the process ends; None without pidfds
        self._gone = not is_alive(pid)
        # No pidfds: ``is_gone`` asks each time. A number that is too large is no process's.
        with contextlib.suppress(AttributeError, OSError, OverflowError):
            self.fd = os.pidfd_open(pid)

    def is_gone(self, readable: bool = False) -> bool:
        """Whether the process has ended; ``readable``: whether ``fd`` was."""
        self._gone = self._gone or readable or (self.fd is None and not is_alive(self._pid))
        return self._gone

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


_OBJECTS: Final = 50_000  # objects created between two collections; chosen
_YOUNG: Final = 20  # collections after which one also scans older objects; chosen


def collect_seldom() -> None:
    """Collect garbage rarely from now on, and never scan what this process has loaded so far.

    A full collection stops all threads for tens of milliseconds, including one that holds the
    graph's lock. Almost no objects here are in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS, _YOUNG, _YOUNG)


_THP_DISABLE: Final = 41  # ``PR_SET_THP_DISABLE`` of prctl(2)
_MMAP_THRESHOLD: Final = -3  # ``M_MMAP_THRESHOLD`` of mallopt(3)
_TRIM_THRESHOLD: Final = -1  # ``M_TRIM_THRESHOLD``
_LARGE: Final = 1 << 22  # bytes; chosen
_KEPT: Final = 1 << 26  # bytes of free memory; chosen


def tame_memory() -> None:
    """Use small memory pages from now on; return large arrays to the system once they are freed,
    and keep the memory of small ones.

    numpy requests pages of 2 MiB, for which the kernel may first move other memory: up to 30 ms, in
    a thread that holds the graph's lock. And once an array of up to 32 MiB was freed, glibc keeps
    all freed arrays up to that size, so tables that are rebuilt leave holes. Once a threshold is
    set for these, it would return all but 128 KiB of free memory after each ranking, and take it
    again page by page: 4,400 page faults a second on a busy sidecar, instead of 130.
    """
    with contextlib.suppress(OSError, AttributeError):  # it is no Linux, or has another malloc
        system = ctypes.CDLL(None)
        system.prctl(_THP_DISABLE, 1, 0, 0, 0)
        system.mallopt(_MMAP_THRESHOLD, _LARGE)
        system.mallopt(_TRIM_THRESHOLD, _KEPT)


_LOG_EVERY_S: Final = 10.0  # of one kind; chosen


class RateLimitedLog:
    """Logs each kind of problem at most once in ten seconds, with the count of omitted lines.
    Kinds are constants, never input, so that their number is bounded.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log ``message % args``, unless its kind was logged recently."""
        now = self._clock()
        if now - self._last.get(kind, float("-inf")) < _LOG_EVERY_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last[kind] = now
        left_out = self._left_out.pop(kind, 0)
        suffix = f" (and {left_out} more like it)" if left_out else ""
        self._logger.warning(message + "%s", *args, suffix)

    def failed(self, kind: str, what: str, error: Exception) -> None:
        """Warn about ``what`` with only the error's type, because its text may quote callers."""
        self.warn(kind, "%s (%s)", what, type(error).__name__)
        self._logger.debug(what, exc_info=error)

    def once(self, kind: str, message: str, *args: object) -> None:
        if kind not in self._last:
            self._last[kind] = self._clock()
            self._logger.warning(message, *args)


# uvicorn logs this when an answer ends early, as ours do when an engine has failed, which we log.
_TRUNCATED: Final = "ASGI callable returned without completing response"


def refuse_remote(host: str, allow_remote: bool) -> None:
    """Raise ConfigError where ``host`` is not loopback, and ``allow_remote`` is not set."""
    if not (is_loopback(host) or allow_remote):
        raise ConfigError(f"--host {host}: listens beyond loopback; --allow-remote permits it")


def log_for_people() -> None:
    """Log to standard error, without lines for our own requests and truncated answers."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    uvicorns = logging.getLogger("uvicorn.error")
    uvicorns.addFilter(lambda line: _TRUNCATED not in line.getMessage())
    uvicorns.addFilter(ODD_REQUESTS)


# HTTP serving in front of engines.

# Probes of load balancers and orchestrators: whether it takes requests, and whether it runs.
PROBES: Final = frozenset({"/health", "/healthz", "/ping", "/ready", "/readyz"})
LIVENESS: Final = frozenset({"/live", "/livez"})
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# A stopping service still serves for this long, but tells probes that it is stopping. Chosen:
# Kubernetes' proxies and most load balancers have noticed by then.
NOT_READY_S: Final = 5.0
_MOST_HEADERS: Final = 64 << 10  # bytes of one request's headers; chosen
_STOP_S: Final = 24  # for running requests to finish; chosen: Kubernetes gives a pod 30 s in all
_OF_DESCRIPTORS: Final = 0.5  # share of the process's descriptors for connections; chosen
_MOST_CONNECTIONS: Final = 8192  # upper limit, since each costs memory; chosen
_CHECKS: Final = 5  # checks of a client that does not read, within ``read_s``; chosen
_LEAST_READ: Final = 16 << 10  # bytes that a client must read between two checks; chosen
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


def most_connections() -> int:
    """Return how many client connections leave enough descriptors for those to engines."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(int(_OF_DESCRIPTORS * allowed), _MOST_CONNECTIONS)


class HeadDeadline(H11Protocol):
    """Closes connections that send no request in time, or do not read their answer. With too many,
    the one that has sent no request for longest is closed.
    """

    # uvicorn's own HTTP/1.1 protocol waits forever for both. Chosen: as long as for a whole body.
    head_s: float = 25.0  # for a request's complete head
    read_s: float = 25.0  # for which an answer may be left unread once buffers are full

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._since = 0.0  # when it began to wait for a request, by the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) > most_connections():
            others = (each for each in self.connections if isinstance(each, HeadDeadline))
            silent = [each for each in others if each._is_waiting and not each._unheard]
            if silent:
                longest = min(silent, key=lambda each: each._since)
                self.connections.discard(longest)  # the loop calls connection_lost later only
                reset(longest.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_watch()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._cancel_watch()
        super().resume_writing()

    def _wait_for_head(self) -> None:
        self._cancel_timer()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(self.head_s, self._cut_if_waiting)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cut_if_waiting(self) -> None:
        if self._is_waiting:
            reset(self.transport)

    @property
    def _is_waiting(self) -> bool:
        """Whether no request of the client's is being read or answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def _unheard(self) -> int:
        """Bytes that the client sent, and that wait to be read."""
        return held_by_kernel(self.transport.get_extra_info("socket"), termios.FIONREAD)

    def _watch_reader(self, checks: int = _CHECKS) -> None:
        self._cancel_watch()
        wait_s = self.read_s / _CHECKS
        self._reading = self.loop.call_later(wait_s, self._check_reader, self._unread, checks - 1)

    def _cancel_watch(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def _check_reader(self, before: int, checks: int) -> None:
        """Close the connection of a client that read too little since the last checks."""
        if before - self._unread >= _LEAST_READ:  # the kernels' buffers filled, or it is slow
            self._watch_reader(_CHECKS - 1)
        elif checks > 0:
            self._watch_reader(checks)
        else:
            reset(self.transport)

    @property
    def _unread(self) -> int:
        held = held_by_kernel(self.transport.get_extra_info("socket"))
        return self.transport.get_write_buffer_size() + held


class ApiGate:
    """ASGI middleware: allows only API methods, under the names ``hosts`` (None: any; probes may
    use others), and tells probes when the service is stopping.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self.leaving = False  # it was told to stop
        self._app = app
        self._guarded: ASGIApp = app
        if hosts is not None:
            self._guarded = TrustedHosts(app, hosts, "--allowed-host")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_probe = scope["path"] in PROBES
        if scope["method"] not in METHODS:
            allowed = ", ".join(METHODS)
            body = {"message": f"method not allowed; allowed: {allowed}", "code": 405}
            refusal = JSONResponse({"error": body}, 405, {"Allow": allowed})
            return await refusal(scope, receive, send)
        if scope["path"] in LIVENESS:  # also without engines: a restart would bring none back
            return await JSONResponse({"status": "ok"})(scope, receive, send)
        if is_probe and self.leaving:
            return await JSONResponse({"status": "stopping"}, 503)(scope, receive, send)
        await (self._app if is_probe else self._guarded)(scope, receive, send)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, front: ApiGate) -> None:
        super().__init__(config)
        self._front = front
        self._until = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGTERM or self._front.leaving:
            return super().handle_exit(sig, frame)
        self._until = time.monotonic() + NOT_READY_S
        self._front.leaving = True

    async def on_tick(self, counter: int) -> bool:
        if self._front.leaving and time.monotonic() >= self._until:
            super().handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter)


def checked_hosts(names: Sequence[str]) -> list[str]:
    """Return ``names``; raises ConfigError if one is not a valid host name."""
    for name in names:
        if not _NAME.fullmatch(name) and not _is_ipv6(name):
            raise ConfigError(
                f"--allowed-host {name[:80]!r}: allowed: a name or an address without scheme and "
                "port, as in llm.example.com"
            )
    return list(names)


def _is_ipv6(name: str) -> bool:
    try:
        return ipaddress.ip_address(name.strip("[]")).version == 6
    except ValueError:
        return False


async def check_address(host: str, port: int) -> int:
    """Refuse an address on which nothing can listen, before uvicorn exits, and return the port, for
    0 a free one. Raises ConfigError.
    """
    loop = asyncio.get_running_loop()
    try:
        probe = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise ConfigError(f"--host {host[:80]!r}: {why}") from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise InUseError(f"--port {port}: cannot listen on {host}: {why}") from None
    free: int = probe.sockets[0].getsockname()[1]
    probe.close()
    return free


async def serve_at(app: ASGIApp, host: str, port: int, allowed_hosts: Sequence[str] = ()) -> None:
    """Serve until told to stop, then finish running requests. ``allowed_hosts``: names under which
    the service is addressed beside its own, such as a reverse proxy's; without any, every name is
    accepted beyond loopback.
    """
    # A page of another origin must not reach engines through a browser on this machine.
    guards = is_loopback(host) or allowed_hosts
    front = ApiGate(app, [*LOOPBACK_HOSTS, host, *allowed_hosts] if guards else None)
    config = uvicorn.Config(
        front, host=host, port=port, http=HeadDeadline, ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, h11_max_incomplete_event_size=_MOST_HEADERS,
        timeout_graceful_shutdown=_STOP_S,
    )  # fmt: skip
    await _Server(config, front).serve()
