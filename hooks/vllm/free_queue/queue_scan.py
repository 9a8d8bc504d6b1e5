"""``QueueScan``: looks through the head of the free queue, a bounded stretch per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from ..pool.found_blocks import hash_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_LEAST: Final = 64  # blocks looked at per step at least, and; chosen
_TIMES_TAKEN: Final = 3  # so many per block that the step took: faster than the queue moves
_MOST_BLANKS: Final = 1024  # empty blocks passed over in one step; chosen
_id_of: Final = attrgetter("block_id")


class QueueScan:
    """Looks at each cached block near the head of the free queue once.

    A block that was looked at stays as it is until the engine takes it or a hit removes it, and
    what is freed stands behind all others. Only advice inserts blocks before the last one that was
    looked at: whoever lays them calls ``start_again``, and ``Victims.look`` looks at them.

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
        """Begin at the head, or behind what advice laid there."""
        self._last, self._is_lost, self.reached = None, False, 0
        self._seen.clear()

    def touched(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that a hit took ``blocks`` out of the queue; they may come back at its end."""
        if self._last is not None:
            hit = self._seen.intersection(map(_id_of, blocks))
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

    def look(
        self, ahead: int, taken: int, behind: KVCacheBlock | None = None
    ) -> list[KVCacheBlock]:
        """This step's part of the next ``ahead`` cached blocks, in the queue's order.

        Args:
            taken: Blocks that this step took from the head.
            behind: The last of those that advice laid at the head; None without.
        """
        count = min(ahead - self.reached, _LEAST + _TIMES_TAKEN * taken)
        if self._last is None:
            self._last = behind
        self._before = self._last
        found = self._next_cached(count) if count > 0 else []
        self.reached += len(found)
        self._seen.update(map(_id_of, found))
        return found

    def _next_cached(self, count: int) -> list[KVCacheBlock]:
        found: list[KVCacheBlock] = []
        blanks, walk = _MOST_BLANKS, self._pool.free_block_queue.iter_blocks_after(self._last)
        while len(found) < count and blanks:
            passed = list(islice(walk, min(count - len(found), blanks)))
            if not passed:
                break
            self._last = passed[-1]
            cached = list(compress(passed, map(hash_of, passed)))
            blanks -= len(passed) - len(cached)
            found += cached
        return found

    def back_to(self, found: Sequence[KVCacheBlock], at: int) -> None:
        """Look at ``found[at]``, of the blocks that were looked at last, again in the next step."""
        self._last = found[at - 1] if at else self._before
        self.reached -= len(found) - at
