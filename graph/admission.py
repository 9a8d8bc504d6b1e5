"""Decides which requests with new context wait for room, and which may start. The engine's hook
calls it in its steps, and the replay lab as its clock advances; it imports neither.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .release_order import Held, HoldingOrder
from .wire.advice import HOLD_PATIENCE_S, AdmissionAdvice

_REST: Final = 0.25
"""After a request that started without room, the rest before the next one, as a share of the time
until the engine could take another. Chosen in the closed loop of the replay lab, on other sessions
than those of the figures."""
_CALM: Final = 0.06  # share of computed blocks computed again that may be chance
_WASTE: Final = 5.0
"""How much the rest grows per share of what is computed again beyond ``_CALM``. A start without
room evicts blocks that another session needs soon, the sooner the shorter its pauses are compared
with prefill: then such starts gain nothing. Chosen: a higher value computes less again, but
finishes fewer turns."""
_LATEST: Final = 0.2  # weight of the newest prompt in the mean time per block; chosen


class Pacing:
    """Spaces out requests that start without room, since each evicts blocks another request needs.

    It measures time by prompts, not by seconds: a machine that computes a prompt in half the time
    starts twice as many.
    """

    def __init__(self, most_s: float) -> None:
        # A prompt is measured no longer: its request may be gone, or wait for its user.
        self._most_s = most_s  # seconds
        self._began: float | None = None  # when the last one started; None: its prompt is computed
        self._from = -math.inf
        self._enough = 0.0  # seconds without any prompt to compute that end any rest
        self._worked_at = -math.inf  # when a prompt was queued or computed last
        self._free = False
        self._blocks = 0  # of new context, that began then
        self._block_s: float | None = None

    def measures(self, now: float) -> bool:
        """Return whether the prompts started last are still being computed, as far as is known."""
        return self._began is not None and now - self._began < self._most_s

    def begin(self, now: float, blocks: int) -> None:
        """Note that requests with ``blocks`` of new context start."""
        self._began, self._blocks = now, blocks

    def takes(self, blocks: int) -> float:
        """Return the seconds that ``blocks`` blocks recently took from start to end, including
        other requests' turns in between. Infinite before the first measurement.
        """
        return math.inf if self._block_s is None else blocks * self._block_s

    def note_step(
        self, now: float, *, free: bool, prefills: bool = False, wasted: float = 0.0
    ) -> None:
        """Note at each step whether the engine could take another request: it is ``free`` if no
        request is queued and the prompt of the last one released has been computed. ``wasted`` is
        the share of recently computed blocks that had been computed before.
        """
        self._free = free
        if prefills or not free:
            self._worked_at = now
        if self._began is not None and not self.measures(now):
            self.give_up()
        if free and self._began is not None:
            took = now - self._began
            rest = _REST + _WASTE * max(0.0, wasted - _CALM)
            self._from, self._began = now + rest * took, None
            self._enough, self._worked_at = _REST * took, now
            block_s = took / self._blocks
            before = block_s if self._block_s is None else self._block_s
            self._block_s = before + _LATEST * (block_s - before)

    def give_up(self) -> None:
        """Stop measuring the last start, since its prompt's end was not observed."""
        self._began = None

    def may_start(self, now: float, *, hurries: bool) -> bool:
        """Return whether another request may start; ``hurries`` skips the rest between two starts.
        The rest leaves time for others' turns, so it ends early once there were none for a while.
        """
        rested = now >= self._from or now - self._worked_at >= self._enough
        return self._free and (hurries or rested)


_SURELY_KNOWN_S: Final = 1.0
"""Advice accounts for every start earlier than its ``ts`` minus this. Chosen: five times the 0.2 s
between two messages of an engine."""
_KEPT_S: Final = 10.0  # starts are remembered this long; advice is valid for 2 s. Chosen


