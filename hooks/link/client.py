"""``AdvisorClient``: sends events to the sidecar and receives its advice, on a thread of its own.

Engine threads touch this in two places only: ``emit`` (``link/outbox.py``) appends to a bounded
queue, and ``ranking`` (``link/mailbox.py``) reads one attribute and one clock. Everything that can
wait (sockets, encoding, scanning the pool for a resync) happens on the client's daemon thread.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from threading import Thread
from typing import Final, Protocol

import zmq

from ...graph.errors import VersionError, WireError
from ...graph.wire import frames as wire
from ...graph.wire.advice import AnyAdvice, Refused, ResyncRequest
from ...graph.wire.endpoints import Wake
from ...graph.wire.events import AnyEvent, BlocksResident, EngineHello
from ..access import EndpointAccess, why_absent
from ..threads import Once, shown
from .mailbox import Clock, Mailbox
from .outbox import Outbox

logger = logging.getLogger(__name__)

ADVICE_PER_TICK: Final = 64  # messages that may wait, and are read at once; chosen
_ASK_AGAIN_S: Final = 1.0  # seconds between two checks for a new token; chosen
_ABSENT: Final = (
    "kvgraph: no sidecar answers at %s%s; until one does, the engine evicts as stock vLLM does, "
    "except for what its callers protect"
)
_REFUSED: Final = (
    "kvgraph: the sidecar at %s refuses this engine: %s; it evicts as stock vLLM does, but for "
    "what its callers protect"
)


class SocketOpener:
    """Opens sockets to one sidecar's ROUTER, and tells when credentials have changed so that a new
    socket is needed. Raises ConfigError if the keys that the environment names cannot be used.
    """

    def __init__(self, endpoint: str, identity: bytes, send_hwm: int) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._send_hwm = send_hwm
        self._access = EndpointAccess(endpoint)
        self._token_checked = float("-inf")

    def open(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        """Open a socket with the present keys or token; the caller closes it."""
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
        """Return whether the token or keys have changed, so that a new socket may be accepted where
        the present one was refused. Called while no sidecar is reachable; checks at most once per
        second.
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


class LinkState:
    """Tracks whether a sidecar answers, and logs changes. A sidecar counts as absent after
    ``absent_s`` without a connection, and as silent after ``silent_s`` without a message. One that
    refused this engine is asked again after ``refused_s``.
    """

    def __init__(
        self, endpoint: str, absent_s: float, silent_s: float, refused_s: float, clock: Clock
    ) -> None:
        self.linked = False  # whether a sidecar answers
        self._endpoint = endpoint
        self._absent_s, self._silent_s, self._refused_s = absent_s, silent_s, refused_s
        self._clock = clock
        self._once = Once(logger)
        self._refused_until = float("-inf")
        self._last_reachable = self._last_advice = clock()

    def reached(self, now: float) -> None:
        self._last_reachable = now

    def is_absent(self, now: float) -> bool:
        """Return whether no sidecar has been reachable for so long that none is expected."""
        return now - self._last_reachable >= self._absent_s

    def heard(self) -> None:
        self._last_advice = self._clock()
        if not self.linked:
            self.linked = True
            self._once.again("absent")
            logger.info("kvgraph: engine linked to the sidecar at %s", self._endpoint)

    def refused(self, reason: str) -> None:
        """Note that the sidecar refused this engine, and pause before asking again."""
        self._refused_until = self._last_advice = self._clock() + self._refused_s
        self.linked = False
        self._once.warn("refused", _REFUSED, self._endpoint, reason)

    def refused_s(self, now: float) -> float:
        """Return the seconds until a sidecar that refused us is asked again; 0 or less: now."""
        return self._refused_until - now

    def warn_if_silent(self, now: float) -> None:
        if now - self._last_advice > self._silent_s:
            self.linked = False
            if not self._once.has_said("absent"):  # a hint takes a look at the disk
                self._once.warn("absent", _ABSENT, self._endpoint, why_absent(self._endpoint))


def wait_for_advice(
    socket: zmq.Socket[bytes], wake: Wake, seconds: float, or_room: bool = False
) -> bool:
    """Sleep until advice arrives, ``wake`` is set, a sidecar takes messages (only with
    ``or_room``), or ``seconds`` pass. Returns whether advice arrived.
    """
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN | zmq.POLLOUT if or_room else zmq.POLLIN)
    poller.register(wake.fd, zmq.POLLIN)
    ready = dict(poller.poll(round(seconds * 1000)))
    if wake.fd in ready:
        wake.clear()
    return bool(ready.get(socket, 0) & zmq.POLLIN)


