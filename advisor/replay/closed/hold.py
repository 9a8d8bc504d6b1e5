"""A simulated engine's hold: new and cold sessions wait while a sidecar sees no room for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ....graph.messages.advice import AdmissionAdvice
from ....graph.waiting.holding_rule import HoldingBounds, HoldingRule
from ....graph.waiting.release_order import Held

Word = Callable[[float], AdmissionAdvice]
"""What a sidecar has last said of room, as of a time."""


@dataclass(slots=True, eq=False)
class Asked:
    """A request that came.

    Attributes:
        opens: It is its session's first.
        brings: Blocks of context that neither the pool nor a tier holds; 0 for a session that is
            live and resident.
        since: When it began to wait for room, in seconds; NaN: it never did.
        held_s: How long it waited for room, while it did.
    """

    request: int
    user: int
    run: int
    opens: bool
    brings: int = 0
    since: float = math.nan
    held_s: float = 0.0

    @property
    def name(self) -> str:
        """As the rule knows it."""
        return str(self.request)

    def as_held(self, now: float) -> Held:
        """As the rule sees it."""
        return Held(self.name, now, self.brings, returning=not self.opens)


class Hold:
    """Has simulated requests wait that ``HoldingRule`` says shall, with a sidecar's word on room.

    It is asked when a request comes, and again when its turn comes: a long line costs contexts.

    Args:
        word: None holds nobody.
        bounds: What holding keeps to.
    """

    def __init__(self, word: Word | None, bounds: HoldingBounds) -> None:
        self._word = word
        self._rule = HoldingRule(bounds)
        self._held: dict[str, Asked] = {}

    def __len__(self) -> int:
        return len(self._held)

    def arrives(self, asked: Asked, now: float, *, idle: bool, queued: bool) -> bool:
        """A request came; whether it must wait for room.

        Args:
            idle: Nothing runs, and nobody else waits for the engine.
            queued: Somebody else waits for the engine.
        """
        if self._word is None:
            return False
        held = self._rule.arrives(asked.as_held(now), self._word(now), idle=idle, queued=queued)
        return self._noted(asked, now, held)

    def turn_comes(self, asked: Asked, now: float) -> bool:
        """It is a request's turn to start; whether it must wait for room after all."""
        if self._word is None:
            return False
        held = self._rule.turn_comes(asked.as_held(now), self._word(now))
        return self._noted(asked, now, held)

    def started(self, asked: Asked, now: float) -> None:
        """A request got blocks."""
        self._rule.started(asked.name, now)

    def still_held(self) -> list[Asked]:
        """Those that wait for room now."""
        return list(self._held.values())

    def released(self, now: float, *, idle: bool, free: bool) -> list[Asked]:
        """Those that may start now, in this order.

        Args:
            idle: Nothing runs, and nobody else waits for the engine.
            free: Nobody else waits for the engine, and it computes no prompt.
        """
        if self._word is None:
            return []
        found = self._rule.released(self._word(now), now, idle=idle, free=free)
        gone = [self._held.pop(held.request_id) for held, _ in found]
        for asked in gone:
            asked.held_s += now - asked.since
        return gone

    def _noted(self, asked: Asked, now: float, held: bool) -> bool:
        if held:
            asked.since = now
            self._held[asked.name] = asked
        return held
