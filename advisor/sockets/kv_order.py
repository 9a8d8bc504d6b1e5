"""Puts one publisher's KV-event batches in order, and requests missing ones again."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import zmq

from ...graph.wire.frames import MAX_FRAME_BYTES
from ...graph.wire.kv_events import KvEvent, KvEventDecoder
from ..process.process import RateLimitedLog
from .subscriber import Arrival, SequenceTracker

MAX_ATTEMPTS: Final = 5  # per gap; chosen
REPLAY_TIMEOUT_S: Final = 0.5  # chosen
MAX_PENDING: Final = 10_000  # live batches that wait for a replay; chosen
_END: Final = (-1).to_bytes(8, "big", signed=True)


class KvReplay:
    """Requests one gap at a time from a publisher's replay socket, a few times.

    It does not know the order of batches: ``KvOrder`` says what is missing, and holds live batches
    meanwhile. An attempt ends after ``timeout_s`` without a message.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str | None,
        clock: Callable[[], float],
        timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._context = context
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self.endpoint = endpoint  # None: the publisher has none, and nothing is requested
        self.socket: zmq.Socket[bytes] | None = None
        self.active = False  # a gap is being filled
        self.attempts = 0  # for the present gap
        self.requests = 0  # all so far

    @property
    def deadline(self) -> float | None:
        """Time at which the present attempt ends; None without a gap."""
        return self._deadline if self.active else None

    @property
    def is_late(self) -> bool:
        return self.active and self._clock() >= self._deadline

    def ask(self, first: int) -> None:
        """Request everything from number ``first`` on."""
        self.attempts += 1
        self.requests += 1
        self.restart_timeout()
        if self.socket is None:
            self.socket = new_socket(self._context, zmq.DEALER, 2 * MAX_PENDING)
            self.socket.connect(self.endpoint or "")
        with contextlib.suppress(zmq.Again):  # nobody there: the deadline counts it as an attempt
            self.socket.send_multipart([b"", first.to_bytes(8, "big")], zmq.NOBLOCK)

    def restart_timeout(self) -> None:
        self._deadline = self._clock() + self._timeout_s

    def read(self, limit: int) -> Iterator[list[bytes]]:
        """Yield the frames of up to ``limit`` messages that arrived, while the socket is open."""
        socket = self.socket
        for _ in range(limit):
            if socket is None or self.socket is not socket:
                return
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def close(self) -> None:
        self.active = False
        if self.socket is not None:
            self.socket.close(linger=0)
        self.socket = None


def is_end(frames: list[bytes]) -> bool:
    """Return whether a replayed message is END, which does not prove that all batches came."""
    return len(frames) in (3, 4) and frames[-2] == _END


def new_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, hwm: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


logger = logging.getLogger(__name__)

Batch = list[KvEvent] | None  # a publisher's events; None: forget the engine's residency


class SourceState(StrEnum):
    """How much of an observed engine's residency is known."""

    WAITING = "waiting"  # not connected
    FOLLOWING = "synced"
    REPLAYING = "replaying"  # a gap is being filled; live batches wait
    PARTIAL = "partial"  # joined late, or events were left out: partly unknown
    DEGRADED = "degraded"  # a gap could not be filled


@dataclass(slots=True)
class PublisherRun:
    known: SourceState  # how much of the publisher's run was seen
    joining: bool = True  # whether no batch of it was applied yet
    first: bytes | None = None  # digest of its batch 0, if that was seen
    topic: bytes | None = None  # of its first message
    decoder: KvEventDecoder = field(default_factory=KvEventDecoder)


