"""Receives engines' batches, follows their sequence numbers, and requests resyncs."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

import zmq
from cachetools import TTLCache

from ...graph.errors import VersionError, WireError
from ...graph.types import MAX_ENGINES
from ...graph.wire import frames as wire
from ...graph.wire.events import (
    AnyEvent,
    BlockHashing,
    BlocksResident,
    EngineHello,
    disagreements,
    hashing_of,
)
from ...graph.wire.frames import EventMessage
from ..process.process import RateLimitedLog


class Arrival(Enum):
    """How a sequence number relates to the expected one."""

    NEXT = "next"
    DUPLICATE = "duplicate"  # or reordered: its number has passed
    GAP = "gap"  # at least one earlier number never arrived


class SequenceTracker:
    """Follows one publisher's sequence numbers, which rise by one with each batch."""

    __slots__ = ("duplicates", "expected", "gaps", "missed")

    def __init__(self, expected: int | None = 0) -> None:
        self.expected = expected  # the next number; None accepts any
        self.gaps = 0  # how often numbers were missing …
        self.missed = 0  # … and how many
        self.duplicates = 0  # repeated, or too late

    def classify(self, seq: int) -> Arrival:
        if self.expected is None or seq == self.expected:
            return Arrival.NEXT
        return Arrival.DUPLICATE if seq < self.expected else Arrival.GAP

    def accept(self, seq: int) -> Arrival:
        """Take ``seq``: count gaps and duplicates, and expect the number after it."""
        arrival = self.classify(seq)
        if arrival is Arrival.DUPLICATE:
            self.duplicates += 1
            return arrival
        if arrival is Arrival.GAP:
            self.gaps += 1
            self.missed += seq - (self.expected or 0)
        self.expected = seq + 1
        return arrival


RESYNC_EVERY_S: Final = 0.5  # least seconds between two requests; chosen
_PATIENT_RESYNCS: Final = 4  # after this many without success, pauses double; chosen
_LONGEST_PAUSE_S: Final = 30.0
_REST: Final = 10.0  # seconds between two listings, per second that the last one took; chosen
_STEADY_S: Final = 10.0  # synced for this long, the next loss counts as chance; chosen
_UNKNOWN: Final = 256  # identities whose last answer is remembered; chosen
_LOST: Final = 16  # most recently lost engines that are remembered; chosen
_LAST_LOOK_MS: Final = 50  # last check for messages before an engine is called silent; chosen


@dataclass(slots=True)
class Peer:
    identity: bytes
    hello: EngineHello
    last_seen: float  # time when its last new batch arrived
    sequence: SequenceTracker = field(default_factory=SequenceTracker)
    synced: bool = False  # whether its residency is known completely; otherwise it gets no advice
    heard: int = 0  # batches that the graph has processed, lost ones included
    last_resync: float = float("-inf")
    resyncs: int = 0
    fruitless: int = 0  # resyncs since it was last synced for a while
    listed: float = float("-inf")  # time when its last list of blocks was applied
    listing_s: float = 0.0  # how long that took
    engine: str = field(init=False)  # see `engine_id`

    def __post_init__(self) -> None:
        self.engine = engine_id(self.identity)

    @property
    def hashing(self) -> BlockHashing:
        return BlockHashing(self.hello.engine, self.hello.model, hashing_of(self.hello))

    @property
    def resync_pause_s(self) -> float:
        """Seconds until the next resync request: longer if earlier ones failed or cost much."""
        doubled = min(max(0, self.fruitless - _PATIENT_RESYNCS), 10)
        pause_s = max(RESYNC_EVERY_S * 2**doubled, _REST * self.listing_s)
        return float(min(pause_s, _LONGEST_PAUSE_S))

    def lost_step(self, now: float) -> None:
        if self.synced and now - self.listed >= _STEADY_S:
            self.fruitless = 0
        self.synced = False


def engine_id(identity: bytes) -> str:
    """Return an engine's public id, derived from its socket identity, which must stay secret: with
    the identity, others could impersonate the engine.
    """
    return hashlib.blake2b(identity, digest_size=8, person=b"kvgraph engine").hexdigest()


logger = logging.getLogger(__name__)

Send = Callable[[bytes, str], None]


class ReceivedBatch(NamedTuple):
    engine: str
    events: list[AnyEvent]
    batches: int  # number of batches that the engine has sent, including this one


