"""Checks the addresses at which an engine and a sidecar meet: their form, and that they are
local."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import urlsplit

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1"})
MAX_IPC_PATH: Final = 107  # bytes of sun_path, less its NUL
ENDPOINT_FORMS: Final = "ipc:///path/to/socket or tcp://127.0.0.1:PORT"


def is_loopback(host: str) -> bool:
    """Whether ``host`` can only be reached from this machine."""
    return host in LOOPBACK_HOSTS or (host.startswith("127.") and host.replace(".", "").isdigit())


def is_ipv6(endpoint: str) -> bool:
    """Whether an endpoint's host is written as an IPv6 address, for which ZeroMQ wants to be
    told."""
    return "[" in endpoint and not endpoint.startswith("ipc://")


def check_endpoint(endpoint: str, *, any_host: bool = False, connects: bool = False) -> str:
    """``endpoint`` if it is well formed and, unless ``any_host``, stays on this machine.

    Args:
        connects: Whether it is to be connected to, so that port 0 is not allowed.

    Raises:
        ValueError: It is not; the message says what is allowed.
    """
    if endpoint.startswith("ipc://"):
        return _check_ipc(endpoint)
    host, port = _tcp_parts(endpoint)
    if not any_host and not is_loopback(host):
        raise ValueError(
            "goes beyond loopback, which needs CURVE keys on both ends (`kvgraph keys`); "
            f"without them, allowed: {ENDPOINT_FORMS}"
        )
    if connects and port == 0:
        raise ValueError(f"needs a port to connect to; allowed: {ENDPOINT_FORMS}")
    return endpoint


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
    beside = None if host is None else parts.path or parts.query or parts.fragment or parts.username
    if host is None or port is None or beside:
        raise ValueError(f"is not host and port; allowed: {ENDPOINT_FORMS}")
    return host, port
