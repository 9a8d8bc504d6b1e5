"""``Blanks``: the empty blocks at the head of vLLM's free queue, which go first whatever is
advised."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Blanks:
    """Counts the blank blocks at the queue's head, as far as two steps can take.

    Args:
        pool: The live block pool.
        blocks_per_step: The most blocks that one engine step can allocate.
    """

    def __init__(self, pool: BlockPool, blocks_per_step: int) -> None:
        self._pool = pool
        self._blocks_per_step = blocks_per_step
        self._far: KVCacheBlock | None = None

    @property
    def suffice(self) -> bool:
        """Whether, as far as is known, no step takes any other block."""
        return self._far is not None

    def reset(self) -> None:
        """Forget what was counted."""
        self._far = None

    def still_suffice(self) -> bool:
        """Whether more blank blocks than a step can take are known to be at the head; forgets the
        count once they are gone.

        This is one attribute check while they last: ``_far`` was ``blocks_per_step`` deep with as
        many blanks behind it, and blocks leave the queue from its head only.
        """
        blank = self._far
        if blank is None:
            return False
        if blank.ref_cnt == 0 and blank.block_hash is None:
            return True
        self._far = None
        return False

    def count(self) -> int | None:
        """How many blank blocks lead the queue; None (and remembered) if there is no pressure."""
        far: KVCacheBlock | None = None
        queue = self._pool.free_block_queue
        for ahead, block in enumerate(queue.iter_blocks_after(None), start=1):
            if block.block_hash is not None:
                return ahead - 1
            if ahead == self._blocks_per_step:
                far = block
            if ahead == 2 * self._blocks_per_step:
                self._far = far
                return None
        return None  # nothing cached is free: there is nothing to arrange