class KvOrder:
    """Follows a publisher's sequence numbers, and decides what happens to each batch. It opens no
    socket: ``replay`` requests missing batches. Its owner shares ``counters``.
    """

    def __init__(
        self, name: str, replay: KvReplay, counters: Counter[str], clock: Callable[[], float]
    ) -> None:
        self.sequence = SequenceTracker()
        self.life = PublisherRun(SourceState.WAITING)
        self._name = name
        self._replay = replay
        self._waiting: dict[int, list[KvEvent]] = {}  # live batches, until the gap is filled
        self._counters = counters
        self._log = RateLimitedLog(logger, clock)

    @property
    def state(self) -> SourceState:
        """How much of the engine's residency is known now."""
        return SourceState.REPLAYING if self._replay.active else self.life.known

    def begin(self, known: SourceState) -> None:
        """Start over: the publisher was restarted."""
        self.life = PublisherRun(known)
        self.sequence.expected = 0
        self._waiting = {}
        self._replay.close()

    def connected(self) -> None:
        """Note a new connection; batches from before it are missing."""
        if self.life.known is SourceState.WAITING:
            logger.info("watching KV events at %s", self._name)
            self.life.known = SourceState.FOLLOWING
            if self._replay.endpoint is not None:
                self._start_replay()

    def take_first(self, digest: bytes) -> Iterator[Batch]:
        """Take a batch 0; if its content has changed, the publisher was restarted unnoticed."""
        known = self.life.first
        if known != digest and (known is not None or self._expected > 0):
            self._counters["kv_restarts"] += 1
            self.begin(SourceState.FOLLOWING)
            yield None
        self.life.first = digest

    def take_live(self, seq: int, events: list[KvEvent]) -> Iterator[Batch]:
        if self._replay.active:
            yield from self._hold(seq, events)
        elif self.sequence.classify(seq) is Arrival.GAP:
            yield from self._fill_gap(seq, events)
        elif self.sequence.accept(seq) is Arrival.NEXT:
            self.life.joining = False
            yield events

    def left_out(self) -> None:
        """Note that an event about the engine's pool may have been skipped."""
        if self.life.known is SourceState.FOLLOWING:
            self.life.known = SourceState.PARTIAL

    def wants(self, seq: int) -> bool:
        """Return whether a replayed batch is next; others are known, or for the next attempt."""
        return self.sequence.classify(seq) is Arrival.NEXT

    def take_replayed(self, seq: int, events: list[KvEvent]) -> Iterator[Batch]:
        self.life.joining = False
        self.sequence.accept(seq)
        self._replay.restart_timeout()
        yield events
        yield from self._flush()

    @property
    def _expected(self) -> int:
        return self.sequence.expected or 0

    def _fill_gap(self, seq: int, events: list[KvEvent]) -> Iterator[Batch]:
        self._counters["kv_gaps"] += 1
        if self._replay.endpoint is not None:
            self._waiting[seq] = events
            self.sequence.gaps += 1
            self._start_replay()
            return
        late = self.life.joining
        self.sequence.accept(seq)
        self.life.joining = False
        self._lose(SourceState.PARTIAL if late else SourceState.DEGRADED, "no replay endpoint")
        yield None
        yield events

    def _hold(self, seq: int, events: list[KvEvent]) -> Iterator[Batch]:
        if self.sequence.classify(seq) is Arrival.DUPLICATE:
            self.sequence.duplicates += 1
            return
        self._waiting[seq] = events
        yield from self._flush()
        if len(self._waiting) > MAX_PENDING:
            yield from self._give_up("too much arrived meanwhile")

    def _start_replay(self) -> None:
        self._replay.active, self._replay.attempts = True, 0
        self._ask()

    def _ask(self) -> None:
        self._counters["kv_replays"] += 1
        self._replay.ask(self._expected)

    def skip_lost_beginning(self, seq: int) -> None:
        """Take the first replayed number as the start, if the publisher dropped older batches."""
        if seq == 0 or not self.life.joining or self._expected > 0:
            return
        self.sequence.expected = seq
        self._waiting = {number: held for number, held in self._waiting.items() if number > seq}
        self.life.joining = False
        self.life.known = SourceState.PARTIAL
        self._counters["kv_joined_late"] += 1

    def end_of_replay(self) -> Iterator[Batch]:
        """Handle the publisher's END marker."""
        if not self._replay.active:
            return  # END of an attempt whose gap was filled before it ended
        if not self._waiting:
            self.life.joining = False
            self._replay.active = False
            return
        yield from self.next_attempt("holes in the replay")

    def next_attempt(self, why: str) -> Iterator[Batch]:
        """Request the gap once more, or give up."""
        if self._replay.attempts >= MAX_ATTEMPTS:
            yield from self._give_up(why)
        else:
            self._ask()

    def _flush(self) -> Iterator[Batch]:
        """Apply waiting batches that are next; the gap is filled once none is left."""
        while (events := self._waiting.pop(self._expected, None)) is not None:
            self.sequence.accept(self._expected)
            yield events
        if not self._waiting and not self.life.joining:
            self._replay.active = False

    def _give_up(self, why: str) -> Iterator[Batch]:
        """Abandon the gap: forget the residency, and continue from the newest contiguous run."""
        self._lose(SourceState.DEGRADED, why)
        self._counters["kv_replays_failed"] += 1
        held, self._waiting = self._waiting, {}
        self._replay.close()
        run = sorted(held)
        start = max((seq for seq in run if seq - 1 not in held), default=self._expected)
        self.sequence.missed += max(0, start - self._expected)
        self.sequence.expected = max([start, *(seq + 1 for seq in run)])
        self.life.joining = False
        yield None
        for seq in run:
            if seq >= start:
                yield held[seq]

    def _lose(self, state: SourceState, why: str) -> None:
        self.life.known = state
        self._log.warn(
            "lost",
            "KV events of %s were lost (%s): its picture is %s",
            self._name,
            why,
            state.value,
        )
