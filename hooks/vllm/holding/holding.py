"""Admission in the engine: new sessions wait while live sessions leave no room for them."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ....graph.admission import HoldingBounds, HoldingRule
from ....graph.release_order import Held
from ....graph.wire.advice import AdmissionAdvice
from ....graph.wire.events import (
    HOLD_ENDS,
    MAX_NAME,
    AdmissionReport,
    AnyEvent,
    RequestHeld,
    RequestReleased,
)
from .arrivals import LiveSessions, RequestArrival
from .chunks import PromptChunks
from .queue import HoldingQueue

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from ..calls import BlockIds

logger = logging.getLogger(__name__)

_OPEN_AFTER_S: Final = 10.0  # with no request held for this long, holding has ended. Chosen


class HoldingLog:
    """Counts and reports what happens to held requests. ``emit`` must not wait."""

    def __init__(self, emit: Callable[[AnyEvent], None], most_s: float) -> None:
        self._emit = emit
        self._most_s = most_s
        self._oldest_since: float | None = None  # since when the first of those waits
        self._not_held = 0
        self._waiting: dict[str, RequestHeld] = {}
        self._blocks = 0  # that they want
        self._held = 0
        self._ends: Counter[str] = Counter()
        self._waited_s = self._longest_s = 0.0
        self._holding = False
        self._last_held = 0.0
        self._held_before = 0  # what was held before it last began to hold
        self._longest_now = 0.0  # the longest wait since then

    def held(self, held: Held, advice: AdmissionAdvice) -> None:
        if not self._holding:
            self._holding, self._held_before, self._longest_now = True, self._held, 0.0
            logger.info(
                "kvgraph: new sessions wait: %d are live where %d fit; a request is held for %d s "
                "at most",
                advice.live_sessions,
                advice.fitting_sessions,
                self._most_s,
            )
        self._held += 1
        self._blocks += held.blocks
        name = held.request_id[:MAX_NAME]
        event = self._waiting[held.request_id] = RequestHeld(
            name, held.blocks, held.session, held.tenant, advice.fitting_sessions,
            advice.live_sessions,
        )  # fmt: skip
        self._emit(event)

    def held_after_all(self, held: Held, advice: AdmissionAdvice) -> None:
        self._not_held -= 1
        self.held(held, advice)

    def ended(self, held: Held, reason: str, now: float) -> None:
        """Note that ``held`` no longer waits; ``reason`` is one of ``HOLD_ENDS``."""
        waited = max(0.0, now - held.since)
        self._waiting.pop(held.request_id, None)
        self._blocks -= held.blocks
        self._ends[reason] += 1
        self._waited_s += waited
        self._longest_s = max(self._longest_s, waited)
        self._longest_now = max(self._longest_now, waited)
        self._last_held = now
        self._emit(RequestReleased(held.request_id[:MAX_NAME], waited, reason))

    def not_held(self) -> None:
        self._not_held += 1

    def oldest(self, since: float) -> None:
        """Note when the longest waiting request started to wait."""
        self._oldest_since = since

    @property
    def speaks(self) -> bool:
        """Whether requests were held recently, so that the end of holding must still be logged."""
        return self._holding or self._oldest_since is not None

    def none_held(self, now: float) -> None:
        self._oldest_since = None
        if self._holding and now - self._last_held >= _OPEN_AFTER_S:
            self._holding = False
            logger.info(
                "kvgraph: new sessions start at once again; %d requests were held, for %.1f s at "
                "most",
                self._held - self._held_before,
                self._longest_now,
            )

    def held_requests(self) -> list[AnyEvent]:
        """Return the events of requests held now; called on another thread."""
        return list(self._waiting.values())

    def report(
        self, now: float, queued_share: float, queued: tuple[int, int] = (0, 0)
    ) -> AdmissionReport:
        """Return values and counters, on another thread: it reads one attribute at a time."""
        since = self._oldest_since
        return AdmissionReport(
            waiting=len(self._waiting),
            waiting_blocks=max(0, self._blocks),
            oldest_s=max(0.0, now - since) if since is not None else 0.0,
            held=self._held,
            released=tuple(self._ends[reason] for reason in HOLD_ENDS),
            waited_s=self._waited_s,
            longest_s=self._longest_s,
            not_held=self._not_held,
            queued_share=queued_share,
            queued_blocks=queued[0],
            queued_again=queued[1],
        )


_RECHECK_S: Final = 0.05  # least time between two checks of vLLM's queue; chosen
_MOST_LOOKED_AT: Final = 32  # requests of the queue examined in one check; chosen
_LOOK_S: Final = 0.5  # between two counts of queued blocks that must be computed again; chosen


class Holding:
    """Holds the new requests that ``HoldingRule`` decides to hold.

    Held requests are kept out of the scheduler's queue, so a step costs the same for ten of them as
    for a thousand.
    """

    def __init__(
        self,
        queue: HoldingQueue,
        chunks: PromptChunks,
        sessions: LiveSessions,
        advice: Callable[[], AdmissionAdvice | None],
        emit: Callable[[AnyEvent], None],
        bounds: HoldingBounds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.queue = queue
        self._chunks = chunks
        self._sessions = sessions
        self._advice = advice
        self._clock = clock
        self._rule = HoldingRule(bounds)
        self.saturation = self._rule.saturation
        self._log = HoldingLog(emit, bounds.most_s)
        self._checked_at = -math.inf
        self._queued = (0, 0)  # blocks of prompts in vLLM's queue, and of these: computed before
        # Whether steps have nothing to do here, until a request arrives or other advice comes, and
        # when one was last taken without a call here; -inf: never.
        self.rests = False
        self.rested_at: Callable[[], float] = lambda: -math.inf

    # Requests -----------------------------------------------------------------------------------

    def arrived(self, request: Request) -> bool:
        if self.rests:
            self.rests = False
            self._rule.rested(self.rested_at())
        asks, advice = self._asks(request, self._sessions.arrived(request)), self._advice()
        queue = self.queue
        if not self._rule.arrives(asks, advice, idle=queue.idle, queued=queue.has_queued):
            self._log.not_held()
            return False
        assert advice is not None
        self._log.held(asks, advice)
        return True

    def on_new_request(self, request: Request) -> None:
        """Note that a request arrived; if it is not held, it is in vLLM's queue."""
        if not self.queue.is_held(request.request_id):
            self.queue.say_queued(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, _: int) -> None:
        self._rule.started(request.request_id, self._clock())
        self._sessions.scheduled(request.request_id)

    def removed(self, request_id: str) -> None:
        held = self._rule.removed(request_id)
        if held is not None:
            self._log.ended(held, "gone", self._clock())

    def request_finished(self, request: Request, block_ids: BlockIds) -> None:
        self._rule.ended(request.request_id)
        self._sessions.finished(request)

    # Steps --------------------------------------------------------------------------------------

    def step(self, tokens: int) -> None:
        """Release what may start next; once per step of ``tokens`` tokens, after allocations."""
        now, advice = self._clock(), self._advice()
        if self._rule.passes(advice, now):
            self._chunks.rest()
            self.rests = not (self._look_at_queue(now) or self._log.speaks)
            if not self.rests:
                self._log.none_held(now)
            return
        self.rests, self._queued = False, (0, 0)
        is_limited = advice is not None and advice.room_blocks is not None
        self._chunks.step(tokens, now, crowded=is_limited and self.saturation.is_reached)
        self._release(advice, now)
        if advice is not None:
            self._recheck_queue(advice, now)
        oldest = self._rule.oldest()
        if oldest is None:
            self._log.none_held(now)
        else:
            self._log.oldest(oldest.since)

    def end(self) -> None:
        """Release all requests, and hold none from now on."""
        self.queue.detach()  # first: an error in the other keeps nobody waiting
        self._chunks.rest()

    def report(self) -> AdmissionReport:
        """Return counts for the sidecar; called on the client's thread."""
        return self._log.report(self._clock(), self.saturation.share, self._queued)

    def held_requests(self) -> list[AnyEvent]:
        """Return the events of requests held now; called on the client's thread."""
        return self._log.held_requests()

    def _release(self, advice: AdmissionAdvice | None, now: float) -> None:
        queue = self.queue
        found = self._rule.released(
            advice, now, idle=queue.idle, free=queue.prefill_idle,
            prefills=len(self._rule) > 0 and queue.prefills,
        )  # fmt: skip
        for held, reason in found:
            self._log.ended(held, reason, now)
        if found and (advice is None or advice.room_blocks is None):
            queue.release_all()
            return
        for held, _ in found:
            queue.release(held.request_id)

    def _look_at_queue(self, now: float) -> bool:
        """Count what vLLM's queue will compute again, while it is long; returns whether it is."""
        if not (self._rule.saturation.is_reached and self.queue.has_queued):
            self._queued = (0, 0)
            return False
        if now - self._checked_at >= _LOOK_S:
            self._checked_at = now
            looks = [
                self._sessions.queued(each) for each in self.queue.next_requests(_MOST_LOOKED_AT)
            ]
            self._queued = sum(blocks for blocks, _ in looks), sum(again for _, again in looks)
        return True

    def _recheck_queue(self, advice: AdmissionAdvice, now: float) -> None:
        """Hold those of the next requests that were resident on arrival and are no longer."""
        if now - self._checked_at < _RECHECK_S or advice.room_blocks is None:
            return
        self._checked_at = now
        left = self._rule.step_blocks  # one step takes all that it can compute from the queue
        for request in self.queue.next_requests(_MOST_LOOKED_AT):
            if self._rule.is_let_in(request.request_id):
                continue
            asks = self._asks(request, self._sessions.reassess(request))
            if self._rule.turn_comes(asks, advice):
                self.queue.hold(request)
                self._log.held_after_all(asks, advice)
            else:
                left -= max(1, asks.blocks)
                if left <= 0:
                    return

    def _asks(self, request: Request, arrival: RequestArrival) -> Held:
        blocks = 0 if self.queue.outranks_running(request) else arrival.blocks
        return Held(
            request.request_id, self._clock(), blocks, self.queue.priority_of(request),
            arrival.returning, arrival.meaning.session, arrival.meaning.tenant,
        )  # fmt: skip