class EngineEnd(Protocol):
    """The engine's methods that the client calls on its own thread."""

    def hello(self) -> EngineHello:
        """Return the engine's hello."""

    def resident(self) -> bytes:
        """Return every key in the prefix cache, packed; may be slow."""

    def copies(self) -> list[AnyEvent]:
        """Return ``BlocksSpilled`` for every copy in a colder tier."""

    def held(self) -> list[AnyEvent]:
        """Return ``RequestHeld`` for every request that waits for room."""

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        """Return the engine's load and what it did with the advice.

        Args:
            dropped: Events dropped so far.
        """


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Bounds and periods of an ``AdvisorClient``; times in seconds.

    All are chosen, unless a comment gives a reason.
    """

    queue_limit: int = 16_384  # events that wait to be sent
    batch_limit: int = 1_024  # events per frame
    send_hwm: int = 64  # frames that ZeroMQ may hold for a slow sidecar
    tick_s: float = 0.2
    alone_tick_s: float = 1.0  # while no sidecar is reachable; a connection wakes it at once
    heartbeat_s: float = 0.4  # under the 0.5 s that the sidecar is promised
    max_stale_s: float = 2.0
    protect_stale_s: float = 60.0  # how long protection outlives the sidecar's last message
    absent_s: float = 2.0  # without a connection; then no events are kept for the sidecar
    silent_s: float = 5.0  # seconds without advice before one warning
    resync_gap_s: float = 0.2  # the shortest time between two resyncs
    refused_s: float = 30.0  # pause after a sidecar refused us


class AdvisorClient(Mailbox):
    """Sends an engine's events to the sidecar and holds the latest advice.

    Args:
        endpoint: The sidecar's ROUTER, ``ipc://…`` or ``tcp://host:port``.
        engine: Supplies what a resync and heartbeats report.
        options: Bounds and periods.
        clock: Monotonic seconds.

    Attributes:
        outbox: The queue of events to be sent.
        standing: Whether a sidecar answers.
        garbage: Number of frames received that were not advice.
        refused_version, hellos: Number of frames in another protocol version, and of hellos sent.
        linked_since: Time in the clock's seconds; the sidecar may have missed earlier events.
    """

    def __init__(
        self,
        endpoint: str,
        engine: EngineEnd,
        options: ClientOptions | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.endpoint = endpoint
        self.options = options or ClientOptions()
        super().__init__(self.options.max_stale_s, self.options.protect_stale_s, clock)
        self.identity = os.urandom(16)
        self.outbox = Outbox(self.options.queue_limit, self.options.batch_limit)
        self.garbage = self.refused_version = self.hellos = 0
        self.linked_since = float("inf")
        self._engine = engine
        self._wake = Wake()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._listed = False
        self._once = Once(logger)
        waits = self.options.absent_s, self.options.silent_s, self.options.refused_s
        self.standing = LinkState(endpoint, *waits, clock)
        self._link = SocketOpener(endpoint, self.identity, self.options.send_hwm)
        self._last_greeting = self._last_heartbeat = float("-inf")

    @property
    def dropped(self) -> int:
        """Return how many events were never sent, because the queue was full or no sidecar was
        there.
        """
        return self.outbox.dropped

    def emit(self, event: AnyEvent) -> None:
        """Queue ``event``, or drop and count it: never waits, never raises."""
        self.outbox.emit(event)

    def nudge(self) -> None:
        """Wake the thread to send what is queued now; costs one write to a pipe, never waits.

        Does nothing without a sidecar: no ranking would come, and the write would hand Python's
        lock to the woken thread.
        """
        if self.standing.linked:
            self._wake.set()

    def start(self) -> None:
        """Start the client's thread; a second call does nothing."""
        if self._thread is None:
            self._thread = Thread(target=shown(self._run), name="kvgraph-client", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop the thread and forget all advice; events that are still queued are dropped."""
        self._stop.set()
        self._wake.set()
        self.forget()
        self.wait(timeout_s)
        atexit.unregister(self.close)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the client's thread ends; returns whether it has ended, or never began."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    # The thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stop.is_set():
                self._use_socket(context)
        except Exception as error:
            ended = "kvgraph: the link to %s ended (%s); the engine goes on without advice"
            self._once.warn("thread", ended, self.endpoint, error)
        finally:
            self.forget()
            self.outbox.shut()
            context.term()
            self._wake.close()

    def _use_socket(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Use one socket, until the client stops or the sidecar has another token."""
        socket = self._link.open(context)
        try:
            while not self._stop.is_set() and not self._is_outdated():
                self._tick(socket)
        finally:
            socket.close(linger=0)

    def _is_outdated(self) -> bool:
        now = self._clock()
        return self.standing.is_absent(now) and self._link.is_outdated(now)

    def _tick(self, socket: zmq.Socket[bytes]) -> None:
        if self._sleep(socket):
            self._receive(socket)
        now = self._clock()
        if self.standing.refused_s(now) > 0:
            self._keep_nothing()
            return
        self.standing.warn_if_silent(now)
        if self._check_reachable(socket, now) and self._send_hello_if_due(socket, now):
            self._beat_if_due(socket, now)
            if self.outbox.drain(socket, self.wants_tips()):
                self.mark_sent(self.outbox.batches, until=now)

    def _check_reachable(self, socket: zmq.Socket[bytes], now: float) -> bool:
        """Check whether a sidecar takes messages; if it is long gone, keep nothing for it."""
        if socket.poll(0, zmq.POLLOUT):
            self.standing.reached(now)
            return True
        if self.standing.is_absent(now):
            self._keep_nothing()
        return False

    def _sleep(self, socket: zmq.Socket[bytes]) -> bool:
        """Sleep until a tick is over, a nudge, or advice; returns whether it was advice."""
        if self.outbox.is_open:
            return wait_for_advice(socket, self._wake, self.options.tick_s)
        refused_s = self.standing.refused_s(self._clock())
        if refused_s > 0:
            return wait_for_advice(socket, self._wake, min(refused_s, self.options.alone_tick_s))
        return wait_for_advice(socket, self._wake, self.options.alone_tick_s, or_room=True)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(ADVICE_PER_TICK):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.take_advice(frames)

    def take_advice(self, frames: list[bytes]) -> None:
        """Handle one message of the sidecar; a malformed one is counted and ignored."""
        try:
            _, advice = wire.decode_advice(frames, self._clock())
            self._act_on(advice)
        except VersionError as error:
            self.refused_version += 1
            self._once.warn("version", "kvgraph: advice refused: %s", error)
        except (WireError, ValueError) as error:  # ValueError: keys that are not whole uint64s
            self.garbage += 1
            self._once.warn("garbage", "kvgraph: a frame that is not advice was ignored: %s", error)

    def _act_on(self, advice: AnyAdvice) -> None:
        if isinstance(advice, Refused):
            self.standing.refused(advice.reason)
            self.forget()
            return
        self.standing.heard()
        if isinstance(advice, ResyncRequest):
            self._listed = False
        else:
            self.put(advice)

    # Sending ------------------------------------------------------------------------------------

    def _keep_nothing(self) -> None:
        """Drop what is queued: a sidecar that comes back gets a hello and a full list."""
        self.outbox.shut()
        self._listed = False
        self.linked_since = float("inf")

    def _send_hello_if_due(self, socket: zmq.Socket[bytes], now: float) -> bool:
        if self._listed:
            return True
        if now - self._last_greeting < self.options.resync_gap_s:
            return False
        self.outbox.open()  # what changes while we list is told after it
        self._last_greeting = opened = self._clock()  # what came before may have been dropped
        hello, resident = self._engine.hello(), BlocksResident(self._engine.resident())
        self._listed = self.outbox.send(socket, [hello, resident, *self._engine.copies()])
        self.hellos += self._listed
        if self._listed:
            self.linked_since, self._tips_until = opened, -math.inf
            self.outbox.send_all(socket, self._engine.held())
        return self._listed

    def _beat_if_due(self, socket: zmq.Socket[bytes], now: float) -> None:
        if now - self._last_heartbeat >= self.options.heartbeat_s:
            self._last_heartbeat = now
            self.outbox.send(socket, self._engine.heartbeat(self.outbox.dropped))
