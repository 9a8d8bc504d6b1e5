"""Follows an engine without our hook through vLLM's own KV-event publisher.

The publisher's PUB socket sends ``[topic, seq, batch]``; a request ``[b"", first seq]`` to its
replay ROUTER returns ``[b"", topic, seq, batch]`` for each batch it still has, and an END marker of
sequence −1 (``vllm.distributed.kv_events``); older versions, and SGLang, omit the topic. That
ROUTER drops messages silently under load, and END proves nothing: only contiguous numbers do. A
publisher's events are therefore applied strictly in order, and if a batch cannot be recovered, the
engine's residency is forgotten.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...graph.errors import WireError
from ...graph.wire.events import AnyEvent
from ...graph.wire.frames import parse_seq
from ...graph.wire.kv_events import KvEvent
from ..config.sections import ObserveConfig
from ..process.process import RateLimitedLog
from .kv_order import (
    MAX_PENDING,
    REPLAY_TIMEOUT_S,
    Batch,
    KvOrder,
    KvReplay,
    SourceState,
    is_end,
    new_socket,
)
from .subscriber import SequenceTracker

_MONITORED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class KvSubscription:
    """A SUB socket and its connection state; for one thread only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topic: str) -> None:
        self._sub = new_socket(context, zmq.SUB, MAX_PENDING)
        self._sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._monitor = self._sub.get_monitor_socket(_MONITORED)
        self._sub.connect(endpoint)
        self.drained = False

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._sub, self._monitor]

    def read(self, limit: int) -> Iterator[list[bytes]]:
        """Yield the frames of up to ``limit`` batches; ``drained`` says whether these were all."""
        self.drained = False
        for _ in range(limit):
            try:
                frames = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self.drained = True
                return
            yield frames

    def changes(self) -> Iterator[bool]:
        """Connection changes in order: True if it was made, False if it was lost."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        self._sub.disable_monitor()
        self._monitor.close(linger=0)
        self._sub.close(linger=0)


logger = logging.getLogger(__name__)

Observed = list[AnyEvent] | None  # events to apply; None: forget the engine's residency


class KvEventSource:
    """One publisher's events, in order and without gaps.

    Args:
        context: Creates the sockets; only the thread that calls ``receive`` may use this object.
        config: The publisher's endpoint, and its replay endpoint if it has one.
        replay_timeout_s: A replay attempt ends after this many seconds without a message.
        engine: Its id in the graph; if empty, derived from the endpoint.

    Attributes:
        last_seen: Time of its last message; None before the first.
        last_left_out: Why the last skipped event was skipped; ``kv_left_out`` counts them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: ObserveConfig,
        clock: Callable[[], float],
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
        engine: str = "",
    ) -> None:
        self.engine = engine or config.engine
        self.config = config
        self.last_seen: float | None = None
        self.last_left_out = ""
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._log = RateLimitedLog(logger, clock)
        self._topic = config.topic.encode()
        self._live = KvSubscription(context, config.endpoint, config.topic)
        self._replay = KvReplay(context, config.replay_endpoint, clock, replay_timeout_s)
        self._order = KvOrder(config.endpoint, self._replay, self.counters, clock)

    @property
    def state(self) -> SourceState:
        """How much of the engine's residency is known."""
        return self._order.state

    @property
    def sequence(self) -> SequenceTracker:
        """The publisher's sequence numbers: gaps and missed batches."""
        return self._order.sequence

    @property
    def replays(self) -> int:
        """How many replays were requested."""
        return self._replay.requests

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll; they change when a replay or the publisher starts."""
        return [*self._live.sockets, *([self._replay.socket] if self._replay.socket else [])]

    @property
    def deadline(self) -> float | None:
        """Time at which ``receive`` should be called even if nothing arrives."""
        return self._replay.deadline

    def receive(self, limit: int, until: float = math.inf) -> Iterator[Observed]:
        """Return events to apply, from up to about ``limit`` batches that arrived.

        Once the clock has passed ``until``, no further batch is taken; the rest waits.
        """
        for batch in self._in_order(limit, until):
            decoder = self._order.life.decoder
            if batch is None:
                decoder.forget()
                yield None
            else:
                # Only in the publisher's order: what a batch means depends on those before it.
                events = decoder.translate(batch)
                self._note_left_out()
                yield events

    def _in_order(self, limit: int, until: float) -> Iterator[Batch]:
        for frames in self._replay.read(limit):
            yield from self._take_replayed(frames)
            if self._clock() > until:
                return
        # What the publisher sent before it went away is read before its going is noticed.
        for frames in self._live.read(limit):
            yield from self._take_live(frames)
            if self._clock() > until:
                return
        if self._live.drained:
            yield from self._follow_connection()
        if self._replay.is_late:
            yield from self._order.next_attempt("no answer")

    def lost_step(self) -> None:
        """Note that a received batch was not applied."""
        self._order.left_out()

    def close(self) -> None:
        self._live.close()
        self._replay.close()

    def _follow_connection(self) -> Iterator[Batch]:
        for stands in self._live.changes():
            if not stands:
                self.counters["kv_disconnects"] += 1
                logger.warning("KV-event publisher %s is gone", self.config.endpoint)
                self._order.begin(SourceState.WAITING)
                yield None
            else:
                self._order.connected()

    def _take_live(self, frames: list[bytes]) -> Iterator[Batch]:
        # ZeroMQ subscribes by prefix: `kv@pod-1` brings what `kv@pod-10` publishes, too.
        if self._topic and frames[0] != self._topic:
            self.counters["kv_other_topics"] += 1
            return
        life = self._order.life
        if not self._topic and life.topic not in (None, frames[0]):
            # Each topic is another publisher's, with numbers of its own.
            self.counters["kv_other_topics"] += 1
            self._leave_out("several topics are published here: sidecar.observe names one of them")
            return
        self.counters["kv_messages"] += 1
        self.last_seen = self._clock()
        try:
            seq, events = life.decoder.read(frames)
        except WireError as error:
            yield from self._refuse(error, frames, self._order.take_live)
            return
        if seq == 0:
            yield from self._order.take_first(_digest(frames[2]))
        self._order.life.topic = frames[0]
        yield from self._order.take_live(seq, events)

    def _take_replayed(self, frames: list[bytes]) -> Iterator[Batch]:
        if is_end(frames):
            yield from self._order.end_of_replay()
            return
        try:
            if len(frames) not in (3, 4):
                raise WireError(f"a replayed message has 3 or 4 frames, got {len(frames)}")
            *_, raw_seq, payload = frames
            seq = parse_seq(raw_seq)
            self._order.skip_lost_beginning(seq)
            if not self._order.wants(seq):
                return
            events = self._order.life.decoder.read_payload(payload)
        except WireError as error:
            yield from self._refuse(error, frames, self._order.take_replayed)
            return
        if seq == 0:
            self._order.life.first = _digest(payload)
        yield from self._order.take_replayed(seq, events)

    def _note_left_out(self) -> None:
        decoder = self._order.life.decoder
        if not decoder.left_out:
            return
        self.counters["kv_left_out"] += decoder.left_out
        self.last_left_out, decoder.left_out = decoder.last_left_out, 0
        if decoder.torn:
            self._order.left_out()
        self._log.warn("left_out", "a KV event was left out: %s", self.last_left_out)

    def _refuse(
        self,
        error: WireError,
        frames: list[bytes],
        take: Callable[[int, list[KvEvent]], Iterator[Batch]],
    ) -> Iterator[Batch]:
        """Leave a message out. Its number is not missing: a replay would bring the same message."""
        self.counters["kv_refused"] += 1
        self._leave_out(str(error))
        with contextlib.suppress(WireError, IndexError):
            if self._order.wants(seq := parse_seq(frames[-2])):
                yield from take(seq, [])

    def _leave_out(self, why: str) -> None:
        self.counters["kv_left_out"] += 1
        self.last_left_out = why
        self._log.warn("refused", "a KV-event message of %s was left out: %s", self.engine, why)
        self._order.left_out()


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
