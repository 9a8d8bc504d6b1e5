"""Binds ZeroMQ endpoints, and removes what they leave behind."""

from __future__ import annotations

import os
import socket as sockets
import stat
from pathlib import Path

import zmq

from ...graph.errors import ConfigError


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
    """Remove the file of an ipc endpoint; ZeroMQ leaves it behind."""
    if endpoint.startswith("ipc://"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


def _bind_ipc(socket: zmq.Socket[bytes], endpoint: str) -> str:
    path = Path(endpoint.removeprefix("ipc://"))
    # ZeroMQ would silently take the path away from a sidecar that serves it.
    if _somebody_listens(path):
        raise ConfigError(f"sidecar.endpoint = {endpoint!r}: another sidecar serves it")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
