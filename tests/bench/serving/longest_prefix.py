"""vLLM's scheduler with SGLang's order of waiting requests: longest cached prefix first."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_MOST_SORTED: Final = 128
"""Where more wait, they start as they came, as with SGLang's ``SchedulePolicy``."""


class LongestPrefixFirst(Scheduler):  # type: ignore[misc]
    """Sorts its queue before each step; preempted requests keep their place in front."""

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if 1 < len(self.waiting) <= _MOST_SORTED:
            in_order = sorted(self.waiting, key=self._turn)  # stable: else first come first served
            self.waiting.clear()
            self.waiting.extend(in_order)
        return super().schedule(*args, **kwargs)

    def _turn(self, request: Request) -> tuple[bool, int]:
        preempted = request.num_preemptions > 0
        return not preempted, 0 if preempted else -self._resident(request)

    def _resident(self, request: Request) -> int:
        """Blocks of the prompt that are cached: a chain goes tail first, so O(log n)."""
        pool = self.kv_cache_manager.block_pool
        return bisect_left(
            request.block_hashes, True, key=lambda each: pool.get_cached_block(each, [0]) is None
        )
