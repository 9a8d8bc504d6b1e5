"""Completes what was promised to vLLM when our scheduler side fails: no request may wait
for ever."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ...tiers.jobs import Load, TierAnswer, TierWork

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from ..scheduler import SchedulerSide
    from .bridge import TierCacheBridge
    from .promises import Promises

_NO_JOB: Final = 0  # names no job and no copy: both are numbered from one


class Rescue:
    """Ends the loads that were promised to vLLM before an error of ours.

    A load whose orders were never written is given to the workers as one that cannot succeed: they
    report it as failed, and vLLM computes the blocks. Jobs under way are followed to their end, so
    that the blocks which they fill return to the pool. Resets are followed for good, since vLLM
    goes on holding blocks back for loads of an engine that was given tiers. Held requests return to
    vLLM's own queue.
    """

    def __init__(self) -> None:
        self._bridge: TierCacheBridge | None = None
        self._promises: Promises | None = None
        self._broken: list[Load] = []

    @property
    def busy(self) -> bool:
        """Whether workers still have something to report."""
        return bool(self._broken) or (self._bridge is not None and self._bridge.busy)

    def adopt(self, side: SchedulerSide) -> None:
        """Take over from a side that takes no more decisions."""
        self._bridge, self._promises = side.bridge, side.promises
        if side.holding is not None:
            side.holding.end()
        side.tap.detach(but_resets=side.promises is not None)
        if side.bridge is not None:
            side.bridge.drop_copies()  # a reset that was not caught up with yet is, by this

    def fail_load(self, side: SchedulerSide, request: Request, blocks: KVCacheBlocks) -> None:
        """Fail the load that ``request`` waits for and nobody ordered.

        Only the blocks that it was to fill are named: what the prefix cache held is sound, and vLLM
        would set back every request that shares it.
        """
        if side.promises is not None:
            side.promises.made(request)
        (group,) = blocks.blocks
        empty = tuple(block.block_id for block in group if block.block_hash is None)
        self._broken.append(Load(_NO_JOB, (_NO_JOB,) * len(empty), empty, {}, request.request_id))

    def scheduled(self, request_id: str) -> None:
        """Note that a request runs."""
        if self._promises is not None:
            self._promises.scheduled(request_id)

    def finished(self, request_id: str) -> None:
        """Note that a request ended."""
        if self._promises is not None:
            self._promises.finished(request_id)

    def work(self) -> TierWork:
        """Return the orders that the workers still need."""
        broken, self._broken = tuple(self._broken), []
        rest = self._bridge.outstanding() if self._bridge is not None else TierWork()
        return replace(rest, jobs=rest.jobs + broken)

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take what the workers did, and which loads are over."""
        try:
            if self._bridge is not None:
                self._bridge.answered(answer)
        finally:
            if self._promises is not None:
                self._promises.received(received)
            if not self.busy:
                self._bridge = None