class EventSubscriber:
    """Receives the ROUTER's messages as events by engine.

    Malformed messages are dropped and counted. An engine whose batch comes before its hello, or
    after a gap, is asked to send its hello and list its blocks again. Beyond ``capacity`` engines,
    others are refused.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        request_resync: Send,
        refuse: Send,
        clock: Callable[[], float],
        *,
        engine_timeout_s: float,
        capacity: int = MAX_ENGINES,
    ) -> None:
        self._socket = socket
        self._request_resync, self._refuse = request_resync, refuse
        self._clock = clock
        self._timeout_s = engine_timeout_s
        self._capacity = capacity
        self._log = RateLimitedLog(logger, clock)
        # Unknown senders that were just answered, and must wait for the next answer.
        self.answered: TTLCache[bytes, bool] = TTLCache(_UNKNOWN, RESYNC_EVERY_S, timer=clock)
        self._peers: dict[bytes, Peer] = {}
        self._by_engine: dict[str, Peer] = {}  # the same
        self._emptied_at: float | None = None  # when the socket was last read empty
        # Silent engines by identity: since when, while others were still heard.
        self._doubted: dict[bytes, float] = {}
        self.counters: Counter[str] = Counter()
        # Set under overload: resyncs wait, since a list of all blocks would cost more events.
        self.is_patient = False
        # When engines went that did not return, by their own names.
        self._lost: dict[str, float] = {}

    @property
    def peers(self) -> list[Peer]:
        """Return a copy of the known engines; callable from any thread."""
        return list(self._peers.copy().values())

    def lost(self) -> dict[str, float]:
        """Engine → seconds since it disconnected or timed out; callable from any thread."""
        now = self._clock()
        return {name: now - at for name, at in self._lost.copy().items()}

    def receive(self, limit: int, seconds: float = float("inf")) -> Iterator[ReceivedBatch]:
        """Yield events in order; reads at most ``limit`` messages, for at most ``seconds``."""
        self._emptied_at = None
        until = self._clock() + seconds
        for _ in range(limit):
            if self._clock() > until:
                return
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._emptied_at = self._clock()
                return
            events = self._take(identity, frames)
            if events:
                peer = self._peers[identity]
                yield ReceivedBatch(peer.engine, events, peer.sequence.expected or 0)

    def expire(self) -> list[str]:
        """Forget engines that have been silent for too long; returns their ids."""
        # Silence counts up to when the socket was last drained: after a stall of the sidecar, what
        # engines sent still waits there.
        if self._emptied_at is None:
            return []
        oldest = self._emptied_at - self._timeout_s
        gone = [peer for peer in self._peers.values() if peer.last_seen <= oldest]
        # A process that got no CPU for a while may run this thread before the one that reads what
        # arrived from the wire.
        doubted, self._doubted = self._doubted, {}
        if gone and self._socket.poll(_LAST_LOOK_MS):
            # Some engine may always be sending: what had arrived when one was first doubted has
            # been read once the socket was drained after that.
            now = self._clock()
            self._doubted = {peer.identity: doubted.get(peer.identity, now) for peer in gone}
            gone = [peer for peer in gone if self._doubted[peer.identity] < self._emptied_at]
        return self._forget(gone, "silent")

    def drop_disconnected(self, identities: set[bytes]) -> list[str]:
        """Forget engines whose connection is gone; returns their ids."""
        gone = [peer for peer in self._peers.values() if peer.identity in identities]
        return self._forget(gone, "gone")

    def may_answer(self, identity: bytes) -> bool:
        """Return whether an unknown sender is answered: not again at once; notes the answer."""
        if identity in self.answered:
            return False
        self.answered[identity] = True
        return True

    def _forget(self, gone: list[Peer], why: str) -> list[str]:
        for peer in gone:
            del self._peers[peer.identity], self._by_engine[peer.engine]
            logger.warning("engine %r is %s: its residency is forgotten", peer.hello.engine, why)
            self._lost.pop(peer.hello.engine, None)  # the last to go is the last
            self._lost[peer.hello.engine] = self._clock()
            if len(self._lost) > _LOST:
                del self._lost[next(iter(self._lost))]
        self.counters["engines_lost"] += len(gone)
        return [peer.engine for peer in gone]

    def next_expiry(self) -> float | None:
        """Return when the next engine times out if none sends anything; None without engines."""
        return min((p.last_seen + self._timeout_s for p in self._peers.values()), default=None)

    def peer(self, engine: str) -> Peer | None:
        return self._by_engine.get(engine)

    def withhold_advice(self, engine: str) -> None:
        """Withhold advice from ``engine``, whose residency is uncertain, and request a resync."""
        if (peer := self.peer(engine)) is not None:
            peer.synced = False
            self._resync(peer, "apply failed")

    def _take(self, identity: bytes, frames: list[bytes]) -> list[AnyEvent]:
        message = self._read(frames)
        if message is None:
            return []
        peer = self._peers.get(identity)
        return self._accept_peer(identity, message) if peer is None else self._follow(peer, message)

    def _read(self, frames: list[bytes]) -> EventMessage | None:
        """Decode a batch; count and log what is refused of it, by reason."""
        self.counters["messages"] += 1
        try:
            message = wire.decode_events(frames)
        except VersionError as error:
            self.counters["refused_version"] += 1
            self._log.once("version", "a message was refused: %s", error)
            return None
        except WireError as error:
            self.counters["refused_wire"] += 1
            self._log.warn("wire", "a message was refused: %s", error)
            return None
        self.counters["events"] += len(message.events)
        if message.unknown:
            self.counters["unknown_events"] += message.unknown
            self._log.once(
                "unknown", "an engine sends events of a kind that this build does not know: skipped"
            )
        if message.refused:
            self.counters["refused_wire"] += 1
            self._log.warn("event", "an event was refused: %s", message.refused)
        return message

    def _accept_peer(self, identity: bytes, message: EventMessage) -> list[AnyEvent]:
        """Take the first batch of an identity, which must contain a hello."""
        events = message.events
        start = next((i for i, event in enumerate(events) if isinstance(event, EngineHello)), None)
        if start is None:
            self.counters["batches_before_hello"] += 1
            if events and self.may_answer(identity):
                self.counters["resyncs"] += 1
                self._request_resync(identity, "unknown engine")
            return []
        if len(self._peers) >= self._capacity:
            self.counters["engines_refused"] += 1
            self._refuse_peer(identity)
            return []
        hello, now = events[start], self._clock()
        assert isinstance(hello, EngineHello)
        peer = Peer(identity, hello, now, SequenceTracker(message.seq + 1), last_resync=now)
        self._peers[identity] = self._by_engine[peer.engine] = peer
        self.answered.pop(identity, None)
        self._lost.pop(hello.engine, None)
        logger.info("engine %r connected (%r)", hello.engine, hello.version)
        alike = (each.hashing for each in self.peers if each.hello.model == hello.model)
        for said in disagreements(alike):
            self._log.warn("hashing", "%s", said)
        return self._graph_events(peer, message._replace(events=events[start:]))

    def _follow(self, peer: Peer, message: EventMessage) -> list[AnyEvent]:
        arrival = peer.sequence.accept(message.seq)
        if arrival is Arrival.DUPLICATE:
            self.counters["duplicates"] += 1
            return []
        if arrival is Arrival.GAP:
            self.counters["gaps"] += 1
            peer.lost_step(self._clock())
        peer.last_seen = self._clock()
        events = self._graph_events(peer, message)
        if not peer.synced:
            self._resync(peer, _REASONS.get((arrival, message.torn), "not in step"))
        return events

    def _graph_events(self, peer: Peer, message: EventMessage) -> list[AnyEvent]:
        """Handle a batch's hello and listing; returns the events for the graph."""
        events: list[AnyEvent] = []
        for event in message.events:
            if isinstance(event, EngineHello):
                peer.hello = event
            elif isinstance(event, BlocksResident):
                if self._is_excessive(peer, event):
                    peer.synced = False
                    continue
                peer.synced, peer.listed = True, self._clock()
            events.append(event)
        if message.torn:
            peer.synced = False
        return events

    def _is_excessive(self, peer: Peer, event: BlocksResident) -> bool:
        """Whether an engine lists more blocks than its pool has."""
        listed, most = len(event.hashes) // 8, peer.hello.num_blocks
        if listed <= most:
            return False
        self.counters["refused_listings"] += 1
        self._log.warn(
            "listing",
            "engine %r lists %d blocks of a pool of %d: refused",
            peer.hello.engine,
            listed,
            most,
        )
        return True

    def _resync(self, peer: Peer, reason: str) -> None:
        now = self._clock()
        if self.is_patient or now - peer.last_resync < peer.resync_pause_s:
            return
        peer.last_resync = now
        peer.resyncs += 1
        peer.fruitless += 1
        self.counters["resyncs"] += 1
        self._log.warn("resync", "engine %r is asked to resync: %s", peer.hello.engine, reason)
        self._request_resync(peer.identity, reason)

    def _refuse_peer(self, identity: bytes) -> None:
        self._log.warn("capacity", "an engine was refused: %d are served already", self._capacity)
        if self.may_answer(identity):
            self._refuse(
                identity,
                f"it serves {self._capacity} engines already; start another "
                "sidecar for this one (AITHER_KVCACHE_SIDECAR)",
            )


_REASONS = {
    (Arrival.GAP, False): "gap",
    (Arrival.GAP, True): "gap",
    (Arrival.NEXT, True): "refused",
}
