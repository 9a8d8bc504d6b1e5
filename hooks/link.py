"""The socket between an engine and its sidecar, and the token that opens the sidecar's door."""

from __future__ import annotations

from typing import Final

import zmq

from ..graph.ipc.wake import Wake
from ..graph.messages import wire
from .access import present, sidecar_token

ADVICE_PER_TICK: Final = 64  # messages that may wait to be read, and are read at once
_ASK_AGAIN_S: Final = 1.0  # between two looks for a new token; chosen


class Link:
    """Opens sockets to one sidecar, and knows when another one is due.

    Args:
        endpoint: The sidecar's ROUTER, ``ipc://…`` or ``tcp://host:port``.
        identity: The engine's, on every socket.
        send_hwm: Frames that ZeroMQ may hold for a slow sidecar.
    """

    def __init__(self, endpoint: str, identity: bytes, send_hwm: int) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._send_hwm = send_hwm
        self._token = ""
        self._token_checked = float("-inf")

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """A socket that connects, with the token of now; the caller closes it."""
        socket = context.socket(zmq.DEALER)
        try:
            self._set_up(socket)
            self._token = sidecar_token(self._endpoint)
            present(socket, self._token)
            socket.connect(self._endpoint)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    def is_outdated(self, now: float) -> bool:
        """Whether the sidecar's token has changed since the socket was opened: it was restarted.

        Asked while no sidecar is reachable; looks at most once a second, and notes the time.
        """
        if self._endpoint.startswith("ipc://") or now - self._token_checked < _ASK_AGAIN_S:
            return False
        self._token_checked = now
        return sidecar_token(self._endpoint) not in ("", self._token)

    def _set_up(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._send_hwm)
        socket.setsockopt(zmq.RCVHWM, ADVICE_PER_TICK)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        # Only a finished connection takes messages: nothing piles up for a sidecar that is not
        # there, and being writable means that it is.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms; chosen
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)  # ms; chosen


def wait_for_advice(
    socket: zmq.Socket[bytes], wake: Wake, seconds: float, or_room: bool = False
) -> bool:
    """Sleep so long, or until advice arrives or ``wake`` is set; whether advice arrived.

    Args:
        or_room: Also until there is somebody who takes messages.
    """
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN | zmq.POLLOUT if or_room else zmq.POLLIN)
    poller.register(wake.fd, zmq.POLLIN)
    ready = dict(poller.poll(round(seconds * 1000)))
    if wake.fd in ready:
        wake.clear()
    return bool(ready.get(socket, 0) & zmq.POLLIN)
