"""``LateNotes``: what steps changed, until it is noted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Final

_MOST_BEHIND: Final = 128  # steps, in memory with what they cached; the client's thread tells the
# latest of 0.2 s. Chosen


class LateNotes:
    """Calls that note changes, made later, on whichever thread comes first.

    One at a time and in their order, as counting needs it.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._noting = Lock()

    def add(self, note: Callable[[], None]) -> None:
        """Add a call, which must ask for nothing that is noted late; where many wait, the oldest is
        made."""
        self._waiting.append(note)
        if len(self._waiting) > _MOST_BEHIND:
            self._make_beyond(_MOST_BEHIND, wait=False)

    def make_all(self, wait: bool = True) -> None:
        """Make all calls that wait.

        Args:
            wait: Also while another thread is making some; else that is left to it.
        """
        self._make_beyond(0, wait)

    def _make_beyond(self, most: int, wait: bool) -> None:
        if not self._noting.acquire(blocking=wait):
            return
        try:
            while len(self._waiting) > most:
                self._waiting.popleft()()
        finally:
            self._noting.release()
