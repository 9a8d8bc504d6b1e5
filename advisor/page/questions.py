"""Lets people query the graph without delaying the sidecar's own work."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NoReturn, TypeVar, cast

from ...dashboards.source import BusyError

WAITING: Final = 4  # queries that may wait; more are refused at once; chosen
PATIENCE_S: Final = 0.5  # longest time that a query waits; chosen
REST: Final = 3.0  # rest after a query, as a multiple of its duration; chosen

FRESH_S: Final = 0.5  # an older answer is computed again; chosen
STALE_S: Final = 2.0  # an older answer is never returned; chosen
_KEPT: Final = 64  # cached answers
_MANY_ASK: Final = "many questions are being asked"
_SOON_S: Final = 1
_T = TypeVar("_T")


class QueryGate:
    """Allows one query of the graph at a time, and leaves time between two.

    The graph's lock is not fair: threads that query without a pause would keep it to themselves
    while batches wait to be applied and rankings become outdated. ``worked`` returns CPU seconds of
    the calling thread, so that a busy machine does not count as a slow query.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._sleep = sleep
        self._worked = worked
        self._room = threading.BoundedSemaphore(WAITING)
        self._turn = threading.Lock()
        self._free_at = clock()
        self.refused = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the graph's lock for one query; raises BusyError."""
        if not self._room.acquire(blocking=False):
            self._refuse(_MANY_ASK)
        try:
            self._wait()
            try:
                with self._lock:
                    begun = self._worked()
                    try:
                        yield
                    finally:
                        self._free_at = self._clock() + REST * (self._worked() - begun)
            finally:
                self._turn.release()
        finally:
            self._room.release()

    def _wait(self) -> None:
        deadline = self._clock() + PATIENCE_S
        if not self._turn.acquire(timeout=PATIENCE_S):
            self._refuse(_MANY_ASK)
        rest = self._free_at - self._clock()
        if rest > max(0.0, deadline - self._clock()):
            self._turn.release()
            self._refuse("the last question took long", math.ceil(rest))
        if rest > 0:
            self._sleep(rest)

    def _refuse(self, why: str, again_in_s: int = _SOON_S) -> NoReturn:
        self.refused += 1
        raise BusyError(why, again_in_s)


class RecentAnswers:
    """Caches answers by query, each for ``FRESH_S``; thread-safe. While one thread computes a new
    answer, or the graph is busy, others get the previous one, up to ``STALE_S`` old.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._asked: set[Hashable] = set()

    def of(self, question: Hashable, answer: Callable[[], _T]) -> _T:
        """Return a recent answer, or else a new one; raises BusyError."""
        age, kept = self._kept(question)
        if age < FRESH_S or (age < STALE_S and question in self._asked):
            return cast(_T, kept)
        self._asked.add(question)
        try:
            return self._new(question, answer)
        except BusyError:
            if age >= STALE_S:
                raise
            return cast(_T, kept)
        finally:
            self._asked.discard(question)

    def _kept(self, question: Hashable) -> tuple[float, Any]:
        """The last answer and its age in seconds; infinite if there is none."""
        known = self._answers.get(question)
        return (math.inf, None) if known is None else (self._clock() - known[0], known[1])

    def _new(self, question: Hashable, answer: Callable[[], _T]) -> _T:
        fresh = answer()
        self._answers[question] = self._clock(), fresh
        while len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        return fresh