class RoomLedger:
    """Tracks how much of the advised room is used by requests that the advice does not know. These
    are requests released but not yet started, and those started since the advice was computed.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}  # let go, and not scheduled yet
        self._begun: deque[tuple[float, int]] = deque()
        self._taken = 0  # blocks, of both

    def promise(self, request_id: str, blocks: int) -> None:
        if blocks:
            self._promised[request_id] = blocks
            self._taken += blocks

    def is_promised(self, request_id: str) -> bool:
        return request_id in self._promised

    def begin(self, request_id: str, now: float) -> None:
        """Note that a request was scheduled; later advice will account for it."""
        blocks = self._promised.pop(request_id, 0)
        if blocks:
            self._begun.append((now, blocks))
            self._drop_until(now - _KEPT_S)

    def drop(self, request_id: str) -> None:
        self._taken -= self._promised.pop(request_id, 0)

    def remaining(self, advice: AdmissionAdvice) -> float:
        """Return how many blocks may still start; forgets starts that ``advice`` includes."""
        if advice.room_blocks is None:
            return float("inf")
        self._drop_until(max(advice.known_of, advice.ts - _SURELY_KNOWN_S))
        return advice.room_blocks - self._taken

    def _drop_until(self, moment: float) -> None:
        begun = self._begun
        while begun and begun[0][0] <= moment:
            self._taken -= begun.popleft()[1]


# Only an engine that cannot keep up gains by holding requests.

_REMEMBERED: Final = 64
"""Number of requests after which an observation's weight has decayed to 1/e. Chosen."""
SATURATED: Final = 0.4
"""Share of requests that found others queued from which the engine counts as saturated. Chosen in
the closed loop of the replay lab, on other sessions than those of the figures: there an engine that
keeps up shows at most 0.2, and one whose cache thrashes 1. From 0.3 to 0.5 nothing changes."""
AT_EASE: Final = 0.15  # a saturated engine below this share is no longer saturated; chosen


class Saturation:
    """Measures how many recent requests, not seconds, found others in the engine's queue."""

    def __init__(self) -> None:
        self.share = 0.0  # share of these requests, recent ones weighted more
        self.is_reached = False  # whether requests queue so often that the engine cannot keep up

    def note_arrival(self, *, queued: bool) -> None:
        self.share += (float(queued) - self.share) / _REMEMBERED
        self.is_reached = self.share >= (AT_EASE if self.is_reached else SATURATED)


_ABOUT_TO_RUN_S: Final = 0.5
"""An engine that ran this recently is between two requests rather than idle: agents' tools answer
soon. Chosen."""
_LAST_STEPS: Final = 0.02
"""Share of the bound: a request is released after 98 % of it, since the next step may be long.
Chosen."""
_OVERDUE: Final = 0.25
"""Share of the bound: while a request has waited longer there is no rest, and of its tenant's
requests it goes first, since all requests that reach the bound start regardless of the queue.
Chosen."""
_MOST_RELEASED: Final = 64  # in one step, while there is room; chosen
_TOGETHER: Final = 64
"""Requests that start together without room fill at most this part of a pool, however large a step
is: while they are computed, all resident sessions wait for each of their tokens. Chosen."""
_ENOUGH: Final = 4
"""Room for this part of a pool lets in any request: one larger than any room that comes free would
otherwise keep all others waiting behind it. Chosen."""
_SHORT: Final = 256
"""A prompt is short if this many like it fit into the pool: it takes little room, and no agent's
context is that small. Chosen."""


def is_short(prompt: int, pool: int) -> bool:
    """Return whether a prompt of ``prompt`` blocks takes little room in this pool."""
    return prompt * _SHORT <= pool


def new_context_blocks(prompt: int, found: int, pool: int, *, new: bool) -> int:
    """Return how many blocks of new context a request needs, given that the first ``found`` of its
    ``prompt`` blocks are in the pool. 0 if the prompt is short for the ``pool``, or if its session
    is live and resident: not ``new`` here, with at least half of the prompt found.
    """
    if is_short(prompt, pool):
        return 0
    if new:
        return max(1, prompt - found)
    return 0 if 2 * found >= prompt else prompt - found


