"""``Intake``: receives what engines send, and applies it to the graph."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ..graph.errors import GraphError
from ..graph.kvcache_graph import KVCacheGraph
from ..graph.wire.events import AnyEvent, BlocksResident
from .planner import GraphEvictionAdvisor
from .process.process import RateLimitedLog
from .sockets.kv_events import KvEventSource
from .sockets.subscriber import EventSubscriber, ReceivedBatch

_OVER_S: Final = 5.0  # seconds over which the share is averaged; chosen
_TOO_BUSY: Final = 0.7  # a busier loop is overloaded, since bursts no longer fit; chosen
_EASED: Final = 0.4  # until its share is below this; chosen


class BusyMeter:
    """Measures which share of its time the sidecar's loop works."""

    def __init__(self, now: float) -> None:
        self.share = 0.0  # of the last seconds, spent working
        self.overloaded = False  # too busy, or was and has hardly eased since
        self.overloads = 0  # how often it became so
        self._last = now

    def worked(self, began: float, ended: float) -> None:
        """Note the work of one turn; the loop was waiting since the previous one."""
        span = ended - self._last
        if span <= 0.0:
            return
        self._last = ended
        kept = math.exp(-span / _OVER_S)
        self.share = kept * self.share + (1.0 - kept) * min(1.0, (ended - began) / span)
        if self.overloaded:
            self.overloaded = self.share > _EASED
        elif self.share > _TOO_BUSY:
            self.overloaded = True
            self.overloads += 1


logger = logging.getLogger(__name__)

Tap = Callable[[str, Sequence[AnyEvent]], None]

MESSAGES_A_TURN: Final = 256  # chosen
TURN_S: Final = 0.25  # of receiving and watching before advice is sent again; chosen
KEYS_AT_ONCE: Final = 1 << 16  # chosen
_BREATH_S: Final = 1e-4  # a pause, so that other threads get the graph's lock; chosen
_BREATHLESS_S: Final = 1e-3  # longest time without one between two engines' events; chosen
_AUDIT_EVERY_S: Final = 1.0  # chosen
_AUDIT_SLACK: Final = 1024  # blocks; chosen: some are leaving while others are reported stored


class Intake:
    """Receives events and applies them; the calling thread owns the sockets."""

    def __init__(
        self,
        graph: KVCacheGraph,
        subscriber: EventSubscriber,
        sources: Sequence[KvEventSource],
        planner: GraphEvictionAdvisor,
        tap: Tap | None,
        clock: Callable[[], float],
    ) -> None:
        self._graph = graph
        self._subscriber = subscriber
        self._sources = deque(sources)
        self._planner = planner
        self._tap = tap
        self._clock = clock
        self._log = RateLimitedLog(logger, clock)
        # `last_turn`: when everything that had arrived was last read.
        self._next_audit = self._woke = self.last_turn = clock()
        self.busy = BusyMeter(self.last_turn)
        self.counters: Counter[str] = Counter()

    def receive_and_apply(self) -> None:
        breathed = self._clock()
        for run in _joined(self._subscriber.receive(MESSAGES_A_TURN, TURN_S)):
            if not self._apply(run.engine, run.events, run.batches):
                self._subscriber.withhold_advice(run.engine)
            if self._clock() - breathed >= _BREATHLESS_S:
                time.sleep(_BREATH_S)
                breathed = self._clock()
        until = self._clock() + TURN_S
        for source in tuple(self._sources):
            if self._clock() > until:
                break
            self._sources.rotate(-1)  # who is left out now is the first next time
            try:
                self._watch(source, until)
            except Exception as error:  # this source has to resync; the others are not affected
                self.counters["watch_failed"] += 1
                self._log.failed("watch", f"{source.engine} could not be followed", error)
                source.lost_step()
                self._forget(source.engine)
        self.last_turn = self._clock()
        self.busy.worked(self._woke, self.last_turn)
        self._subscriber.is_patient = self.busy.overloaded

    def _watch(self, source: KvEventSource, until: float) -> None:
        for observed in source.receive(MESSAGES_A_TURN, until):
            if observed is None:
                self._forget(source.engine)
            elif not self._apply(source.engine, observed):
                source.lost_step()

    def woke(self) -> None:
        self._woke = self._clock()

    def seconds_to_wait(self, most: float) -> float:
        """Return the seconds until the next deadline, at most ``most``."""
        due = [self._subscriber.next_expiry(), *(source.deadline for source in self._sources)]
        soonest = min((each - self._clock() for each in due if each is not None), default=most)
        return min(max(soonest, 0.0), most)

    def forget_the_lost(self, unreachable: set[bytes]) -> None:
        lost = self._subscriber.drop_disconnected(unreachable)
        for engine in (*lost, *self._subscriber.expire()):
            self._forget(engine)
        self._audit()

    def _apply(self, engine: str, events: list[AnyEvent], batches: int = 0) -> bool:
        """Apply events; returns whether the graph took them. A refusal costs a resync."""
        began = self._clock()
        try:
            self._in_slices(self._graph.slices(engine, events))
        except GraphError as error:
            self.counters["apply_refused"] += 1
            self._log.warn("refused", "events were refused: %s", error)
        except Exception as error:
            self.counters["apply_failed"] += 1
            self._log.failed("failed", "events could not be applied", error)
        else:
            if (peer := self._subscriber.peer(engine)) is not None:
                peer.heard = batches
                if any(isinstance(event, BlocksResident) for event in events):
                    peer.listing_s = self._clock() - began
            self._notify(engine, events)
            return True
        return False

    def _notify(self, engine: str, events: list[AnyEvent]) -> None:
        try:
            self._planner.applied(engine)
            if self._tap is not None:
                self._tap(engine, events)
        except Exception as error:  # the graph has taken the events all the same
            self.counters["told_on_failed"] += 1
            self._log.failed("told_on", "applied events were not told on", error)

    def _in_slices(self, work: Iterator[None]) -> None:
        """Do all of ``work``, holding the graph's lock for one slice at a time."""
        while True:
            with self._graph.lock:
                over = next(work, True)
            if over:
                return
            time.sleep(_BREATH_S)

    def _forget(self, engine: str) -> None:
        self._in_slices(self._graph.forgetting(engine))

    def _audit(self) -> None:
        """Check once a second that no engine reports more blocks than its pool has."""
        now = self._clock()
        if now < self._next_audit:
            return
        self._next_audit = now + _AUDIT_EVERY_S
        for peer in self._subscriber.peers:
            with self._graph.lock:
                held = self._graph.resident_count(peer.engine)
            name, most = peer.hello.engine, peer.hello.num_blocks
            if held > most + _AUDIT_SLACK:
                self.counters["engines_overfull"] += 1
                self._log.warn(
                    "overfull", "engine %r lists %d blocks of %d: forgotten", name, held, most
                )
                self._forget(peer.engine)
                self._subscriber.withhold_advice(peer.engine)


def _joined(batches: Iterable[ReceivedBatch]) -> Iterator[ReceivedBatch]:
    """Join consecutive batches of one engine: the graph applies longer runs at less cost."""
    # At most ``KEYS_AT_ONCE`` keys: until they are applied, no other engine's events are.
    run, keys = ReceivedBatch("", [], 0), 0
    for batch in batches:
        if run.events and (batch.engine != run.engine or keys >= KEYS_AT_ONCE):
            yield run
            run, keys = ReceivedBatch("", [], 0), 0
        run.events.extend(batch.events)
        run = batch._replace(events=run.events)
        keys += sum(len(getattr(event, "hashes", b"")) for event in batch.events) // 8
    if run.events:
        yield run
