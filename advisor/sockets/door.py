"""Lets only those who know the token speak at a tcp endpoint.

An ipc socket belongs to its owner (0600); every user reaches a loopback port. So a tcp endpoint
asks for ZeroMQ's PLAIN handshake, and this answers it (ZAP, https://rfc.zeromq.org/spec/27): a
caller without the token is refused before a message takes any memory.
"""

from __future__ import annotations

import hmac
from typing import Final

import zmq

_ZAP: Final = "inproc://zeromq.zap.01"
_FIELDS: Final = 8  # version, request id, domain, address, identity, mechanism, name, password


class Door:
    """Answers ZeroMQ's question whether a connection may be made; used by the loop's thread only.

    Args:
        context: The context of the guarded sockets.
        token: What callers must know.

    Attributes:
        refused: Connections that were refused.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: str) -> None:
        self._token = token.encode()
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket``, not bound yet, take only connections that this door lets in."""
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvgraph")

    def answer(self, limit: int) -> None:
        """Answer up to ``limit`` connections that are being made."""
        for _ in range(limit):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._judge(request))

    def close(self) -> None:
        """Close the socket; nobody gets in from here on."""
        self.socket.close(linger=0)

    def _judge(self, request: list[bytes]) -> list[bytes]:
        version, number = [*request, b"", b""][:2]
        knows = len(request) == _FIELDS and hmac.compare_digest(request[-1], self._token)
        if knows:
            return [version, number, b"200", b"OK", b"engine", b""]
        self.refused += 1
        return [version, number, b"400", b"the token is wrong", b"", b""]
