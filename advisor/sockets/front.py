"""The socket that engines connect to, and authentication at TCP endpoints."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import os
import socket as sockets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from ...graph.errors import ConfigError, InUseError
from ...graph.wire.curve_keys import SidecarKeys
from ...graph.wire.endpoints import is_ipv6
from ...graph.wire.frames import MAX_FRAME_BYTES

# An ipc socket belongs to its owner (0600), but every user can reach a loopback port. So a TCP
# endpoint requires ZeroMQ's PLAIN handshake with a token, or its encrypted CURVE handshake if the
# sidecar has keys. Both are answered here (ZAP, https://rfc.zeromq.org/spec/27): a connection is
# refused before a message takes any memory.

_ZAP: Final = "inproc://zeromq.zap.01"
_PLAIN: Final = 8  # version, request id, domain, address, identity, mechanism, name, password
_CURVE: Final = 7  # … mechanism, public key
_MECHANISM: Final = 5  # index of the mechanism in these


class Authenticator:
    """Authenticates connections for ZeroMQ (ZAP): by token, or by key if there are keys."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], token: str, keys: SidecarKeys | None = None
    ) -> None:
        self._token, self._keys = token.encode(), keys
        self.refused = 0  # connections
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make an unbound ``socket`` accept only connections authenticated here."""
        if self._keys is not None:
            self._keys.guard(socket)
        else:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvgraph")

    def answer(self, limit: int) -> None:
        for _ in range(limit):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._reply_to(request))

    def close(self) -> None:
        self.socket.close(linger=0)

    def _reply_to(self, request: list[bytes]) -> list[bytes]:
        version, number = [*request, b"", b""][:2]
        if self._is_allowed(request):
            return [version, number, b"200", b"OK", b"engine", b""]
        self.refused += 1
        return [version, number, b"400", b"the token is wrong, or the key not allowed", b"", b""]

    def _is_allowed(self, request: list[bytes]) -> bool:
        if self._keys is None:
            return len(request) == _PLAIN and hmac.compare_digest(request[-1], self._token)
        is_curve = len(request) == _CURVE and request[_MECHANISM] == b"CURVE"
        return is_curve and z85.encode(request[-1]) in self._keys.allowed()


_LOCKED_S: Final = 5.0  # starting or ending another sidecar takes milliseconds; chosen
_AGAIN_S: Final = 0.005


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, and return where to connect; only its owner reaches ipc (0600). Raises ConfigError."""
    try:
        if endpoint.startswith("ipc://"):
            return _bind_ipc(socket, endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise InUseError(f"sidecar.endpoint = {endpoint!r}: cannot listen there: {error}") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def unlink(endpoint: str) -> None:
    """Remove an ipc endpoint's file, unless another sidecar is using it now."""
    if not endpoint.startswith("ipc://"):
        return
    path = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError, ConfigError), _locked_path(path):
        if not _is_served(path):
            path.unlink(missing_ok=True)


def _bind_ipc(socket: zmq.Socket[bytes], endpoint: str) -> str:
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # ZeroMQ would silently take the path away from a sidecar that serves it, and two that
        # start at the same moment would both find it free.
        with _locked_path(path):
            if _is_served(path):
                raise InUseError(f"sidecar.endpoint = {endpoint!r}: another sidecar serves it")
            umask = os.umask(0o177)
            try:
                socket.bind(endpoint)
            finally:
                os.umask(umask)
    except OSError as error:
        if isinstance(error, zmq.ZMQError):
            raise
        raise ConfigError(f"sidecar.endpoint = {endpoint!r}: {error.strerror}") from None
    return endpoint


@contextlib.contextmanager
def _locked_path(path: Path) -> Iterator[None]:
    """Hold a lock beside a socket's path, while checking who listens there and binding."""
    lock, until = path.with_name(f"{path.name}.lock"), time.monotonic() + _LOCKED_S
    while (held := _locked(lock)) is None:
        if time.monotonic() > until:
            raise InUseError(f"sidecar.endpoint: another process holds {str(lock)!r}")
        time.sleep(_AGAIN_S)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is released: see `_locked`
        os.close(held)


def _locked(lock: Path) -> int | None:
    number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder removed the file: a lock on it excludes no other process.
        if os.path.samestat(os.fstat(number), lock.lstat()):
            return number
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(number)
    return None


def _is_served(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigError(f"sidecar.endpoint: {str(path)!r} exists and is not a socket")
    except OSError:
        return False
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


RCVHWM: Final = 256  # messages queued per engine while the sidecar is behind: three seconds' worth
_SNDHWM: Final = 16  # messages; a newer ranking supersedes unread ones; chosen


class EngineListener:
    """The bound ROUTER, authenticated over TCP; for the loop's thread. Raises ConfigError."""

    def __init__(self, endpoint: str, token: str, keys: SidecarKeys | None = None) -> None:
        # Makes all of the sidecar's sockets; their owners close them before `close`.
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_router(self.context)
        is_tcp = endpoint.startswith("tcp://")
        self._authenticator = Authenticator(self.context, token, keys) if is_tcp else None
        self.endpoint = ""
        try:
            if self._authenticator is not None:
                self._authenticator.guard(self.socket)
            if is_ipv6(endpoint):
                self.socket.setsockopt(zmq.IPV6, 1)
            self.endpoint = bind(self.socket, endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self.socket, *([self._authenticator.socket] if self._authenticator else [])]

    @property
    def is_tcp(self) -> bool:
        return self._authenticator is not None

    def answer_handshakes(self, limit: int) -> None:
        """Authenticate connections that wait for it, ``limit`` at most; never waits."""
        if self._authenticator is not None:
            self._authenticator.answer(limit)

    def close(self) -> None:
        self.socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.close()
        self.context.term()
        if self.endpoint:
            unlink(self.endpoint)


def new_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RCVHWM)
    socket.setsockopt(zmq.SNDHWM, _SNDHWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an engine that is gone is an error, not silence
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting engine takes its place at once
    return socket
