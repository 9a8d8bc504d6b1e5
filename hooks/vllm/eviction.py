"""A ranking, applied to vLLM's free queue between allocations.

vLLM allocates from the head of ``pool.free_block_queue``. This keeps a *window* of the ranking's
first victims there, and moves free protected blocks to the back, through the queue's own
operations; the allocation path itself stays vLLM's. The work is bounded: the window is laid again
only for a new ranking or when half of it is gone, and protected blocks move a slice at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ...graph.advice import EvictionRanking
from ...graph.types import Keys
from .index import BlockIndex

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_WINDOW: Final = 4096
PROTECT_PER_STEP: Final = 128
_SCAN_PER_VICTIM: Final = 2  # ranked keys looked at for each victim wanted, at most, in one step
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)


class FreeQueueArranger:
    """Permutes the free queue so that the ranking's first victims are allocated first.

    Args:
        pool: The live block pool.
        index: Finds a ranked key's block.
        blocks_per_step: The most blocks that one engine step can allocate.

    The counters run from the engine's start: ``moved``, ``recycled`` (ranked blocks left alone:
    gone, reused or referenced), ``stale`` (steps without advice), ``protected_evicted``.
    """

    def __init__(self, pool: BlockPool, index: BlockIndex, blocks_per_step: int) -> None:
        self.epoch = 0
        self.moved = 0
        self.recycled = 0
        self.stale = 0
        self.protected_evicted = 0
        self.window_size = min(2 * blocks_per_step, MAX_WINDOW)
        self._pool = pool
        self._index = index
        self._blocks_per_step = blocks_per_step
        self._order = self._protected_order = _NO_KEYS
        self._next_victim = self._next_protected = 0
        self._window: dict[int, tuple[int, KVCacheBlock]] = {}  # by block id: (key, block)
        self._half_way: tuple[int, KVCacheBlock] | None = None
        self._due = False
        self._protected: set[int] = set()
        self._protected_before: set[int] = set()
        self._far_blank: KVCacheBlock | None = None

    def step(self, ranking: EvictionRanking | None) -> None:
        """Bring the queue up to date with ``ranking``; call once between two allocations."""
        if ranking is None:
            self.stale += 1
            self._far_blank = None
            return
        if ranking.order is not self._order:  # not the epoch: a restarted sidecar counts anew
            self._adopt(ranking)
        if self._many_blanks_ahead():
            return
        if self._next_protected < len(self._protected_order):
            self._move_protected()
        if self._window_is_due():
            self._lay_window()

    def evicted(self, keys: Sequence[int]) -> None:
        """Take note that the engine evicted ``keys``."""
        for protected in (self._protected, self._protected_before):
            if protected:
                self.protected_evicted += sum(key in protected for key in keys)

    def clear(self) -> None:
        """Forget the ranking: the prefix cache was reset."""
        self._order = self._protected_order = _NO_KEYS
        self._next_victim = self._next_protected = 0
        self._window, self._half_way, self._due = {}, None, False
        self._protected, self._protected_before = set(), set()
        self._far_blank = None

    def _adopt(self, ranking: EvictionRanking) -> None:
        self.epoch = max(0, ranking.epoch)
        self._order, self._protected_order = ranking.order, ranking.protected
        self._next_victim = self._next_protected = 0
        self._window, self._half_way = {}, None
        self._due = True
        # Until the new list was walked, what the old one protected still counts.
        self._protected, self._protected_before = set(), self._protected

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

    def _lay_window(self) -> None:
        blanks = self._count_blanks()
        if blanks is None:
            return
        window = {i: kb for i, kb in self._window.items() if self._holds(*kb)}
        kept = len(window)
        self._fill(window)
        self._window = window
        self._due = self._next_victim < len(self._order) and len(window) < self.window_size
        if len(window) == kept:
            return  # nothing new: what is left of the window stands where it stood
        self._to_front(blanks, [block for _, block in window.values()])
        self.moved += len(window) - kept
        self._half_way = list(window.values())[len(window) // 2]

    def _fill(self, window: dict[int, tuple[int, KVCacheBlock]]) -> None:
        """Add the ranking's next free blocks to ``window``, up to its size."""
        start, find = self._next_victim, self._index.find
        scan = self._order[start : start + _SCAN_PER_VICTIM * self.window_size].tolist()
        taken = 0
        for key in scan:
            if len(window) >= self.window_size:
                break
            taken += 1
            block = find(key)
            if block is None:
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

    # Protected blocks ---------------------------------------------------------------------------

    def _move_protected(self) -> None:
        """Move the next slice of protected blocks to the back, most precious last."""
        start = self._next_protected
        keys = self._protected_order[start : start + PROTECT_PER_STEP].tolist()
        self._protected.update(keys)
        self._protected_before.difference_update(keys)  # each key counts once
        found = {b.block_id: b for b in map(self._index.find, keys) if b is not None}
        queue, taken = self._pool.free_block_queue, []
        try:
            for block in found.values():
                queue.remove(block)
                taken.append(block)
        finally:
            queue.append_n(taken)
        self.moved += len(taken)
        self._next_protected = start + len(keys)
        if self._next_protected >= len(self._protected_order):
            self._protected_before = set()
