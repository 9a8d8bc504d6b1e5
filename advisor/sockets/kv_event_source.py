"""Watches an engine without our hook, through vLLM's own KV-event publisher.

Its PUB socket gives ``[topic, seq, batch]``; a request ``[b"", first seq]`` to its replay ROUTER
gives ``[b"", topic, seq, batch]`` for what it still has, and an END marker of sequence −1
(``vllm.distributed.kv_events``). That ROUTER drops silently under load, and END proves nothing:
what counts is that the numbers are contiguous. Events of one publisher are therefore applied only
in their order, and if a batch cannot be had again, that engine's residency is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from enum import StrEnum
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...graph.errors import WireError
from ...graph.messages.events import AnyEvent
from ...graph.messages.kv_events import KvEventDecoder
from ...graph.messages.wire import MAX_FRAME_BYTES, parse_seq
from ..config.sections import ObserveConfig
from ..process.notices import Notices
from .sequence import Arrival, SequenceTracker

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 5
REPLAY_TIMEOUT_S: Final = 0.5
MAX_PENDING: Final = 10_000  # live batches that wait for a replay
_END: Final = (-1).to_bytes(8, "big", signed=True)
_MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

Observed = list[AnyEvent] | None
"""Events to apply, or None: forget everything that was known of this engine's residency."""


class SourceState(StrEnum):
    """How much of an observed engine's residency is known."""

    WAITING = "waiting"  # not connected
    FOLLOWING = "synced"
    REPLAYING = "replaying"  # a gap is being filled; live batches wait
    PARTIAL = "partial"  # it was joined late: what came before is unknown
    DEGRADED = "degraded"  # a gap could not be filled