@dataclass(frozen=True, slots=True)
class HoldingBounds:
    """What an engine can hold, and for how long."""

    # Blocks of the pool; a request that needs this many never fits and is not held.
    pool_blocks: int
    most_s: float  # the longest a request is held, in seconds
    step_blocks: int = 1  # prompt blocks that the engine computes in one step


class HoldingRule:
    """Decides which requests wait, for how long, and in which order they start.

    A request does not wait if it brings no new context. No request waits while the sidecar is
    silent or reports room for all, while nothing else runs, or longer than the bound. While few
    requests queue, a request is held only behind other held ones, and these start as fast as the
    engine computes: at a time, as many as one step has room for. All times are seconds of one
    clock.
    """

    def __init__(self, bounds: HoldingBounds) -> None:
        self._bounds = bounds
        self._order = HoldingOrder()
        self._room = RoomLedger()
        self._pacing = Pacing(bounds.most_s)
        # Whether requests queue so often that holding some is worthwhile.
        self.saturation = Saturation()
        self._met: bool | None = None  # whether who arrives since the last step meets others
        self._ran_at = -math.inf

    def __len__(self) -> int:
        return len(self._order)

    @property
    def step_blocks(self) -> int:
        """Prompt blocks that the engine computes in one step."""
        return self._bounds.step_blocks

    # Requests -----------------------------------------------------------------------------------

    def arrives(
        self, asks: Held, advice: AdmissionAdvice | None, *, idle: bool, queued: bool
    ) -> bool:
        """Decide whether to hold a request that arrived at ``asks.since``. ``advice`` is None if
        the sidecar is silent; ``idle``: the engine has no work except held requests; ``queued``:
        other requests are in its queue.
        """
        if self._met is None:  # those that arrive together do not count as meeting one another
            # Who waits for room would stand in the queue otherwise: without these, holding would
            # end itself by shortening the queue, and the engine would thrash again.
            self._met = queued or len(self._order) > 0
        self.saturation.note_arrival(queued=self._met)
        if idle and not len(self._order):
            # An engine without work takes no steps: the time since would count as a prompt's.
            self._pacing.give_up()
            if self._rests(idle, asks.since):
                self._pass(asks)
                return False
        return self.turn_comes(asks, advice)

    def turn_comes(self, asks: Held, advice: AdmissionAdvice | None) -> bool:
        """Decide again as a request is about to start: its context may be gone meanwhile."""
        if self.is_let_in(asks.request_id):
            return False
        if not asks.blocks or advice is None or not self._must_wait(asks, advice):
            self._pass(asks)
            return False
        self._order.add(asks)
        return True

    def is_let_in(self, request_id: str) -> bool:
        return self._room.is_promised(request_id)

    def started(self, request_id: str, now: float) -> None:
        self._room.begin(request_id, now)

    def removed(self, request_id: str) -> Held | None:
        return self._order.drop(request_id)

    def ended(self, request_id: str) -> None:
        self._room.drop(request_id)

    # Steps --------------------------------------------------------------------------------------

    def passes(self, advice: AdmissionAdvice | None, now: float) -> bool:
        """Note a step in which no request is held and there is room for all. Returns False if
        nothing was noted, so that ``released`` must be called.
        """
        if len(self._order) or self._pacing.measures(now):
            return False
        if advice is not None and advice.room_blocks is not None:
            return False
        self._met, self._ran_at = None, now
        return True

    def rested(self, at: float) -> None:
        """Note that ``passes`` was not called in recent steps in which it would have returned True,
        the last one at this time; -inf: there was none.
        """
        if at > self._ran_at:
            self._met, self._ran_at = None, at

    def released(
        self, advice: AdmissionAdvice | None, now: float, *, idle: bool, free: bool,
        prefills: bool = False,
    ) -> list[tuple[Held, str]]:  # fmt: skip
        """Return the requests that may start now, in order, each with its reason (of
        ``HOLD_ENDS``). For ``idle`` see ``arrives``, for ``free`` see ``Pacing.note_step``;
        ``prefills``: the prompt of any request is being computed.

        Without room, a patient request starts once no other is queued, together with as many as one
        step computes, as far as ``Pacing`` allows: a prefill before a resident session's turn may
        evict that session's blocks. A request is patient if it has waited ``HOLD_PATIENCE_S``, or
        as long as a whole pool of prompts takes to compute if that is less; while few prompts
        queue, any wait is enough.
        """
        self._met = None
        if not idle or not len(self._order):
            self._ran_at = now
        wasted = 0.0 if advice is None else advice.wasted
        self._pacing.note_step(now, free=free, prefills=prefills, wasted=wasted)
        if advice is None or advice.room_blocks is None:
            reason = "open" if advice is not None else "silence"
            return [(self._let_go(held), reason) for held in iter(self._order.oldest, None)]
        found = [*self._old(now), *self._fitting(advice)]
        return found or self._without_room(now, idle)

    def oldest(self) -> Held | None:
        return self._order.oldest()

    def _must_wait(self, asks: Held, advice: AdmissionAdvice) -> bool:
        if advice.room_blocks is None or asks.blocks >= self._bounds.pool_blocks:
            return False
        if len(self._order):
            return True  # behind those that wait
        return self.saturation.is_reached and not self._fits(asks, advice)

    def _fits(self, asks: Held, advice: AdmissionAdvice) -> bool:
        """Whether there is room for a request, or for a quarter of the pool if it wants more."""
        enough = max(1, self._bounds.pool_blocks // _ENOUGH)
        return self._room.remaining(advice) >= min(asks.blocks, enough)

    def _old(self, now: float) -> Iterator[tuple[Held, str]]:
        born = now - (1.0 - _LAST_STEPS) * self._bounds.most_s
        while (held := self._order.oldest()) is not None and held.since <= born:
            yield self._let_go(held), "bound"

    def _fitting(self, advice: AdmissionAdvice) -> Iterator[tuple[Held, str]]:
        for _ in range(_MOST_RELEASED):
            held = self._order.peek()
            if held is None or not self._fits(held, advice):
                return
            yield self._let_go(held), "room"

    def _without_room(self, now: float, idle: bool) -> list[tuple[Held, str]]:
        if self._rests(idle, now) and (held := self._order.peek()) is not None:
            return [(self._let_go(held), "idle")]
        due = now - _OVERDUE * self._bounds.most_s
        oldest = self._order.oldest()
        if oldest is None:
            return []
        if not self._pacing.may_start(now, hurries=idle or oldest.since <= due):
            return []
        latest = now - self._patience() if self.saturation.is_reached else now
        patient = list(self._patient(latest, due, now))
        if patient:
            self._pacing.begin(now, sum(held.blocks for held in patient))
        return [(held, "patience") for held in patient]

    def _patient(self, latest: float, due: float, now: float) -> Iterator[Held]:
        """Requests that start together: enough to fill one step, or a small part of the pool, which
        the last may exceed.
        """
        bounds = self._bounds
        left = min(bounds.step_blocks, max(1, bounds.pool_blocks // _TOGETHER))
        while left > 0 and (held := self._order.pop_patient(latest, due, now)) is not None:
            self._let_in(held)
            yield held
            left -= held.blocks

    def _patience(self) -> float:
        # A turn on a thrashing engine waits at least as long: LRU lost its context because a pool's
        # worth of other prompts was computed before it.
        return min(HOLD_PATIENCE_S, self._pacing.takes(self._bounds.pool_blocks))

    def _rests(self, idle: bool, now: float) -> bool:
        return idle and now - self._ran_at >= _ABOUT_TO_RUN_S

    def _pass(self, asks: Held) -> None:
        """Let in a request that does not wait; without new context it costs its tenant nothing."""
        if asks.blocks:
            self._order.served(asks.tenant)
        self._let_in(asks)

    def _let_in(self, asks: Held) -> None:
        self._room.promise(asks.request_id, asks.blocks)

    def _let_go(self, held: Held) -> Held:
        self._order.take(held.request_id)
        self._let_in(held)
        return held
