"""The link between an engine and its sidecar.

``Link`` opens the socket with what opens the sidecar's endpoint; ``Standing`` knows whether a
sidecar answers.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import zmq

from ...graph.ipc.wake import Wake
from ...graph.messages import wire
from ..access import Access
from ..once import Once
from .mailbox import Clock

if TYPE_CHECKING:
    from ..client import ClientOptions

logger = logging.getLogger(__name__)

ADVICE_PER_TICK: Final = 64  # messages that may wait, and are read at once; chosen
_ASK_AGAIN_S: Final = 1.0  # seconds between two looks for a new token; chosen
_ABSENT: Final = (
    "kvgraph: no sidecar answers at %s; until one is there the engine evicts as stock vLLM does, "
    "but for what its callers protect"
)
_REFUSED: Final = (
    "kvgraph: the sidecar at %s refuses this engine: %s; it evicts as stock vLLM does, but for "
    "what its callers protect"
)


class Link:
    """Opens sockets to one sidecar, and knows when another one is due.

    Args:
        endpoint: The sidecar's ROUTER, ``ipc://…`` or ``tcp://host:port``.
        identity: The engine's identity, on every socket.
        send_hwm: Frames that ZeroMQ may hold for a slow sidecar.

    Raises:
        ConfigError: The keys that the environment names cannot be used.
    """

    def __init__(self, endpoint: str, identity: bytes, send_hwm: int) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._send_hwm = send_hwm
        self._access = Access(endpoint)
        self._token_checked = float("-inf")

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """Open a socket that presents what opens the endpoint now; the caller closes it."""
        socket = context.socket(zmq.DEALER)
        try:
            self._set_up(socket)
            self._access.present(socket)
            socket.connect(self._endpoint)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket

    def is_outdated(self, now: float) -> bool:
        """Whether another socket may be let in where this one is not: the sidecar's token has
        changed, because it was restarted, or there are keys.

        Asked while no sidecar is reachable; looks at most once per second, and notes the time.
        """
        if not self._access.may_change or now - self._token_checked < _ASK_AGAIN_S:
            return False
        self._token_checked = now
        return self._access.has_changed()

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


class Standing:
    """Remembers when a sidecar last answered, and logs when that changes.

    Args:
        endpoint: The sidecar's endpoint, for the log.
        options: After how long a sidecar counts as absent or silent, or may be asked again.
        clock: Monotonic seconds.

    Attributes:
        linked: Whether a sidecar answers.
    """

    def __init__(self, endpoint: str, options: ClientOptions, clock: Clock) -> None:
        self.linked = False
        self._endpoint = endpoint
        self._options = options
        self._clock = clock
        self._once = Once(logger)
        self._refused_until = float("-inf")
        self._last_reachable = self._last_advice = clock()

    def reached(self, now: float) -> None:
        """Note that a sidecar takes messages."""
        self._last_reachable = now

    def is_absent(self, now: float) -> bool:
        """Whether no sidecar has taken messages for so long that none is expected."""
        return now - self._last_reachable >= self._options.absent_s

    def heard(self) -> None:
        """Note that the sidecar sent a message."""
        self._last_advice = self._clock()
        if not self.linked:
            self.linked = True
            self._once.again("absent")
            logger.info("kvgraph: engine linked to the sidecar at %s", self._endpoint)

    def refused(self, reason: str) -> None:
        """Note that the sidecar refuses this engine: pause before asking again."""
        self._refused_until = self._last_advice = self._clock() + self._options.refused_s
        self.linked = False
        self._once.warn("refused", _REFUSED, self._endpoint, reason)

    def refused_s(self, now: float) -> float:
        """Seconds until a sidecar that refused this engine is asked again; 0 or less: now."""
        return self._refused_until - now

    def warn_if_silent(self, now: float) -> None:
        """Log once if no message came for long."""
        if now - self._last_advice > self._options.silent_s:
            self.linked = False
            self._once.warn("absent", _ABSENT, self._endpoint)


def wait_for_advice(
    socket: zmq.Socket[bytes], wake: Wake, seconds: float, or_room: bool = False
) -> bool:
    """Sleep so many seconds, or until advice arrives or ``wake`` is set; returns whether advice
    arrived.

    Args:
        or_room: Also wake as soon as a sidecar takes messages.
    """
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN | zmq.POLLOUT if or_room else zmq.POLLIN)
    poller.register(wake.fd, zmq.POLLIN)
    ready = dict(poller.poll(round(seconds * 1000)))
    if wake.fd in ready:
        wake.clear()
    return bool(ready.get(socket, 0) & zmq.POLLIN)
