"""Finds what opens a sidecar's tcp endpoint: a token, from the environment or the sidecar's
note."""

from __future__ import annotations

import os
from typing import Final

import zmq

from ..graph.ipc.runtime import token_of

TOKEN_VARIABLE: Final = "AITHER_KVCACHE_SIDECAR_TOKEN"
_NAME: Final = b"engine"


def sidecar_token(endpoint: str) -> str:
    """The token for ``endpoint``; empty if none is needed (ipc), or none is known.

    Only its owner can connect to an ipc socket.
    """
    if endpoint.startswith("ipc://"):
        return ""
    return os.environ.get(TOKEN_VARIABLE, "").strip() or token_of(endpoint)


def present(socket: zmq.Socket[bytes], token: str) -> None:
    """Let ``socket``, before it connects, present ``token``."""
    if token:
        socket.setsockopt(zmq.PLAIN_USERNAME, _NAME)
        socket.setsockopt(zmq.PLAIN_PASSWORD, token.encode())
