"""Decides which requests with new context wait for room, and which may start: the one rule.

An engine's hook asks it in its steps, and the replay lab as its clock runs; it knows neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ..messages.advice import HOLD_PATIENCE_S, AdmissionAdvice
from .pacing import Pacing
from .release_order import Held, HoldingOrder
from .room_left import RoomLedger
from .saturation import Saturation

_ABOUT_TO_RUN_S: Final = 0.5
"""An engine that ran so short a time ago is between two requests rather than idle: agents' tools
answer soon. Chosen."""
_LAST_STEPS: Final = 0.02
"""Share of the bound: a request goes when it has waited 98 % of it, since the next step may be
long. Chosen."""
_OVERDUE: Final = 0.5
"""Share of the bound: while anybody has waited longer there is no rest, and of a tenant's requests
that one goes first, since all that reach the bound start whatever else is queued. Chosen."""
_MOST_RELEASED: Final = 64  # in one step, while there is room; chosen
_SHORT: Final = 256
"""A prompt is short if so many like it fit into the pool: it takes little room, and no agent's
context is so small. Chosen."""


def new_context_blocks(prompt: int, found: int, pool: int, *, new: bool) -> int:
    """Blocks of new context that a request brings; 0 if its session is live and resident, or if its
    prompt is short.

    Args:
        prompt: Full blocks of the prompt.
        found: How many of these, from the start, need not be computed.
        pool: Blocks of the pool.
        new: Whether the session was never served here. Otherwise it counts as resident if at
            least half of the prompt is found.
    """
    if prompt * _SHORT <= pool:
        return 0
    if new:
        return max(1, prompt - found)
    return 0 if 2 * found >= prompt else prompt - found


@dataclass(frozen=True, slots=True)
class HoldingBounds:
    """What holding keeps to.

    Attributes:
        pool_blocks: Blocks of the pool. A request that needs as many can never fit, so it is
            not held.
        most_s: The longest that a request is held, in seconds.
        step_blocks: Blocks of prompts that the engine computes in one step.
    """

    pool_blocks: int
    most_s: float
    step_blocks: int = 1


class HoldingRule:
    """Decides which requests wait, for how long, and in which order they start.

    A request does not wait if it brings no new context, and none waits while the sidecar is silent
    or sees room for all, while nothing else runs, or longer than the bound. While few prompts
    queue, nobody begins to wait except behind others, and those that wait need no patience: they
    start as many at a time as one step computes. All times are seconds of one clock.

    Attributes:
        saturation: Whether prompts queue so often that the engine gains by letting some wait.
    """

    def __init__(self, bounds: HoldingBounds) -> None:
        self._bounds = bounds
        self._order = HoldingOrder()
        self._room = RoomLedger()
        self._pacing = Pacing()
        self.saturation = Saturation()
        self._counted = False  # whether one came since the last step: it counts for all who did
        self._ran_at = -math.inf

    def __len__(self) -> int:
        return len(self._order)

    # Requests -----------------------------------------------------------------------------------

    def arrives(
        self, asks: Held, advice: AdmissionAdvice | None, *, idle: bool, queued: bool
    ) -> bool:
        """Decide on a request that came in at ``asks.since``. True: hold it.

        Args:
            idle: The engine has no work but held requests.
            queued: Other requests stand in its queue.
        """
        if not self._counted:
            # Who waits for room would stand in the queue otherwise: without these, holding would
            # end itself by shortening the queue, and the engine would thrash again.
            self.saturation.came(queued=queued or len(self._order) > 0)
        self._counted = True
        if self._rests(idle, asks.since) and not len(self._order):
            self._pass(asks)
            return False
        return self.turn_comes(asks, advice)

    def turn_comes(self, asks: Held, advice: AdmissionAdvice | None) -> bool:
        """Decide again for a request that was not held on arrival and is about to start.

        Its context may have been evicted while it queued. True: hold it.
        """
        if self.is_let_in(asks.request_id):
            return False
        if not asks.blocks or advice is None or not self._must_wait(asks, advice):
            self._pass(asks)
            return False
        self._order.add(asks)
        return True

    def is_let_in(self, request_id: str) -> bool:
        """Whether a request may start with new context, and has not yet."""
        return self._room.is_promised(request_id)

    def is_full(self, advice: AdmissionAdvice | None) -> bool:
        """Whether no new context may start; drops what ``advice`` knows from the ledger of room."""
        return advice is not None and self._room.remaining(advice) <= 0

    def started(self, request_id: str, now: float) -> None:
        """A request got blocks."""
        self._room.begin(request_id, now)

    def removed(self, request_id: str) -> Held | None:
        """Forget a request whose client went away; returns it if it was held."""
        return self._order.drop(request_id)

    def ended(self, request_id: str) -> None:
        """Forget a request that was not held and is over, in whatever state it was."""
        self._room.drop(request_id)

    # Steps --------------------------------------------------------------------------------------

    def passes(self, advice: AdmissionAdvice | None, now: float) -> bool:
        """Note a step in which nobody waits and there is room for all, as in nearly all steps.

        False: this is another step, nothing was noted, and ``released`` must be asked.
        """
        if len(self._order) or self._pacing.measures:
            return False
        if advice is not None and advice.room_blocks is not None:
            return False
        self._counted, self._ran_at = False, now
        return True

    def released(
        self, advice: AdmissionAdvice | None, now: float, *, idle: bool, free: bool
    ) -> list[tuple[Held, str]]:
        """Requests that may start now, in this order, each with its reason (of ``HOLD_ENDS``).

        If there is no room, a request that was patient starts once no other is queued, and with it
        as many as one step computes with it, as ``Pacing`` allows: a prefill that stands before a
        resident session's turn may evict that session's blocks. It was patient if it has waited
        ``HOLD_PATIENCE_S``, or as long as a whole pool of prompts takes to compute if that is less;
        while few prompts queue, any wait is enough.

        Args:
            idle: The engine has no work but held requests.
            free: No request is queued, and the prompt of the last one released has been computed.
        """
        self._counted = False
        if not idle or not len(self._order):
            self._ran_at = now
        self._pacing.looks(now, free, 0.0 if advice is None else advice.again)
        if advice is None or advice.room_blocks is None:
            return list(self._all("open" if advice is not None else "silence"))
        found = [*self._old(now), *self._fitting(advice)]
        return found or self._without_room(now, idle)

    def oldest(self) -> Held | None:
        """The request that has waited longest; None if none is held."""
        return self._order.oldest()

    def _must_wait(self, asks: Held, advice: AdmissionAdvice) -> bool:
        if advice.room_blocks is None or asks.blocks >= self._bounds.pool_blocks:
            return False
        if len(self._order):
            return True  # behind those that wait
        return self.saturation.is_reached and self._room.remaining(advice) <= 0

    def _all(self, reason: str) -> Iterator[tuple[Held, str]]:
        while (held := self._order.oldest()) is not None:
            yield self._let_go(held), reason

    def _old(self, now: float) -> Iterator[tuple[Held, str]]:
        born = now - (1.0 - _LAST_STEPS) * self._bounds.most_s
        while (held := self._order.oldest()) is not None and held.since <= born:
            yield self._let_go(held), "bound"

    def _fitting(self, advice: AdmissionAdvice) -> Iterator[tuple[Held, str]]:
        for _ in range(_MOST_RELEASED):
            held = self._order.peek()
            if held is None or self._room.remaining(advice) <= 0:
                return
            yield self._let_go(held), "room"

    def _without_room(self, now: float, idle: bool) -> list[tuple[Held, str]]:
        if self._rests(idle, now) and (held := self._order.peek()) is not None:
            return [(self._let_go(held), "idle")]
        due = now - _OVERDUE * self._bounds.most_s
        oldest = self._order.oldest()
        if oldest is None or not self._pacing.may_start(now, hurries=oldest.since <= due):
            return []
        latest = now - self._patience() if self.saturation.is_reached else now
        patient = list(self._patient(latest, due, now))
        if patient:
            self._pacing.begin(now, sum(held.blocks for held in patient))
        return [(held, "patience") for held in patient]

    def _patient(self, latest: float, due: float, now: float) -> Iterator[Held]:
        """Those who start together: as many as fill one step, the last of which may exceed it."""
        left = self._bounds.step_blocks
        while left > 0 and (held := self._order.pop_patient(latest, due, now)) is not None:
            self._let_in(held)
            yield held
            left -= held.blocks

    def _patience(self) -> float:
        """As long as a turn of a thrashing engine waits at least: LRU lost its context because a
        pool's worth of other prompts was computed before it."""
        return min(HOLD_PATIENCE_S, self._pacing.takes(self._bounds.pool_blocks))

    def _rests(self, idle: bool, now: float) -> bool:
        return idle and now - self._ran_at >= _ABOUT_TO_RUN_S

    def _pass(self, asks: Held) -> None:
        """Let in one that did not wait; only what takes room makes its tenant known."""
        if asks.blocks:
            self._order.served(asks.tenant)
        self._let_in(asks)

    def _let_in(self, asks: Held) -> None:
        self._room.promise(asks.request_id, asks.blocks)

    def _let_go(self, held: Held) -> Held:
        self._order.take(held.request_id)
        self._let_in(held)
        return held
