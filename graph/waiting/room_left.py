"""How many blocks of new context may still start: the advised room less what started since."""

from __future__ import annotations

from collections import deque
from typing import Final

from ..messages.advice import AdmissionAdvice

_SURELY_KNOWN_S: Final = 1.0
"""Advice made at ``ts`` knows of every start before ``ts`` less this; events are sent every 0.2 s.
Chosen: five times that."""
_KEPT_S: Final = 10.0  # starts are remembered so long; advice is acted on for 2 s. Chosen


class RoomLedger:
    """Subtracts from the advised room what the advice cannot know of.

    That is: requests let go and not yet started, and those that started since it was made.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}  # let go, and not scheduled yet
        self._begun: deque[tuple[float, int]] = deque()
        self._taken = 0  # blocks, of both

    def promise(self, request_id: str, blocks: int) -> None:
        """Note that a request may start that brings ``blocks`` of new context."""
        if blocks:
            self._promised[request_id] = blocks
            self._taken += blocks

    def is_promised(self, request_id: str) -> bool:
        """Whether a request may start with new context, and has not yet."""
        return request_id in self._promised

    def begin(self, request_id: str, now: float) -> None:
        """Note that a request was scheduled; the sidecar will hear of it."""
        blocks = self._promised.pop(request_id, 0)
        if blocks:
            self._begun.append((now, blocks))
            self._drop_until(now - _KEPT_S)

    def drop(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._taken -= self._promised.pop(request_id, 0)

    def remaining(self, advice: AdmissionAdvice) -> float:
        """Blocks of new context that may still start; drops starts that ``advice`` knows of."""
        if advice.room_blocks is None:
            return float("inf")
        self._drop_until(max(advice.known_of, advice.ts - _SURELY_KNOWN_S))
        return advice.room_blocks - self._taken

    def _drop_until(self, moment: float) -> None:
        begun = self._begun
        while begun and begun[0][0] <= moment:
            self._taken -= begun.popleft()[1]
