"""A ranking, applied to vLLM's free queue between allocations.

vLLM allocates from the head of ``pool.free_block_queue``. This keeps a *window* of the ranking's
first victims there, through the queue's own operations; the allocation path itself stays vLLM's.
The work is bounded: the window is laid again only for a new ranking or when half of it is gone.
Where it does not reach, ``head_guard.py`` keeps protected blocks away from the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.messages.advice import EvictionRanking
from ....graph.types import Keys
from ..observe.index import BlockIndex
from ..settings import PROTECT_STALE_S
from .head_guard import HeadGuard

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_WINDOW: Final = 4096
_SCAN_PER_VICTIM: Final = 2  # ranked keys looked at for each victim wanted, at most, in one step
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)


class FreeQueueArranger:
    """Permutes the free queue so that the ranking's first victims are allocated first.

    Args:
        pool: The live block pool.
        index: Finds a ranked key's block.
        blocks_per_step: The most blocks that one engine step can allocate.
        protect_stale_s: How long a caller's word counts where no sidecar heard it.

    The counters run from the engine's start: ``moved``, ``recycled`` (ranked blocks left alone:
    gone, reused, referenced, or used since), ``stale`` (steps without advice),
    ``protected_evicted``.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: BlockIndex,
        blocks_per_step: int,
        protect_stale_s: float = PROTECT_STALE_S,
    ) -> None:
        self.epoch = 0
        self.recycled = 0
        self.stale = 0
        self.window_size = min(2 * blocks_per_step, MAX_WINDOW)
        self._pool = pool
        self._index = index
        self._blocks_per_step = blocks_per_step
        self._guard = HeadGuard(pool, index, blocks_per_step, protect_stale_s)
        self._laid = 0  # blocks moved to the window
        self._order = _NO_KEYS
        self._next_victim = 0
        self._window: dict[int, tuple[int, KVCacheBlock]] = {}  # by block id: (key, block)
        self._half_way: tuple[int, KVCacheBlock] | None = None
        self._due = False
        self._far_blank: KVCacheBlock | None = None

    @property
    def moved(self) -> int:
        """Blocks that changed their place in the queue."""
        return self._laid + self._guard.moved

    @property
    def protected_evicted(self) -> int:
        """Evictions of blocks that were protected then."""
        return self._guard.evicted_protected

    def stated(self, keys: Sequence[int]) -> None:
        """A caller says that these keys are protected."""
        self._guard.state(keys)

    def freed(self) -> None:
        """Blocks were given back between two steps."""
        self._guard.freed()

    def step(
        self,
        ranking: EvictionRanking | None,
        remembered: EvictionRanking | None = None,
        linked_since: float = -math.inf,
    ) -> None:
        """Bring the queue up to date with what is advised; call once between two allocations.

        Args:
            ranking: The latest one, None where there is none that is young enough to act on.
            remembered: The latest one, also where it is older than that: its order means nothing
                any more, but what it protects is protected still.
            linked_since: What was told before this, the sidecar may have missed.
        """
        self._guard.look_through(ranking, linked_since)
        self._guard.adopt(ranking or remembered)
        if ranking is None:
            self.stale += 1
            self._far_blank = None
            self._guard.step()
        elif self._is_window_enough(ranking):
            self._guard.look_again()  # once that is over
        else:
            self._guard.step()

    def heeds(self, ranking: EvictionRanking) -> bool:
        """Whether the queue is arranged by this ranking already."""
        return ranking.order is self._order  # not the epoch: a restarted sidecar counts anew

    def evicted(self, keys: Sequence[int]) -> None:
        """Take note that the engine evicted ``keys``."""
        self._guard.evicted(keys)

    def clear(self) -> None:
        """Forget the ranking: the prefix cache was reset."""
        self._order = _NO_KEYS
        self._next_victim = 0
        self._window, self._half_way, self._due = {}, None, False
        self._far_blank = None
        self._guard.clear()

    def _is_window_enough(self, ranking: EvictionRanking) -> bool:
        """Lay the window if that is due: whether it, or blanks, are all that a step can take."""
        if not self.heeds(ranking):
            self._adopt(ranking)
        if self._many_blanks_ahead():
            return True
        if self._window_is_due():
            self._lay_window(ranking.known_of)
        return self._far_blank is not None or (
            self._half_way is not None and len(self._window) // 2 >= self._blocks_per_step
        )

    def _adopt(self, ranking: EvictionRanking) -> None:
        self.epoch = max(0, ranking.epoch)
        self._order, self._next_victim = ranking.order, 0
        self._window, self._half_way = {}, None
        self._due = True

    # Blank blocks -------------------------------------------------------------------------------

    def _many_blanks_ahead(self) -> bool:
        """Whether more blank blocks than a step can take are known to stand at the head.

        One attribute check while they last: ``_far_blank`` stood ``blocks_per_step`` deep with as
        many blanks behind it, and blocks leave the queue from its head only.
        """
        blank = self._far_blank
        if blank is None:
            return False
        if blank.ref_cnt == 0 and blank.block_hash is None:
            return True
        self._far_blank = None
        return False

    def _count_blanks(self) -> int | None:
        """How many blank blocks lead the queue; None (and remembered) if there is no pressure."""
        far: KVCacheBlock | None = None
        queue = self._pool.free_block_queue
        for ahead, block in enumerate(queue.iter_blocks_after(None), start=1):
            if block.block_hash is not None:
                return ahead - 1
            if ahead == self._blocks_per_step:
                far = block
            if ahead == 2 * self._blocks_per_step:
                self._far_blank = far
                return None
        return None  # nothing cached is free: there is nothing to arrange

    # Victims ------------------------------------------------------------------------------------

    def _window_is_due(self) -> bool:
        if self._half_way is not None and not self._holds(*self._half_way):
            self._half_way = None
            self._due = True
        return self._due

    def _holds(self, key: int, block: KVCacheBlock) -> bool:
        return self._index.find(key) is block

    def _lay_window(self, known_of: float) -> None:
        blanks = self._count_blanks()
        if blanks is None:
            return
        window = {
            i: (key, block)
            for i, (key, block) in self._window.items()
            if self._holds(key, block) and self._may_go(key, block, known_of)
        }
        kept = len(window)
        self._fill(window, known_of)
        self._window = window
        self._due = self._next_victim < len(self._order) and len(window) < self.window_size
        if len(window) == kept:
            return  # nothing new: what is left of the window stands where it stood
        self._to_front(blanks, [block for _, block in window.values()])
        self._laid += len(window) - kept
        self._half_way = list(window.values())[len(window) // 2]

    def _may_go(self, key: int, block: KVCacheBlock, known_of: float) -> bool:
        """Whether a ranking that knows of what was before ``known_of`` has a say in this block.

        One that was used since stays where its use put it: the ranking is of a block that nobody
        had come back for. Nor can it overrule what a caller stated and it did not hear.
        """
        return self._index.freed_at(block) <= known_of and not self._guard.heeds(key)

    def _fill(self, window: dict[int, tuple[int, KVCacheBlock]], known_of: float) -> None:
        """Add the ranking's next free blocks to ``window``, up to its size."""
        start, find = self._next_victim, self._index.find
        scan = self._order[start : start + _SCAN_PER_VICTIM * self.window_size].tolist()
        taken = 0
        for key in scan:
            if len(window) >= self.window_size:
                break
            taken += 1
            block = find(key)
            if block is None or not self._may_go(key, block, known_of):
                self.recycled += 1
            else:
                window.setdefault(block.block_id, (key, block))
        self._next_victim = start + taken

    def _to_front(self, blanks: int, victims: list[KVCacheBlock]) -> None:
        """Put ``victims`` at the head, behind the ``blanks`` blank blocks that stand there."""
        queue = self._pool.free_block_queue
        taken = queue.popleft_n(blanks)
        try:
            for block in victims:
                queue.remove(block)
                taken.append(block)
        finally:  # whatever happens, no block that left the queue stays out of it
            queue.prepend_n(taken)
