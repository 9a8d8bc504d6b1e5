"""Admission in the engine: new sessions wait while those that are live leave no room for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ....graph.messages.advice import AdmissionAdvice
from ....graph.messages.events import AdmissionReport, AnyEvent
from ....graph.waiting.holding_rule import HoldingBounds, HoldingRule
from ....graph.waiting.release_order import Held
from .arrivals import Arrival, LiveSessions
from .hold_log import HoldingLog
from .holding_queue import HoldingQueue

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ASKED_AGAIN_S: Final = 0.05  # least time between two checks of the head of vLLM's queue; chosen


class Holding:
    """Holds the new requests that ``HoldingRule`` says must wait.

    Requests are held by not standing in the scheduler's queue: a step costs the same whether ten
    wait or a thousand.

    Attributes:
        saturation: How many of the latest requests met others in vLLM's queue.

    Args:
        queue: Where they wait.
        sessions: Knows which sessions are live here.
        advice: The sidecar's latest advice on room; None if none is fresh.
        emit: Takes each event; must not wait.
        bounds: What holding keeps to.
        clock: Monotonic seconds, the clock that advice is dated in.
    """

    def __init__(
        self,
        queue: HoldingQueue,
        sessions: LiveSessions,
        advice: Callable[[], AdmissionAdvice | None],
        emit: Callable[[AnyEvent], None],
        bounds: HoldingBounds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self._sessions = sessions
        self._advice = advice
        self._clock = clock
        self._rule = HoldingRule(bounds)
        self.saturation = self._rule.saturation
        self._log = HoldingLog(emit, bounds.most_s)
        self._asked_at = -math.inf

    # Requests -----------------------------------------------------------------------------------

    def arrived(self, request: Request) -> bool:
        """Decide on a new request. True: hold it."""
        asks, advice = self._asks(request, self._sessions.arrived(request)), self._advice()
        queue = self.queue
        if not self._rule.arrives(asks, advice, idle=queue.idle, queued=queue.has_queued):
            self._log.not_held()
            return False
        assert advice is not None
        self._log.held(asks, advice)
        return True

    def is_held(self, request_id: str) -> bool:
        """Whether a request waits beside vLLM's queue."""
        return self.queue.is_held(request_id)

    def scheduled(self, request: Request) -> None:
        """Note that a request got blocks."""
        self._rule.started(request.request_id, self._clock())
        self._sessions.scheduled(request.request_id)

    def removed(self, request_id: str) -> None:
        """Forget a held request whose client went away."""
        held = self._rule.removed(request_id)
        if held is not None:
            self._log.ended(held, "gone", self._clock())

    def finished(self, request: Request) -> None:
        """Note that a request ended, in whatever state it was."""
        self._rule.ended(request.request_id)
        self._sessions.finished(request)

    # Steps --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Release what may start in the next step; called once a step, after its allocations."""
        now, advice = self._clock(), self._advice()
        if self._rule.passes(advice, now):
            self._log.quiet(now)
            return
        self._release(advice, now)
        if advice is not None:
            self._ask_again(advice, now)
        oldest = self._rule.oldest()
        if oldest is None:
            self._log.quiet(now)
        else:
            self._log.oldest(oldest.since)

    def end(self) -> None:
        """Release all, and hold no request any more."""
        self.queue.detach()

    def report(self) -> AdmissionReport:
        """Counts for the sidecar; called on the client's thread."""
        return self._log.report(self._clock(), self.saturation.share)

    def told(self) -> list[AnyEvent]:
        """What the sidecar was told of those that wait now; called on the client's thread."""
        return self._log.told()

    def _release(self, advice: AdmissionAdvice | None, now: float) -> None:
        queue = self.queue
        found = self._rule.released(advice, now, idle=queue.idle, free=queue.prefill_idle)
        for held, reason in found:
            self._log.ended(held, reason, now)
        if found and (advice is None or advice.room_blocks is None):
            queue.release_all()
            return
        for held, _ in found:
            queue.release(held.request_id)

    def _ask_again(self, advice: AdmissionAdvice, now: float) -> None:
        """Hold the next request after all, if it was resident on arrival and is no longer."""
        if now - self._asked_at < _ASKED_AGAIN_S or not self._rule.is_full(advice):
            return
        head = self.queue.head
        if head is None or self._rule.is_let_in(head.request_id):
            return
        self._asked_at = now
        asks = self._asks(head, self._sessions.again(head))
        if self._rule.turn_comes(asks, advice):
            self.queue.hold_head()
            self._log.held_after_all(asks, advice)

    def _asks(self, request: Request, arrival: Arrival) -> Held:
        blocks = 0 if self.queue.outranks_running(request) else arrival.blocks
        return Held(
            request.request_id, self._clock(), blocks, request.priority, arrival.returning,
            arrival.meaning.session, arrival.meaning.tenant,
        )  # fmt: skip
