"""Keeps protected blocks away from the head of vLLM's free queue.

Looking at the head costs time, so it is looked at only when half of the blocks that were last seen
there are gone. Where hardly any block is free but protected ones, all of the queue has to be looked
at once; after that, it is known which of them go next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from ..pool.found_blocks import hash_of
from .protected_keys import ProtectedKeys
from .splice import move_behind

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_LOOKED_AT: Final = 4  # times what a step takes, from the queue's back on; chosen


class HeadGuard:
    """Moves protected blocks that the engine would take next to the queue's back.

    If no other block is free, the least precious are laid at the head; a block that becomes free
    then goes before them.

    Args:
        pool: The live block pool.
        blocks_per_step: The most blocks that one engine step can allocate.
        protection: The keys that are protected; whoever changes them says so (``forget_head``).

    Attributes:
        moved: Blocks moved since the engine's start.
        reach: The most blocks that the next step can take.
        relaid: Told the numbers of blocks that were moved to the back.
        covered: Called when blocks were laid before those that stood at the head.
    """

    def __init__(self, pool: BlockPool, blocks_per_step: int, protection: ProtectedKeys) -> None:
        self.moved = 0
        self.relaid: Callable[[Sequence[int]], object] = len
        self.covered: Callable[[], object] = int
        self._ready: set[int] = set()  # ids of those that stand from the marker on
        self._ready_for = 0  # so many blocks, from the marker on, can go first
        self._pool = pool
        self.reach = blocks_per_step
        self._protection = protection
        self._marker: tuple[KVCacheBlock, object] | None = None  # of what was seen at the head
        self._only_protected_are_free = False
        self._next: deque[tuple[KVCacheBlock, bytes]] = deque()  # of these, which go; with hashes
        self._last: KVCacheBlock | None = None  # in the queue, when its back was looked at

    @property
    def stands(self) -> bool:
        """Whether blocks that can go first were seen at the head, and not to be gone."""
        return self._marker is not None

    def step(self) -> None:
        """Ensure that the next step takes no protected block, if any other is free."""
        if not self._protection:
            self.forget_head(and_who_is_free=True)
            return
        if self._only_protected_are_free:
            self._let_go_first_what_came_last()
        if self._head_is_clear():
            return
        protected, others = self._look(2 * self.reach if self._next else None)
        self._only_protected_are_free = len(others) < self.reach
        if self._only_protected_are_free:
            if not self._next:  # all of the queue was looked at
                ranked = self._protection.ranked(protected)
                self._next.extend(zip(ranked, map(hash_of, ranked), strict=True))
            self._least_precious_first(others)
            return
        self._next.clear()
        if protected:
            self._to_back(protected, others[-1])

    def forget_head(self, *, and_who_is_free: bool = False) -> None:
        """Look at the head again before the next step.

        Args:
            and_who_is_free: Forget as well whether only protected blocks were free: others may
                have moved since.
        """
        self._marker = self._last = None
        self._next.clear()
        if and_who_is_free:
            self._only_protected_are_free = False

    def freed(self) -> None:
        """Note that blocks were given back: they go before the protected ones if no other
        is free."""
        if self._only_protected_are_free and self._protection:
            self._let_go_first_what_came_last()

    def touched(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again, wherever in the queue they stood; returns whether
        the head is to be looked at again."""
        if self._marker is None:
            return False
        before = len(self._ready)
        self._ready.difference_update(ids)
        fewer = before - len(self._ready)
        self._ready_for -= fewer
        return fewer > 0 and self._ready_for < self.reach

    def _head_is_clear(self) -> bool:
        """Whether at least a step's blocks are left of those that were seen at the head."""
        if self._marker is None or self.reach > self._ready_for:
            return False
        block, block_hash = self._marker
        if block.ref_cnt == 0 and block.block_hash is block_hash:
            return True
        self._marker = None
        return False

    def _look(self, most: int | None) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """The protected blocks near the head, and the others there: as many as two steps can take.

        There can be several protected blocks per key: duplicates, and one in each group of layers.

        Args:
            most: Blocks to look at; None: until there are so many others.
        """
        step = self.reach
        protected: list[KVCacheBlock] = []
        others: list[KVCacheBlock] = []
        walk = islice(self._pool.free_block_queue.iter_blocks_after(None), most)
        while seen := list(islice(walk, 2 * step - len(others))):
            kept, free = self._protection.parted(seen)
            protected += kept
            others += free
        if len(others) >= step:
            self._mark(others[-step:])  # while the first stands there, a step's blocks are left
        return protected, others

    def _mark(self, ready: Sequence[KVCacheBlock]) -> None:
        self._marker, self._ready_for = (ready[0], ready[0].block_hash), self.reach
        self._ready = {block.block_id for block in ready}

    def _to_back(self, protected: list[KVCacheBlock], last_other: KVCacheBlock) -> None:
        """Move some protected blocks to the back, the most precious last.

        Args:
            last_other: Of the others that were seen; if the queue ends with one of ``protected``,
                behind it stand no others.
        """
        back = self._pool.free_block_queue.fake_free_list_tail.prev_free_block
        ends_so = any(block is back for block in reversed(protected))
        move_behind(last_other if ends_so else back, self._protection.ranked(protected))
        self.moved += len(protected)
        self.relaid([block.block_id for block in protected])

    def _least_precious_first(self, others: list[KVCacheBlock]) -> None:
        """Lay as many protected blocks as two steps can take behind ``others``, in their order."""
        while self._next and not _stands(*self._next[0]):
            self._next.popleft()
        standing = (block for block, laid_with in self._next if _stands(block, laid_with))
        chosen = list(islice(standing, 2 * self.reach))
        self._to_front(others + chosen)
        if chosen:
            self._mark(chosen[len(chosen) // 2 :])

    def _let_go_first_what_came_last(self) -> None:
        """Move blocks that became free behind the protected ones before them.

        The beginning of a chain may be protected, and is freed after the rest of it.
        """
        queue = self._pool.free_block_queue
        found: list[KVCacheBlock] = []
        behind = 0  # how many of these stand behind a protected block that was seen
        block = queue.fake_free_list_tail.prev_free_block
        if block is self._last:
            return  # nothing became free since
        for _ in range(_LOOKED_AT * self.reach):
            if block is None or block.block_hash is None:
                break
            if self._protection.rank_of(block) is None:
                found.append(block)
            else:
                behind = len(found)
            block = block.prev_free_block
        else:
            behind = behind or len(found)  # none was seen: all stand behind those further on
        found = found[:behind]
        blanks = self._blanks() if found else []
        if found and len(blanks) < 2 * self.reach:
            self._to_front(blanks + found[::-1])
        self._last = queue.fake_free_list_tail.prev_free_block

    def _blanks(self) -> list[KVCacheBlock]:
        """The empty blocks at the head, which always go first."""
        blanks: list[KVCacheBlock] = []
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if block.block_hash is not None or len(blanks) == 2 * self.reach:
                break
            blanks.append(block)
        return blanks

    def _to_front(self, blocks: list[KVCacheBlock]) -> None:
        move_behind(self._pool.free_block_queue.fake_free_list_head, blocks)
        self.moved += len(blocks)
        self.covered()


def _stands(block: KVCacheBlock, block_hash: bytes) -> bool:
    """Whether a block is free still, with the same content."""
    return block.ref_cnt == 0 and hash_of(block) is block_hash
