"""A simulated engine's hold: new and cold sessions wait while a sidecar sees no room for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...graph.advice import HOLD_PATIENCE_S, AdmissionAdvice

Word = Callable[[float], AdmissionAdvice]
"""What a sidecar has last said of room, as of a time."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that came.

    Attributes:
        at: Seconds.
        opens: It is its session's first.
        brings: Blocks of context that neither the pool nor a tier holds; 0 for a session that is
            live and resident.
        passed: Room was taken for it.
        held: It had to wait for room.
        released: When it had to no longer; NaN: it never did, or still does.
    """

    request: int
    user: int
    run: int
    at: float
    opens: bool
    brings: int = 0
    passed: bool = False
    held: bool = False
    released: float = math.nan


class Hold:
    """What an engine's own hold does, with a sidecar's word on room.

    It is decided when a request comes, and again when its turn comes: a long line costs contexts.
    Sessions that were here before start first, then as they came. Nobody is held longer than the
    bound; who was patient starts where nobody else waits.

    Args:
        word: None holds nobody.
        bound_s: The bound.
    """

    def __init__(self, word: Word | None, bound_s: float) -> None:
        self._word = word
        self._bound_s = bound_s
        self._held: list[Asked] = []
        self._begun: deque[tuple[float, int]] = deque()  # what the last word may not know of

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, asked: Asked, now: float, *, turn: bool) -> bool:
        """Whether a request must wait for room.

        Args:
            turn: It is its turn to start; else it just came.
        """
        if self._word is None or not asked.brings or asked.passed:
            return False
        left = self._left(self._word(now))
        if left is None:
            if turn:
                self._begins(asked, now)
            return False
        if left > 0 and not self._held:
            self._begins(asked, now)
            return False
        asked.held = True
        self._held.append(asked)
        return True

    def still_held(self) -> list[Asked]:
        """Those that wait for room now."""
        return list(self._held)

    def released(self, now: float, line: int, idle: bool) -> list[Asked]:
        """Those that may start now, in this order.

        Without room, who was patient starts where nobody else waits, one at a time: what stands in
        line before a session that is resident may cost it its blocks.

        Args:
            line: Requests that wait for the engine, and prompts that it computes.
            idle: Nothing runs.
        """
        if self._word is None or not self._held:
            return []
        word = self._word(now)
        free = [each for each in self._held if now - each.at >= self._bound_s]
        for asked in free:
            self._let_go(asked, now)
        while self._held and ((left := self._left(word)) is None or left > 0):
            free.append(self._let_go(self._next(), now))
        if self._held and not free and not line:
            oldest = min(self._held, key=lambda asked: asked.at)
            if idle or now - oldest.at >= HOLD_PATIENCE_S:
                free.append(self._let_go(oldest, now))
        return free

    def _next(self) -> Asked:
        return min(self._held, key=lambda asked: (asked.opens, asked.at))

    def _let_go(self, asked: Asked, now: float) -> Asked:
        self._held.remove(asked)
        asked.released = now
        self._begins(asked, now)
        return asked

    def _begins(self, asked: Asked, now: float) -> None:
        asked.passed = True
        self._begun.append((now, asked.brings))

    def _left(self, word: AdmissionAdvice) -> int | None:
        """Blocks of new context that may still start; None: as many as come."""
        while self._begun and self._begun[0][0] < word.known_of:
            self._begun.popleft()
        if word.room_blocks is None:
            return None
        return word.room_blocks - sum(blocks for _, blocks in self._begun)
