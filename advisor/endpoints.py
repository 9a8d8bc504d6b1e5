"""ZeroMQ endpoints: which are well formed, which stay on this machine, and binding one."""

from __future__ import annotations

import os
import socket as sockets
import stat
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import zmq

from ..graph.errors import ConfigError

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_IPC_PATH: Final = 107  # bytes of sun_path, less its NUL
ENDPOINT_FORMS: Final = "ipc:///path/to/socket or tcp://127.0.0.1:PORT"


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine."""
    return host in LOOPBACK_HOSTS or (host.startswith("127.") and host.replace(".", "").isdigit())


def check_endpoint(endpoint: str, *, any_host: bool = False) -> str:
    """``endpoint`` if it is well formed and, unless ``any_host``, stays on this machine.

    Raises:
        ValueError: It is not; the message says what is allowed.
    """
    if endpoint.startswith("ipc://"):
        return _check_ipc(endpoint)
    host, port = _tcp_parts(endpoint)
    if not any_host and not is_loopback(host):
        raise ValueError(
            "listens beyond loopback, which needs CURVE keys that this build does not have; "
            f"allowed: {ENDPOINT_FORMS}"
        )
    if any_host and port == 0:
        raise ValueError(f"needs a port to connect to; allowed: {ENDPOINT_FORMS}")
    return endpoint


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


def _check_ipc(endpoint: str) -> str:
    path = endpoint.removeprefix("ipc://")
    if not path.startswith("/") or "\0" in path:
        raise ValueError(f"needs an absolute path; allowed: {ENDPOINT_FORMS}")
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise ValueError(f"path is longer than {MAX_IPC_PATH} bytes, the system's limit")
    return endpoint


def _tcp_parts(endpoint: str) -> tuple[str, int]:
    if not endpoint.startswith("tcp://"):
        raise ValueError(f"is not an endpoint; allowed: {ENDPOINT_FORMS}")
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None or parts.path:
        raise ValueError(f"is not host and port; allowed: {ENDPOINT_FORMS}")
    return host, port


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
