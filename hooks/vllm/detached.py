"""Takes the place of our scheduler side before it exists and after it failed; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..tiers.jobs import TierAnswer, TierWork
from .holding.no_holding import NoHolding
from .transfers.bridge import TierCacheBridge
from .transfers.no_tiers import NoTiers

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from .sampled.sample_words import Sample


class Detached:
    """Answers vLLM as if nothing of ours were there, and completes what vLLM was promised.

    No request may wait for ever. Jobs under way are followed to their end, so that the blocks which
    they fill return to the pool; a load whose orders were never written is given to the workers as
    one that cannot succeed. Resets are followed for good, since vLLM goes on holding blocks back
    for loads of an engine that was given tiers.

    Args:
        bridge: The tiers of the side that failed, if it had any.
    """

    attached = False

    def __init__(self, bridge: TierCacheBridge | NoTiers | None = None) -> None:
        self.bridge = bridge or NoTiers()
        self.bridge.retire()
        self.holding = NoHolding()

    @property
    def busy(self) -> bool:
        """Whether workers still have something to report."""
        return self.bridge.owes

    def hold_at(
        self, scheduler: Scheduler, holds: Callable[[Request], bool], gone: Callable[[str], None]
    ) -> None:
        """Hold no request."""

    def request_queued(self, request: Request) -> None:
        """Do nothing."""

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Say that no load brings anything."""
        return 0, False

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """Note that a request runs, perhaps after a load that it was promised."""
        self.bridge.request_resumed(request.request_id)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Note that a request ended, perhaps before a load that it was promised."""
        self.bridge.promise_ended(request.request_id)

    def step(self, tokens: int, preempted: Iterable[str] = ()) -> TierWork | None:
        """Return the orders that the workers still need."""
        return self.bridge.outstanding()

    def step_ended(self) -> None:
        """Do nothing."""

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take what the workers did, and which loads are over."""
        self.bridge.answered(answer, received)

    def sampled(self, samples: Iterable[Sample]) -> None:
        """Do nothing."""

    def drop_copies(self) -> bool:
        """Allow the reset: nothing is offered any more, and promised loads are no reason to refuse
        it."""
        return True

    def leave(self, wait_s: float) -> None:
        """Do nothing."""
