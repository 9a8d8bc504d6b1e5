"""``KvSubscription``: the live end of vLLM's KV-event publisher."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from .kv_replay import MAX_PENDING, new_socket

_MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class KvSubscription:
    """A SUB socket, and the state of its connection; for one thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str) -> None:
        self._sub = new_socket(context, zmq.SUB, MAX_PENDING)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._sub.get_monitor_socket(_MONITORED)
        self._sub.connect(endpoint)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll."""
        return [self._sub, self._monitor]

    def read(self, limit: int) -> Generator[list[bytes], None, bool]:
        """Frames of up to ``limit`` batches; the generator's value is whether that was all."""
        for _ in range(limit):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            yield frames
        return False

    def changes(self) -> Iterator[bool]:
        """Changes of the connection, in order: True if it was made, False if it was lost."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        """Close the sockets."""
        self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._sub.close(linger=0)
