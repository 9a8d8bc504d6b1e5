"""What stands where our scheduler side was, or is not yet: it decides nothing, and owes nothing."""

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


class Detached:
    """Answers vLLM as if nothing of ours were there, and sees through what it was promised.

    No request may wait for ever: jobs that are under way are heard to their end, so that blocks
    which they fill go back to the pool, and a load whose orders were never written is given to the
    workers as one that cannot succeed. Resets are followed for good: vLLM goes on holding blocks
    back for loads of an engine that was given tiers.

    Args:
        bridge: The tiers of a side that is left, where there was one.
    """

    attached = False

    def __init__(self, bridge: TierCacheBridge | NoTiers | None = None) -> None:
        self.bridge = bridge or NoTiers()
        self.holding = NoHolding()

    @property
    def busy(self) -> bool:
        """Whether workers still have something to tell."""
        return self.bridge.busy

    def hold_at(
        self, scheduler: Scheduler, holds: Callable[[Request], bool], gone: Callable[[str], None]
    ) -> None:
        """No request is held."""

    def request_queued(self, request: Request) -> None:
        """Nobody observes."""

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """No load brings anything any more."""
        return 0, False

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """A request runs, perhaps after a load that it was promised."""
        self.bridge.request_resumed(request.request_id)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """A request ended, perhaps before a load that it was promised."""
        self.bridge.request_finished(request.request_id)

    def step(self, tokens: int, preempted: Iterable[str] = ()) -> TierWork | None:
        """What the workers are still to be told."""
        return self.bridge.outstanding()

    def step_ended(self) -> None:
        """Nothing is measured."""

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """What the workers did, and whose loads are over."""
        self.bridge.answered(answer, received)

    def drop_copies(self) -> bool:
        """Nothing is offered any more, and what was promised is no reason to refuse a reset."""
        return True

    def leave(self, wait_s: float) -> None:
        """It is left already."""
