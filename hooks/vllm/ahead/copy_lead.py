"""``CopyLead``: how many of the blocks that are about to go should have copies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ...tiers.directory import CopyDirectory

_STEPS_AHEAD: Final = 3  # a block begun this early is usually copied in time; chosen
_LEAST_AHEAD: Final = 8  # blocks that are looked at ahead of need at least; chosen
_MOST_AHEAD: Final = 0.375  # of the memory, for copies of what the next step cannot take; chosen
_AHEAD_PER_POOL: Final = 0.25  # … at most so much of it for each pool that it has room for; chosen
_NEWEST: Final = 0.2  # weight of the newest sample in a mean; chosen
_WORK_S: Final = 0.25  # a step takes no longer: what is more was a rest; chosen
_MEMORY_S: Final = 5.0  # seconds of work in which the largest step seen fades to 1/e; chosen


class CopyLead:
    """Follows how many blocks steps and loads take, and how long copies take.

    Args:
        now: Seconds.

    Attributes:
        step: Blocks that the largest step of late took to compute; fades while the engine works.
        load: Blocks that the largest loads of late took at once; fades likewise.
    """

    def __init__(self, now: float) -> None:
        self.step = self.load = 0.0
        self.steps = 0
        self._seen_at, self._late = now, 0.0  # late: steps from a spill's to its end's, a mean

    def stepped(self, taken: int, loads: int, now: float) -> None:
        """Note that a step took ``taken`` blocks to compute, and ``loads`` for loads."""
        fade = math.exp(-min(now - self._seen_at, _WORK_S) / _MEMORY_S)
        self.step, self.load = max(float(taken), fade * self.step), max(loads, fade * self.load)
        self._seen_at, self.steps = now, self.steps + 1

    def ended(self, began: int) -> None:
        """Note the end of a spill that began when there had been ``began`` steps."""
        self._late += _NEWEST * (self.steps - began - self._late)

    def blocks(self, wanted: int, directory: CopyDirectory, pool: int) -> int:
        """How many blocks of the queue's head should have copies.

        Covers all blocks that steps may write to before a spill that begins now would end; what a
        load takes is copied before the load writes to it. More of them are there in time for larger
        steps, and for what a prefetch would take; but a copy of what the pool has takes the place
        of one of what it lost, and the more so the smaller the memory is. Beyond the memory's
        capacity, copies would replace each other without end.

        Args:
            wanted: What a prefetch would take.
            directory: Says how many copies the memory holds, and how many can be begun now.
            pool: Blocks of the pool.
        """
        memory = directory.warm_capacity
        needed = int(min(1.0 + self._late, _STEPS_AHEAD) * self.step)
        ample = int(_STEPS_AHEAD * self.step) + wanted
        affordable = int(min(_MOST_AHEAD, _AHEAD_PER_POOL * memory / pool) * memory)
        affordable += directory.room
        return min(_LEAST_AHEAD + max(needed, min(ample, affordable)), memory)
