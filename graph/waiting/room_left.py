"""How much new context may still start, by what the sidecar said and what started since."""

from __future__ import annotations

from collections import deque
from typing import Final

from ..messages.advice import AdmissionAdvice

_SURELY_KNOWN_S: Final = 1.0
"""What began so long before a word was true, the word knows of: events are sent every 0.2 s."""
_KEPT_S: Final = 10.0  # longer than any word is acted on, by far


class RoomLedger:
    """Takes off a word's room what it cannot know of: sessions that start now, or just did."""

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}  # let go, and not scheduled yet
        self._begun: deque[tuple[float, int]] = deque()
        self._taken = 0  # blocks, of both

    def promise(self, request_id: str, blocks: int) -> None:
        """A request that brings ``blocks`` of new context may start."""
        if blocks:
            self._promised[request_id] = blocks
            self._taken += blocks

    def is_promised(self, request_id: str) -> bool:
        """Whether a request may start with new context, and has not yet."""
        return request_id in self._promised

    def begin(self, request_id: str, now: float) -> None:
        """A request was scheduled; the sidecar will hear of it."""
        blocks = self._promised.pop(request_id, 0)
        if blocks:
            self._begun.append((now, blocks))
            self._drop_until(now - _KEPT_S)

    def drop(self, request_id: str) -> None:
        """A request ended."""
        self._taken -= self._promised.pop(request_id, 0)

    def left(self, word: AdmissionAdvice) -> float:
        """Blocks of new context that may still start."""
        if word.room_blocks is None:
            return float("inf")
        self._drop_until(max(word.known_of, word.ts - _SURELY_KNOWN_S))
        return word.room_blocks - self._taken

    def _drop_until(self, moment: float) -> None:
        begun = self._begun
        while begun and begun[0][0] <= moment:
            self._taken -= begun.popleft()[1]
