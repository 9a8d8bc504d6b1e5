"""``StoreBreaker``: keeps a store that is not well from being asked again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

SLOW_S: Final = 0.5  # a call that takes longer counts as one that failed; chosen
_FIRST_REST_S: Final = 1.0  # chosen
_LONGEST_REST_S: Final = 30.0  # rests double up to this; chosen


class StoreBreaker:
    """Rests after a call that failed or took too long; then one call tries, and the others wait.

    Any thread may call it.

    Args:
        clock: Monotonic seconds.

    Attributes:
        broken: How often it began to rest.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._rest_s, self._until = 0.0, float("-inf")
        self._tries = False  # whether one call is out to see whether the rest is over
        self.broken = 0

    def allows(self) -> bool:
        """Whether the store may be asked now. After a rest, the first who asks is the one who
        tries."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return False
            if self._rest_s:
                self._until, self._tries = now + self._rest_s, True  # unless this one succeeds
            return True

    @property
    def rests(self) -> bool:
        """Whether it rests now; asking this tries nothing."""
        return self._clock() < self._until

    def succeeded(self, seconds: float) -> None:
        """Note that a call did what it should, in so many seconds."""
        if seconds > SLOW_S:
            self.failed()
            return
        with self._lock:
            self._rest_s, self._until, self._tries = 0.0, float("-inf"), False

    def failed(self) -> None:
        """Note that a call failed; of those that were out together, the first one counts."""
        with self._lock:
            if self._clock() < self._until and not self._tries:
                return
            self._rest_s = min(2 * self._rest_s or _FIRST_REST_S, _LONGEST_REST_S)
            self._until, self._tries = self._clock() + self._rest_s, False
            self.broken += 1
