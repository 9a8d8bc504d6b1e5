"""``Front``: the socket that engines connect to."""

from __future__ import annotations

from typing import Final

import zmq

from ...graph.ipc.addresses import is_ipv6
from ...graph.ipc.curve_keys import SidecarKeys
from ...graph.messages.wire import MAX_FRAME_BYTES
from . import endpoints
from .door import Door

RCVHWM: Final = 256
"""Messages of an engine held for a sidecar that falls behind: three seconds."""
_SNDHWM: Final = 16  # messages; a newer ranking supersedes unread ones; chosen


class Front:
    """The bound ROUTER, and the door before a tcp endpoint; used by the loop's thread only.

    Args:
        endpoint: Where to listen.
        token: Opens a tcp endpoint, if there are no keys.
        keys: Of those that a tcp endpoint lets in.

    Attributes:
        context: Makes all sockets of the sidecar; their owners close them before ``close``.
        endpoint: Where engines connect.

    Raises:
        ConfigError: The address cannot be had.
    """

    def __init__(self, endpoint: str, token: str, keys: SidecarKeys | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_router(self.context)
        is_tcp = endpoint.startswith("tcp://")
        self._door = Door(self.context, token, keys) if is_tcp else None
        self.endpoint = ""
        try:
            if self._door is not None:
                self._door.guard(self.socket)
            if is_ipv6(endpoint):
                self.socket.setsockopt(zmq.IPV6, 1)
            self.endpoint = endpoints.bind(self.socket, endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll."""
        return [self.socket, *([self._door.socket] if self._door else [])]

    @property
    def is_tcp(self) -> bool:
        """Whether a door stands before it."""
        return self._door is not None

    def answer_the_door(self, limit: int) -> None:
        """Answer up to ``limit`` processes that ask to connect."""
        if self._door is not None:
            self._door.answer(limit)

    def close(self) -> None:
        """Close the sockets, and leave no file behind."""
        self.socket.close(linger=0)
        if self._door is not None:
            self._door.close()
        self.context.term()
        if self.endpoint:
            endpoints.unlink(self.endpoint)


def new_router(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The socket that engines talk to, not bound yet."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, RCVHWM)
    socket.setsockopt(zmq.SNDHWM, _SNDHWM)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an engine that is gone is an error, not silence
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a reconnecting engine takes its place at once
    return socket
