"""``Outbox``: queues an engine's events without ever making the engine wait."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import zmq
from msgspec.structs import replace

from ...graph.wire import frames as wire
from ...graph.wire.events import AnyEvent, Event, RequestFinished, RequestStarted
from ..threads import Once

_KEY: Final = 8  # bytes


def as_tip(event: AnyEvent) -> AnyEvent:
    """Shorten a request's start or end to the last key of its chain; return other events unchanged.

    A start keeps the last block that the prefix cache holds; later blocks are reported when stored.
    An end keeps its last block. A start with stated layers stays whole, since some may be
    protected, but inferred layers are left out.
    """
    if isinstance(event, RequestStarted):
        if any(segment.authority for segment in event.segments):
            return event
        return _cut(replace(event, segments=()), event.cached_tokens // event.block_size)
    if isinstance(event, RequestFinished):
        return _cut(event, len(event.hashes) // _KEY)
    return event


def _cut(event: RequestStarted | RequestFinished, blocks: int) -> AnyEvent:
    """Keep only the last of the first ``blocks`` of a chain."""
    first = max(0, blocks - 1)
    tip = event.hashes[_KEY * first : _KEY * blocks]
    whole: dict[str, Any] = {"hashes": tip, "skipped": event.skipped + first if tip else 0}
    if isinstance(event, RequestStarted):
        whole["contents"] = b""
    return replace(event, **whole)


logger = logging.getLogger(__name__)


class Later(Protocol):
    """An item in the queue that becomes events on the sending thread, because making them would
    take an engine's thread too long. The events are sent at its place in the queue.
    """

    def events(self) -> Sequence[AnyEvent]:
        """Return the events; if it raises, they are lost."""


class LateEvents(NamedTuple):
    """A ``Later`` whose events a function makes."""

    events: Callable[[], Sequence[AnyEvent]]


class Outbox:
    """A bounded queue of events: engines ``emit``; the sending thread calls all else."""

    def __init__(self, limit: int, batch_limit: int) -> None:
        # Entries that were never sent: the queue was full, or no sidecar was there.
        self.dropped = 0
        self._most = self._limit = limit  # 0 while no sidecar is connected
        self._batch_limit = batch_limit
        self._queue: deque[AnyEvent | Later] = deque()
        self._once = Once(logger)
        self.batches = 0  # numbers used: batches that were sent, or dropped with their number
        self._dropped_reported = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[AnyEvent]:
        return iter(self._whole(list(self._queue)))

    def emit(self, event: AnyEvent | Later) -> None:
        """Queue ``event``, or drop and count it: never waits, never raises."""
        if len(self._queue) < self._limit:
            self._queue.append(event)
        else:
            self.dropped += 1

    @property
    def is_open(self) -> bool:
        return self._limit > 0

    def open(self, limit: int | None = None) -> None:
        """Queue events from now on, at most ``limit``."""
        self._limit = self._most = limit or self._most

    def shut(self) -> None:
        self._limit = 0
        while count := min(len(self._queue), self._batch_limit):
            for _ in range(count):
                self._queue.popleft()
            self.dropped += count
            time.sleep(0)  # a long loop would keep Python's lock from the engine's step

    def take_all(self) -> list[AnyEvent]:
        return self._whole([self._queue.popleft() for _ in range(len(self._queue))])

    def drain(self, socket: zmq.Socket[bytes], tips: bool = False) -> bool:
        """Send what is queued now, requests by their last key (``tips``) or whole. Returns whether
        all was sent. Events that engine threads add meanwhile wait for the next call.
        """
        queue, remaining = self._queue, len(self._queue)
        while remaining > 0 and socket.poll(0, zmq.POLLOUT):
            batch = [queue.popleft() for _ in range(min(remaining, self._batch_limit))]
            remaining -= len(batch)
            events = self._whole(batch)
            events = list(map(as_tip, events)) if tips else events
            if not self._send_while_there_is_room(socket, events):
                return False
        return remaining <= 0

    def _send_while_there_is_room(self, socket: zmq.Socket[bytes], events: list[AnyEvent]) -> bool:
        """Send ``events``, taken from the queue; those that find no room go back."""
        for first in range(0, len(events), self._batch_limit):
            if not socket.poll(0, zmq.POLLOUT):
                self._queue.extendleft(reversed(events[first:]))
                return False
            self.send(socket, events[first : first + self._batch_limit])
        return True

    def send_all(self, socket: zmq.Socket[bytes], events: list[AnyEvent]) -> None:
        """Send ``events`` at once, bypassing the queue, in as many batches as they need."""
        for first in range(0, len(events), self._batch_limit):
            self.send(socket, events[first : first + self._batch_limit])

    def send(self, socket: zmq.Socket[bytes], events: list[AnyEvent]) -> bool:
        """Send one batch; a batch that cannot be sent is dropped with its number."""
        try:
            socket.send_multipart(self.frames(events), zmq.NOBLOCK)
        except zmq.Again:
            self.dropped += len(events)
            return False
        except (TypeError, ValueError, OverflowError) as error:
            self.dropped += len(events)
            self._once.warn("encode", "kvgraph: a batch of events could not be encoded: %s", error)
            return False
        return True

    def frames(self, events: list[AnyEvent]) -> list[bytes]:
        """Encode ``events`` as a batch with the next number; after drops, one number is skipped.

        The gap in the numbers tells the sidecar that it missed events.
        Raises TypeError, ValueError or OverflowError.
        """
        if self.dropped != self._dropped_reported:
            self._dropped_reported = self.dropped
            self.batches += 1
        number, self.batches = self.batches, self.batches + 1
        return wire.encode_events(number, events)

    def _whole(self, queued: Sequence[AnyEvent | Later]) -> list[AnyEvent]:
        """Yield the events of entries; one that cannot be made counts as dropped, as a gap."""
        events: list[AnyEvent] = []
        for each in queued:
            if isinstance(each, Event):
                events.append(each)
                continue
            try:
                events += each.events()
            except Exception as error:  # the error's text may quote a prompt
                self.dropped += 1
                lost = "kvgraph: events could not be made, and are lost: %s"
                self._once.warn("make", lost, type(error).__name__)
            time.sleep(0)
        return events
