"""Binds ZeroMQ endpoints, and removes what they leave behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket as sockets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import zmq

from ...graph.errors import ConfigError

_LOCKED_S: Final = 5.0  # a start or an end of another sidecar takes milliseconds; chosen
_AGAIN_S: Final = 0.005


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind and return the endpoint to connect to; an ipc socket is for its owner only (0600).

    Raises:
        ConfigError: Somebody else serves there, or the address cannot be bound.
    """
    try:
        if endpoint.startswith("ipc://"):
            return _bind_ipc(socket, endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"sidecar.endpoint = {endpoint!r}: cannot listen there: {error}"
        ) from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def unlink(endpoint: str) -> None:
    """Remove the file of an ipc endpoint, which ZeroMQ leaves behind; not that of a sidecar that
    was started there meanwhile."""
    if not endpoint.startswith("ipc://"):
        return
    path = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError, ConfigError), _alone_at(path):
        if not _somebody_listens(path):
            path.unlink(missing_ok=True)


def _bind_ipc(socket: zmq.Socket[bytes], endpoint: str) -> str:
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # ZeroMQ would silently take the path away from a sidecar that serves it, and two that
        # start at one moment would both find nobody there.
        with _alone_at(path):
            if _somebody_listens(path):
                raise ConfigError(f"sidecar.endpoint = {endpoint!r}: another sidecar serves it")
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
def _alone_at(path: Path) -> Iterator[None]:
    """Hold a lock beside a socket's path while somebody looks who is there, and binds.

    Raises:
        ConfigError: Another process holds it for too long.
        OSError: There can be no lock.
    """
    lock, until = path.with_name(f"{path.name}.lock"), time.monotonic() + _LOCKED_S
    while (held := _locked(lock)) is None:
        if time.monotonic() > until:
            raise ConfigError(f"sidecar.endpoint: another process holds {str(lock)!r}")
        time.sleep(_AGAIN_S)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)  # before it is released: see ``_locked``
        os.close(held)


def _locked(lock: Path) -> int | None:
    """An open lock file that is ours alone; None if it is another process's."""
    number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it removed the file: a lock on that one keeps nobody out any more.
        if os.path.samestat(os.fstat(number), lock.lstat()):
            return number
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(number)
    return None


def _somebody_listens(path: Path) -> bool:
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
