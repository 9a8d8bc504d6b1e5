"""Deadlines for HTTP connections: silent clients and slow readers are cut off, not waited for."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

DEADLINE_S: Final = 8.0
"""For a whole request to arrive, and for its answer to be read: chosen, far above any need."""

_ORPHAN_MS: Final = int(2e3 * DEADLINE_S)
"""After so long, the kernel drops what it holds for a client of a connection that we have closed.
"""

MAX_CONNECTIONS: Final = 256
MAX_OF_A_CLIENT: Final = 64
"""Of one remote address. On loopback all clients share one, and what is bounded is the silence."""

LOOPBACK: Final = frozenset({"127.0.0.1", "::1"})


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with deadlines: it has none for a request that does not arrive.

    If there are too many connections, the one that has been silent longest is cut.
    """

    deadline_s: float = DEADLINE_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._since = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if there is room or a silent one to cut."""
        super().connection_made(transport)
        self._since = self.loop.time()
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _ORPHAN_MS)
        self._watch()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note that an answer was written: from here on the client must read it, or ask again."""
        self._since = self.loop.time()
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that asks nothing more, unless its answer is not read: the kernel
        would hold the answer, and the client not notice. Such a one is cut at its deadline."""
        if not self._unread:
            super().timeout_keep_alive_handler()

    @property
    def _is_computing(self) -> bool:
        """Whether the connection waits for our answer, rather than we for the client."""
        asked = self.cycle is not None and not self.cycle.response_complete
        return asked and not self.cycle.more_body and not self._unread

    @property
    def _unread(self) -> int:
        """Bytes of answers that have not reached the client's machine, in the kernel too: its
        buffer takes in megabytes."""
        return self.transport.get_write_buffer_size() + held_by_kernel(
            self.transport.get_extra_info("socket")
        )

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
        """End the connection, and release what the kernel holds for it."""
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
        min(idle or [self], key=lambda each: each._since)._cut()


def reset(transport: asyncio.BaseTransport) -> None:
    """End a connection, and release what the kernel holds for its peer."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(transport, asyncio.WriteTransport):
        transport.abort()


def held_by_kernel(connection: socket.socket | None) -> int:
    """Bytes that were written to a connection and are not acknowledged by its peer."""
    if connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), "little")
