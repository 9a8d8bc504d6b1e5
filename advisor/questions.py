"""Lets people ask the graph without keeping the sidecar's own work from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from ..dashboards.source import BusyError

WAITING: Final = 4  # questions that may wait for their turn; further ones are refused at once
PATIENCE_S: Final = 0.5  # how long one waits
REST: Final = 3.0  # after a question the graph is left alone for so many times what it took


class Questions:
    """One question of the graph at a time, and between two of them room for everything else.

    The graph's lock is not fair: threads that ask without a pause would keep it among themselves,
    while batches wait to be applied and rankings grow old.

    Args:
        lock: The graph's.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lock = lock
        self._clock = clock
        self._sleep = sleep
        self._room = threading.BoundedSemaphore(WAITING)
        self._turn = threading.Lock()
        self._free_at = clock()
        self.refused = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the graph's lock for one question.

        Raises:
            BusyError: Too many others ask; it may be tried again in a second.
        """
        if not self._room.acquire(blocking=False):
            self._refuse()
        try:
            self._wait()
            try:
                with self._lock:
                    begun = self._clock()
                    try:
                        yield
                    finally:
                        now = self._clock()
                        self._free_at = now + REST * (now - begun)
            finally:
                self._turn.release()
        finally:
            self._room.release()

    def _wait(self) -> None:
        """Until it is our turn, and the graph was left alone for long enough."""
        deadline = self._clock() + PATIENCE_S
        if not self._turn.acquire(timeout=PATIENCE_S):
            self._refuse()
        rest = self._free_at - self._clock()
        if rest > max(0.0, deadline - self._clock()):
            self._turn.release()
            self._refuse()
        if rest > 0:
            self._sleep(rest)

    def _refuse(self) -> None:
        self.refused += 1
        raise BusyError("many questions are being asked; try again in a second")
