"""``QueueScan``: looks through the head of the free queue, a bounded stretch per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_LEAST: Final = 64  # blocks looked at per step at least, and; chosen
_TIMES_TAKEN: Final = 3  # so many per block that the step took: faster than the queue moves
_MOST_BLANKS: Final = 1024  # empty blocks passed over in one step; chosen


class QueueScan:
    """Looks at each cached block near the head of the free queue once.

    A block that was looked at stays as it is until the engine takes it or a hit removes it, and
    what is freed stands behind all others. Only advice puts blocks in between: whoever does that
    says so (``start_again``, ``back_behind``).

    Args:
        pool: The live block pool.

    Attributes:
        reached: Cached blocks that stand before the next one.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.reached = 0
        self._pool = pool
        self._last: KVCacheBlock | None = None  # that was looked at
        self._before: KVCacheBlock | None = None  # the same, a step ago
        self._is_lost = False  # a hit took it
        self._seen: set[int] = set()  # ids of those that stand before the next one, or stood there

    def start_again(self) -> None:
        """Begin at the head."""
        self._last, self._is_lost, self.reached = None, False, 0
        self._seen.clear()

    def touched(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that a hit took ``blocks`` out of the queue; they may come back at its end."""
        if self._last is not None:
            hit = self._seen.intersection([block.block_id for block in blocks])
            self._seen -= hit
            self.reached = max(0, self.reached - len(hit))
            self._is_lost |= self._last.block_id in hit

    def evicted(self, count: int) -> bool:
        """Note that so many cached blocks left at the head; returns whether to begin there again,
        because the last one that was looked at is gone from its place."""
        self.reached = max(0, self.reached - count)
        last = self._last
        return last is not None and (
            self._is_lost or last.ref_cnt > 0 or last.next_free_block is None
        )

    def look(self, ahead: int, taken: int) -> list[KVCacheBlock]:
        """This step's part of the next ``ahead`` cached blocks, in the queue's order.

        Args:
            taken: Blocks that this step took from the head.
        """
        count = min(ahead - self.reached, _LEAST + _TIMES_TAKEN * taken)
        found: list[KVCacheBlock] = []
        blanks, last = _MOST_BLANKS, self._last
        self._before = last
        if count > 0:
            for block in self._pool.free_block_queue.iter_blocks_after(last):
                last = block
                if block.block_hash is not None:
                    found.append(block)
                elif blanks := blanks - 1:
                    continue
                if len(found) == count or not blanks:
                    break
        self._last = last
        self.reached += len(found)
        self._seen.update([block.block_id for block in found])
        return found

    def back_behind(self, block: KVCacheBlock | None, place: int) -> None:
        """Go on behind ``block``, before which ``place`` cached blocks stand with it; None: at the
        head."""
        if block is None:
            self.start_again()
        elif self._last is not None and place < self.reached:
            self._last, self._is_lost, self.reached = block, False, place

    def back_to(self, found: Sequence[KVCacheBlock], at: int) -> None:
        """Look at ``found[at]``, of the blocks that were looked at last, again in the next step."""
        self._last = found[at - 1] if at else self._before
        self.reached -= len(found) - at
