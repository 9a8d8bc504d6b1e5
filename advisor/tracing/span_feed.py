"""``SpanFeed``: a thread that takes finished requests from the log and hands them to be sent."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, Protocol

from ...dashboards.answers.misses import RequestView
from ...graph.kvcache_graph import KVCacheGraph
from ..page.logged.request_views import request_view
from ..process.notices import Notices
from ..times.unix_time import UnixTime

logger = logging.getLogger(__name__)

BATCH: Final = 64  # requests of one message, and of one hold of the graph's lock; chosen
_EVERY_S: Final = 1.0  # chosen
_LAST_WORDS_S: Final = 1.0  # that the end of a sidecar waits for what is left; chosen


class Sender(Protocol):
    """Sends requests somewhere."""

    def send(self, requests: Sequence[RequestView]) -> bool:
        """Send them; returns whether they were taken. May block."""

    def close(self) -> None:
        """Give up what is under way; from another thread."""


class SpanFeed:
    """Reads the log from where it stands when the sidecar starts.

    Args:
        sender: None: nothing is read and nothing is sent.
        clock: Monotonic seconds, the graph's.
        wall: Unix seconds.

    Attributes:
        counters: Requests that were ``sent``; ``dropped``, since the receiver did not take them;
            and ``overtaken``, since the log forgot them before their end was heard of, or before
            they could be sent;
            ``failed``: looks at the log that an error of ours ended.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        sender: Sender | None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._graph = graph
        self._sender = sender
        self._unix = UnixTime(clock, wall)
        self._notices = Notices(logger, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-traces", daemon=True)
        self._next = 0  # the first request of the log that was not looked at
        self._running: list[int] = []  # looked at, and not ended yet
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Start the thread, if there is anywhere to send to."""
        if self._sender is not None:
            self._thread.start()

    def stop(self) -> None:
        """Send what is left, but wait for it no longer than a second."""
        self._stopping.set()
        if self._sender is not None:
            if self._thread.is_alive():
                self._thread.join(_LAST_WORDS_S)
            self._sender.close()

    def tick(self) -> None:
        """Send all requests that ended since the last tick."""
        assert self._sender is not None
        while ended := self._take():
            is_taken = self._sender.send(ended)
            self.counters["sent" if is_taken else "dropped"] += len(ended)
            if not is_taken:
                self._notices.warn("dropped", "no traces are taken at the OTLP endpoint: requests "
                                   "are left out of them")  # fmt: skip

    def _take(self) -> list[RequestView]:
        """Up to ``BATCH`` requests that ended, the oldest first."""
        with self._graph.lock:
            history = self._graph.tables.history
            log = history.requests
            self._running += range(max(self._next, log.first), log.next)
            known = [number for number in self._running if number >= log.first]
            missed = max(0, log.first - self._next) + len(self._running) - len(known)
            self._next = log.next
            # NaN: it runs; below 0: its end was not heard of, or not yet.
            over = (n for n in known if log.record(n)["ran"] >= 0)
            ended = list(islice(over, BATCH))
            views = [request_view(history, number, self._unix) for number in ended]
        if missed:
            self.counters["overtaken"] += missed
        taken = set(ended)
        self._running = [number for number in known if number not in taken]
        return views

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._tick_safely()
        self._tick_safely()

    def _tick_safely(self) -> None:
        try:
            self.tick()
        except Exception as error:
            self.counters["failed"] += 1
            self._notices.warn("failed", "traces could not be made (%s)", type(error).__name__)
            logger.debug("traces could not be made", exc_info=True)
