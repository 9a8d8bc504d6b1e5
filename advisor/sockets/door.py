"""Lets only those speak at a tcp endpoint who know the token, or whose keys are allowed.

An ipc socket belongs to its owner (0600); every user reaches a loopback port. So a tcp endpoint
asks for ZeroMQ's PLAIN handshake, or where the sidecar has keys for CURVE's, in which nothing is in
clear; and this answers it (ZAP, https://rfc.zeromq.org/spec/27): whoever is not let in is refused
before a message takes any memory.
"""

from __future__ import annotations

import hmac
from typing import Final

import zmq
from zmq.utils import z85

from ...graph.ipc.curve_keys import SidecarKeys

_ZAP: Final = "inproc://zeromq.zap.01"
_PLAIN: Final = 8  # version, request id, domain, address, identity, mechanism, name, password
_CURVE: Final = 7  # … mechanism, public key
_MECHANISM: Final = 5  # its place


class Door:
    """Answers ZeroMQ's question whether a connection may be made; used by the loop's thread only.

    Args:
        context: The context of the guarded sockets.
        token: What callers must know, if there are no keys.
        keys: Those of the sidecar; whose keys lie beside them is let in.

    Attributes:
        refused: Connections that were refused.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        token: str,
        keys: SidecarKeys | None = None,
    ) -> None:
        self._token, self._keys = token.encode(), keys
        self.refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let ``socket``, not bound yet, take only connections that this door lets in."""
        if self._keys is not None:
            self._keys.guard(socket)
        else:
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
        if self._lets_in(request):
            return [version, number, b"200", b"OK", b"engine", b""]
        self.refused += 1
        return [version, number, b"400", b"the token is wrong, or the key not allowed", b"", b""]

    def _lets_in(self, request: list[bytes]) -> bool:
        if self._keys is None:
            return len(request) == _PLAIN and hmac.compare_digest(request[-1], self._token)
        asks_by_key = len(request) == _CURVE and request[_MECHANISM] == b"CURVE"
        return asks_by_key and z85.encode(request[-1]) in self._keys.allowed()