class KvEventSource:
    """One publisher's events, in order and without holes.

    Args:
        context: Makes the sockets; only the thread that calls ``receive`` may use this object.
        config: Where the publisher is, and its replay socket if it has one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: ObserveConfig,
        clock: Callable[[], float],
    ) -> None:
        self.engine = config.engine
        self.config = config
        self.sequence = SequenceTracker()
        self.replays = 0
        self.last_seen: float | None = None
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._notices = Notices(logger, clock)
        self._context = context
        self._sub = self._open(zmq.SUB, MAX_PENDING)
        self._sub.setsockopt(zmq.SUBSCRIBE, config.topic.encode())
        self._monitor = self._sub.get_monitor_socket(_MONITORED)
        self._sub.connect(config.endpoint)
        self._replay: zmq.Socket[bytes] | None = None
        self._begin(SourceState.WAITING)

    @property
    def state(self) -> SourceState:
        """What a status page says of it."""
        return SourceState.REPLAYING if self._replaying else self._known

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll; changes when a replay starts or the publisher does."""
        return [self._sub, self._monitor, *([self._replay] if self._replay else [])]

    @property
    def deadline(self) -> float | None:
        """When ``receive`` should be called even if nothing arrived."""
        return self._deadline if self._replaying else None

    def receive(self, limit: int) -> Iterator[Observed]:
        """What has arrived, up to about ``limit`` batches, as it is to be applied."""
        if self._replay is not None:
            yield from self._read_replay(self._replay, limit)
        # What the publisher sent before it went away is read before its going is noticed.
        drained = yield from self._read_live(limit)
        if drained:
            yield from self._read_monitor()
        if self._replaying and self._clock() >= self._deadline:
            yield from self._next_attempt("no answer")

    def close(self) -> None:
        """Close the sockets."""
        self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._sub.close(linger=0)
        self._close_replay()

    # One publisher's life ---------------------------------------------------------------------

    def _begin(self, state: SourceState) -> None:
        """Start from nothing: a publisher numbers its batches from 0."""
        self._known = state
        self._replaying = False
        self._decoder = KvEventDecoder()
        self._first_digest: bytes | None = None
        self._pending: dict[int, list[AnyEvent]] = {}
        self._attempts = 0
        self._deadline = 0.0
        self._joining = True
        self.sequence.expected = 0
        self._close_replay()

    def _read_monitor(self) -> Iterator[Observed]:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.counters["kv_disconnects"] += 1
                logger.warning("KV-event publisher %s is gone", self.config.endpoint)
                self._begin(SourceState.WAITING)
                yield None
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._known is SourceState.WAITING:
                logger.info("watching KV events at %s", self.config.endpoint)
                self._known = SourceState.FOLLOWING
                if self.config.replay_endpoint:
                    self._start_replay()

    # Live batches -----------------------------------------------------------------------------

    def _read_live(self, limit: int) -> Generator[Observed, None, bool]:
        """Reads up to ``limit`` live batches; its value is whether that was all."""
        for _ in range(limit):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            yield from self._take_live(frames)
        return False

    def _take_live(self, frames: list[bytes]) -> Iterator[Observed]:
        self.counters["kv_messages"] += 1
        self.last_seen = self._clock()
        try:
            seq, events = self._decoder.decode(frames)
        except WireError as error:
            self._refuse(error)
            return
        if seq == 0 and self._is_another_start(frames[2]):
            yield None
        if self._replaying:
            yield from self._hold(seq, events)
        elif self.sequence.classify(seq) is Arrival.GAP:
            yield from self._fill_gap(seq, events)
        elif self.sequence.accept(seq) is Arrival.NEXT:
            self._joining = False
            yield events

    def _is_another_start(self, payload: bytes) -> bool:
        """A second batch 0 with other content: the publisher was restarted under our eyes."""
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        fresh = self._first_digest not in (None, digest) or (
            self._first_digest is None and (self.sequence.expected or 0) > 0
        )
        if fresh:
            self.counters["kv_restarts"] += 1
            self._begin(SourceState.FOLLOWING)
        self._first_digest = digest
        return fresh

    def _fill_gap(self, seq: int, events: list[AnyEvent]) -> Iterator[Observed]:
        self.counters["kv_gaps"] += 1
        if self.config.replay_endpoint:
            self._pending[seq] = events
            self.sequence.gaps += 1
            self._start_replay()
            return
        late = self._joining
        self.sequence.accept(seq)
        self._joining = False
        self._lose(SourceState.PARTIAL if late else SourceState.DEGRADED, "no replay endpoint")
        yield None
        yield events

    def _hold(self, seq: int, events: list[AnyEvent]) -> Iterator[Observed]:
        if self.sequence.classify(seq) is Arrival.DUPLICATE:
            self.sequence.duplicates += 1
            return
        self._pending[seq] = events
        yield from self._flush()
        if len(self._pending) > MAX_PENDING:
            yield from self._give_up("too much arrived meanwhile")

    # Replay -----------------------------------------------------------------------------------

    def _start_replay(self) -> None:
        self._replaying = True
        self._attempts = 0
        self._request()

    def _request(self) -> None:
        """Ask for everything from the first number that is missing."""
        self._attempts += 1
        self.replays += 1
        self.counters["kv_replays"] += 1
        self._deadline = self._clock() + REPLAY_TIMEOUT_S
        if self._replay is None:
            self._replay = self._open(zmq.DEALER, 2 * MAX_PENDING)
            self._replay.connect(self.config.replay_endpoint or "")
        start = (self.sequence.expected or 0).to_bytes(8, "big")
        with contextlib.suppress(zmq.Again):  # nobody there: the deadline counts it as an attempt
            self._replay.send_multipart([b"", start], zmq.NOBLOCK)

    def _read_replay(self, socket: zmq.Socket[bytes], limit: int) -> Iterator[Observed]:
        for _ in range(limit):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield from self._take_replayed(frames)
            if self._replay is not socket:
                return

    def _take_replayed(self, frames: list[bytes]) -> Iterator[Observed]:
        if len(frames) == 4 and frames[2] == _END:
            yield from self._end_of_replay()
            return
        try:
            if len(frames) != 4:
                raise WireError(f"a replayed message has 4 frames, got {len(frames)}")
            seq = parse_seq(frames[2])
            if self._joining and self.sequence.expected == 0 and seq > 0:
                self._skip_lost_beginning(seq)
            if self.sequence.classify(seq) is not Arrival.NEXT:
                return  # had it already, or a hole: the next attempt asks from there
            events = self._decoder.decode_payload(frames[3])
        except WireError as error:
            self._refuse(error)
            return
        if seq == 0:
            self._is_another_start(frames[3])
        self._joining = False
        self.sequence.accept(seq)
        self._deadline = self._clock() + REPLAY_TIMEOUT_S
        yield events
        yield from self._flush()

    def _skip_lost_beginning(self, seq: int) -> None:
        """We joined late and the publisher kept only its newest batches: known from here on."""
        self.sequence.expected = seq
        self._joining = False
        self._known = SourceState.PARTIAL
        self.counters["kv_joined_late"] += 1

    def _end_of_replay(self) -> Iterator[Observed]:
        if not self._replaying:
            return  # END of an attempt whose gap was filled before it ended
        if not self._pending:
            self._joining = self._replaying = False
            return
        yield from self._next_attempt("holes in the replay")

    def _next_attempt(self, why: str) -> Iterator[Observed]:
        if self._attempts < MAX_ATTEMPTS:
            self._request()
        else:
            yield from self._give_up(why)

    def _flush(self) -> Iterator[Observed]:
        """Apply held batches that are next now; the gap is filled once none is left."""
        while (events := self._pending.pop(self.sequence.expected or 0, None)) is not None:
            self.sequence.accept(self.sequence.expected or 0)
            yield events
        for seq in [held for held in self._pending if held < (self.sequence.expected or 0)]:
            del self._pending[seq]
        if not self._pending and not self._joining:
            self._replaying = False

    def _give_up(self, why: str) -> Iterator[Observed]:
        """The gap stays: forget what was known, and go on from the newest unbroken run."""
        self._lose(SourceState.DEGRADED, why)
        self.counters["kv_replays_failed"] += 1
        held, self._pending = self._pending, {}
        run = sorted(held)
        start = max((seq for seq in run if seq - 1 not in held), default=self.sequence.expected)
        self.sequence.missed += max(0, (start or 0) - (self.sequence.expected or 0))
        self.sequence.expected = max([start or 0, *(seq + 1 for seq in run)])
        self._joining = self._replaying = False
        self._close_replay()
        yield None
        for seq in run:
            if seq >= (start or 0):
                yield held[seq]

    def _lose(self, state: SourceState, why: str) -> None:
        self._known = state
        self._notices.warn(
            "lost", "KV events of %s were lost (%s): its picture is %s",
            self.config.endpoint, why, state.value,
        )  # fmt: skip

    def _refuse(self, error: WireError) -> None:
        self.counters["kv_refused"] += 1
        self._notices.warn("refused", "a KV-event message was refused: %s", error)

    def _open(self, kind: int, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        return socket

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
        self._replay = None
