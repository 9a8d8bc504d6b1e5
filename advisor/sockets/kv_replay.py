"""``KvReplay``: asks a publisher of KV events again for batches that were missed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from ...graph.messages.kv_events import KvEvent
from ...graph.messages.wire import MAX_FRAME_BYTES

MAX_ATTEMPTS: Final = 5  # per gap; chosen
REPLAY_TIMEOUT_S: Final = 0.5  # chosen
MAX_PENDING: Final = 10_000
"""Live batches that wait for a replay, at most."""
_END: Final = (-1).to_bytes(8, "big", signed=True)


class KvReplay:
    """Asks for one gap at a time, a few times; live batches wait meanwhile.

    It does not know the order of batches: the source says what is missing, and takes what waits.

    Args:
        endpoint: The publisher's replay socket; None if it has none: then nothing is asked.
        timeout_s: An attempt ends when nothing came for so many seconds.

    Attributes:
        active: Whether a gap is being filled.
        attempts: Requests for this gap.
        requests: All requests so far.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str | None,
        clock: Callable[[], float],
        timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._clock = clock
        self._timeout_s = timeout_s
        self._waiting: dict[int, list[KvEvent]] = {}
        self._deadline = 0.0
        self.socket: zmq.Socket[bytes] | None = None
        self.active = False
        self.attempts = 0
        self.requests = 0

    @property
    def is_possible(self) -> bool:
        """Whether the publisher has a replay socket."""
        return self._endpoint is not None

    @property
    def deadline(self) -> float | None:
        """When this attempt ends; None while nothing is missing."""
        return self._deadline if self.active else None

    @property
    def is_late(self) -> bool:
        """Whether an attempt is due to end."""
        return self.active and self._clock() >= self._deadline

    @property
    def is_exhausted(self) -> bool:
        """Whether no further attempt is worth it."""
        return self.attempts >= MAX_ATTEMPTS

    @property
    def waiting(self) -> int:
        """How many live batches wait."""
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether more batches wait than allowed."""
        return len(self._waiting) > MAX_PENDING

    def start(self) -> None:
        """Begin to ask for what is missing; ``ask`` for it."""
        self.active = True
        self.attempts = 0

    def ask(self, first: int) -> None:
        """Ask for everything from number ``first`` on."""
        self.attempts += 1
        self.requests += 1
        self.goes_on()
        if self.socket is None:
            self.socket = self._connected()
        with contextlib.suppress(zmq.Again):  # nobody there: the deadline counts it as an attempt
            self.socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)

    def goes_on(self) -> None:
        """Note that something came: the attempt's time starts again."""
        self._deadline = self._clock() + self._timeout_s

    def read(self, limit: int) -> Iterator[list[bytes]]:
        """Frames that have arrived, ``limit`` messages at most, while this socket is open."""
        socket = self.socket
        for _ in range(limit):
            if socket is None or self.socket is not socket:
                return
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def hold(self, seq: int, events: list[KvEvent]) -> None:
        """Keep a live batch until the gap is filled."""
        self._waiting[seq] = events

    def release(self, seq: int) -> list[KvEvent] | None:
        """The batch of this number, if it waits."""
        return self._waiting.pop(seq, None)

    def drop_before(self, seq: int) -> None:
        """Forget batches whose turn has passed."""
        for held in [each for each in self._waiting if each < seq]:
            del self._waiting[held]

    def end(self) -> None:
        """Note that the gap is filled, or need not be."""
        self.active = False

    def give_up(self) -> dict[int, list[KvEvent]]:
        """Leave the gap; returns the batches that waited."""
        held, self._waiting = self._waiting, {}
        self.close()
        return held

    def reset(self) -> None:
        """Start again for another run of the publisher: nothing is missing."""
        self._waiting = {}
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self.active = False
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = None

    def _connected(self) -> zmq.Socket[bytes]:
        socket = new_socket(self._context, zmq.DEALER, 2 * MAX_PENDING)
        socket.connect(self._endpoint or "")
        return socket


def is_end(frames: list[bytes]) -> bool:
    """Whether a replayed message says that it is the last; it does not say that all came."""
    return len(frames) in (3, 4) and frames[-2] == _END


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, hwm: int) -> zmq.Socket[bytes]:
    """A socket that holds so many messages, of a bounded size each."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket
