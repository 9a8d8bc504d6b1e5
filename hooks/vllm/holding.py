"""Admission in the engine: new sessions wait while those that are live leave no room for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...graph.advice import HOLD_PATIENCE_S, AdmissionAdvice
from ...graph.events import AdmissionReport, AnyEvent
from .holding_log import HoldingLog
from .holding_order import Held, HoldingOrder
from .holding_queue import HoldingQueue
from .holding_room import RoomLedger
from .holding_sessions import Arrival, LiveSessions

if TYPE_CHECKING:
    from vllm.v1.request import Request

_ABOUT_TO_RUN_S: Final = 0.5
"""An engine that ran so short a time ago is between two requests rather than idle: agents' tools
answer soon. Chosen."""
_LAST_STEPS: Final = 0.02
"""Of the bound: who is so close to it goes, since the next step may take long. Chosen."""
_ASKED_AGAIN_S: Final = 0.05  # the head of vLLM's queue is, at most so often; chosen
_MOST_RELEASED: Final = 64  # in one step, while there is room; chosen


@dataclass(frozen=True, slots=True)
class HoldingBounds:
    """What holding keeps to.

    Attributes:
        pool_blocks: A request that wants as many would never fit: it is not held.
        most_s: How long a request is held at most, in seconds.
    """

    pool_blocks: int
    most_s: float


class Holding:
    """Decides who of the new requests waits, and for how long.

    A request of a session that is live and resident is never held, nor is any while the sidecar
    says nothing, or nothing else runs. Requests are held by not standing in the scheduler's queue:
    a step costs the same whether ten wait or a thousand.

    Args:
        queue: Where they wait.
        sessions: Knows which sessions are live here.
        advice: The sidecar's latest word on room, if it is young.
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
        self._bounds = bounds
        self._clock = clock
        self._order = HoldingOrder()
        self._room = RoomLedger()
        self._log = HoldingLog(emit, bounds.most_s)
        self._ran_at = self._asked_at = -math.inf

    # Requests -----------------------------------------------------------------------------------

    def arrived(self, request: Request) -> bool:
        """A new request came in; whether it is to be held."""
        arrival = self._sessions.arrived(request)
        word = self._advice()
        if not arrival.blocks or word is None or not self._must_wait(arrival, word):
            self._room.promise(request.request_id, arrival.blocks)
            self._log.passed += 1
            return False
        self._hold(request, arrival, word, self._clock())
        return True

    def scheduled(self, request: Request) -> None:
        """A request got blocks."""
        self._room.begin(request.request_id, self._clock())
        self._sessions.scheduled(request.request_id)

    def removed(self, request_id: str) -> None:
        """A held request's client went away."""
        held = self._order.take(request_id)
        if held is not None:
            self._log.ended(held, "gone", self._clock())

    def finished(self, request: Request) -> None:
        """A request ended, in whatever state it was."""
        self._room.drop(request.request_id)
        self._sessions.finished(request)

    # Steps --------------------------------------------------------------------------------------

    def step(self) -> None:
        """Once an engine step, after its allocations: who may start in the next."""
        now = self._clock()
        if not len(self._order):
            self._ran_at = now
            self._log.quiet(now)
            return
        idle = self.queue.idle
        if not idle:
            self._ran_at = now
        word = self._advice()
        if word is None or word.room_blocks is None:
            self._open("silence" if word is None else "open", now)
            return
        self._release_old(now)
        self._release_fitting(word, now)
        self._ask_again(word, now)
        oldest = self._order.oldest()
        self._log.oldest_since = oldest.since if oldest is not None else None
        if idle and now - self._ran_at >= _ABOUT_TO_RUN_S:
            self._release_next("idle", now)
        elif oldest is not None and now - oldest.since >= HOLD_PATIENCE_S and self.queue.free:
            self._let_go(oldest, "idle", now)
            self.queue.release(oldest.request_id)

    def end(self) -> None:
        """Hold nobody any more, whatever happens."""
        self.queue.detach()

    def report(self) -> AdmissionReport:
        """For the sidecar, from the client's thread."""
        return self._log.report(self._clock())

    def _must_wait(self, arrival: Arrival, word: AdmissionAdvice) -> bool:
        if word.room_blocks is None or arrival.blocks >= self._bounds.pool_blocks:
            return False
        if len(self._order):
            return True  # behind the others, whose turn comes with the next step
        if self.queue.idle and self._clock() - self._ran_at >= _ABOUT_TO_RUN_S:
            return False
        return self._room.left(word) <= 0

    def _ask_again(self, word: AdmissionAdvice, now: float) -> None:
        """Who came resident and lost its context in vLLM's queue waits for room like others."""
        if now - self._asked_at < _ASKED_AGAIN_S or self._room.left(word) > 0:
            return
        head = self.queue.head
        if head is None or self._room.is_promised(head.request_id):
            return
        self._asked_at = now
        arrival = self._sessions.again(head)
        if arrival.blocks and arrival.blocks < self._bounds.pool_blocks:
            self.queue.hold_head()
            self._hold(head, arrival, word, now)

    def _hold(self, request: Request, arrival: Arrival, word: AdmissionAdvice, now: float) -> None:
        held = Held(
            request.request_id, now, arrival.blocks, request.priority, arrival.paused,
            arrival.meaning.session, arrival.meaning.tenant,
        )  # fmt: skip
        self._order.add(held)
        self._log.held(held, word)

    def _open(self, reason: str, now: float) -> None:
        while (held := self._order.oldest()) is not None:
            self._let_go(held, reason, now)
        self.queue.open()

    def _release_old(self, now: float) -> None:
        born = now - (1.0 - _LAST_STEPS) * self._bounds.most_s
        while (held := self._order.oldest()) is not None and held.since <= born:
            self._let_go(held, "bound", now)
            self.queue.release(held.request_id)

    def _release_fitting(self, word: AdmissionAdvice, now: float) -> None:
        for _ in range(_MOST_RELEASED):
            if self._room.left(word) <= 0 or not self._release_next("room", now):
                return

    def _release_next(self, reason: str, now: float) -> bool:
        held = self._order.next()
        if held is None:
            return False
        self._let_go(held, reason, now)
        self.queue.release(held.request_id)
        return True

    def _let_go(self, held: Held, reason: str, now: float) -> None:
        self._order.take(held.request_id)
        self._room.promise(held.request_id, held.blocks)
        self._log.ended(held, reason, now)
