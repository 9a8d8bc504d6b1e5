"""``QueueScan``: looks through the head of the free queue, a bounded stretch per step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_LEAST: Final = 64  # blocks looked at per step at least, and; chosen
_TIMES_TAKEN: Final = 2  # so many per block that the step took: faster than the queue moves
_SURE: Final = 8  # at the head, besides as many as a step took: looked at in every step; chosen


class QueueScan:
    """Goes through the head of the free queue round by round, one stretch per step.

    A block that was looked at stays as it is until the engine takes it, except that hits remove
    blocks and advice puts some in front. So the very head is looked at in every step. A short
    queue's head is looked at as a whole.

    Args:
        pool: The live block pool.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._seen: KVCacheBlock | None = None  # the last one that was looked at
        self._place = 0  # how many stand before the next one
        self._unsafe = False  # whether this round found one that must not go yet
        self.safe = 0  # blocks at the head that can go without a loss, as far as is known

    def start_again(self) -> None:
        """Begin the next round."""
        self._seen, self._place, self._unsafe = None, 0, False

    def moved(self, taken: int) -> None:
        """Note that so many blocks left at the head; blank ones need not be counted."""
        self.safe = max(0, self.safe - taken)
        self._place = max(0, self._place - taken)
        seen = self._seen
        if seen is not None and (seen.ref_cnt or seen.next_free_block is None):
            self.start_again()

    def look(self, ahead: int, taken: int) -> Iterator[tuple[int, KVCacheBlock]]:
        """Positions and blocks of this step's part of the next ``ahead``: the head, then further
        blocks."""
        sure = min(ahead, _SURE + taken)
        if self._place >= ahead or self._place < sure:
            self.start_again()
        else:
            yield from self._walk(None, 0, sure)
        end = min(ahead, max(self._place, sure) + _LEAST + _TIMES_TAKEN * taken)
        for place, block in self._walk(self._seen, self._place, end):
            self._seen, self._place = block, place + 1
            yield place, block
        if self._place < end:  # the queue ends here
            self._place = ahead
        if not self._unsafe:
            self.safe = max(self.safe, self._place)

    def must_wait(self, place: int) -> None:
        """Note that losing the block at ``place`` now would be a loss."""
        self.safe = min(self.safe, place) if self._unsafe else place
        self._unsafe = True

    def _walk(
        self, after: KVCacheBlock | None, start: int, end: int
    ) -> Iterator[tuple[int, KVCacheBlock]]:
        blocks = self._pool.free_block_queue.iter_blocks_after(after)
        # In this order: the iterator must not be drawn for one more than is wanted.
        yield from zip(range(start, end), blocks, strict=False)
