"""Keeps protected blocks away from the head of vLLM's free queue.

Looking at the head costs time, so it is looked at only when half of the blocks that were last seen
there are gone. Where hardly any block is free but protected ones, the whole queue is looked through
one time, and the protected blocks that it held then go in their order; those freed later follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from ..pool.found_blocks import hash_of, stands
from .protected_keys import ProtectedKeys
from .splice import move_behind

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


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
        self._marker: tuple[KVCacheBlock, bytes] | None = None  # of what was seen at the head
        self._only_protected_are_free = False
        self._next: deque[tuple[KVCacheBlock, bytes]] = deque()  # protected, the next first; hashes
        self._known: dict[int, bytes] = {}  # hashes of all that stood in the queue then, by number

    @property
    def stands(self) -> bool:
        """Whether anything that was seen of the queue is relied on: what can go first at the head,
        or all of it."""
        return self._marker is not None or self._only_protected_are_free

    def step(self) -> None:
        """Ensure that the next step takes no protected block, if any other is free."""
        if not self._protection:
            self.forget_head(and_who_is_free=True)
            return
        if self._only_protected_are_free and self._known:
            self._let_go_first_what_came_last()
        if self._head_is_clear():
            return
        protected, others = self._look(2 * self.reach if self._next else None)
        self._only_protected_are_free = len(others) < self.reach
        if self._only_protected_are_free:
            if not self._next:  # all of the queue was looked at
                ranked = self._protection.ranked(protected)
                self._next.extend(zip(ranked, map(hash_of, ranked), strict=True))
                self._known = {block.block_id: hash_of(block) for block in chain(others, ranked)}
            self._least_precious_first(others)
            return
        self._next.clear()
        self._known.clear()
        if protected:
            self._to_back(protected, others[-1])

    def forget_head(self, *, and_who_is_free: bool = False) -> None:
        """Look at the head again before the next step.

        Args:
            and_who_is_free: Forget as well whether only protected blocks were free: others may
                have moved since.
        """
        self._marker = None
        self._next.clear()
        self._known.clear()
        if and_who_is_free:
            self._only_protected_are_free = False

    def freed(self) -> None:
        """Note that blocks were given back: they go before the protected ones if no other
        is free."""
        if self._only_protected_are_free:
            self._let_go_first_what_came_last()

    def touched(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again, wherever in the queue they stood; returns whether
        the head is to be looked at again."""
        for number in ids if self._known else ():
            self._known.pop(number, None)  # it is freed to the back again
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
        if stands(*self._marker):
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
        self._marker, self._ready_for = (ready[0], hash_of(ready[0])), self.reach
        self._ready = {block.block_id for block in ready}

    def _to_back(self, protected: list[KVCacheBlock], last_other: KVCacheBlock) -> None:
        """Move some protected blocks to the back, the most precious last.

        Args:
            last_other: Of the others that were seen; if the queue ends with one of ``protected``,
                behind it stand no others.
        """
        back = self._pool.free_block_queue.fake_free_list_tail.prev_free_block
        place = last_other if protected[-1] is back else back
        self.moved += move_behind(place, self._protection.ranked(protected))
        self.relaid([block.block_id for block in protected])

    def _least_precious_first(self, others: list[KVCacheBlock]) -> None:
        """Lay as many protected blocks as two steps can take behind ``others``, in their order."""
        while self._next and not stands(*self._next[0]):
            self._next.popleft()
        standing = (block for block, block_hash in self._next if stands(block, block_hash))
        chosen, lapsed = self._protection.parted(list(islice(standing, 2 * self.reach)))
        if lapsed:
            self._next.clear()  # look at all of the queue next time
        self._to_front(others + chosen)
        if chosen:
            self._mark(chosen[len(chosen) // 2 :])

    def _let_go_first_what_came_last(self) -> None:
        """Move blocks that are not protected, and became free since the queue was looked through,
        to its head.

        The beginning of a chain may be protected, and is freed after the rest of it.
        """
        queue, known = self._pool.free_block_queue, self._known
        new: list[KVCacheBlock] = []
        block = queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            block_hash = hash_of(block)
            if block_hash is not None and known.get(block.block_id) is block_hash:
                break  # what stands before it was seen
            new.append(block)
            block = block.prev_free_block
        if not new:
            return
        known.update((block.block_id, hash_of(block)) for block in new)
        _, others = self._protection.parted(new[::-1])
        blanks = self._blanks() if others else []
        if others and len(blanks) < 2 * self.reach:
            there = {block.block_id for block in blanks}
            self._to_front(blanks + [block for block in others if block.block_id not in there])

    def _blanks(self) -> list[KVCacheBlock]:
        """The empty blocks at the head, which always go first."""
        blanks: list[KVCacheBlock] = []
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if block.block_hash is not None or len(blanks) == 2 * self.reach:
                break
            blanks.append(block)
        return blanks

    def _to_front(self, blocks: list[KVCacheBlock]) -> None:
        if moved := move_behind(self._pool.free_block_queue.fake_free_list_head, blocks):
            self.moved += moved
            self.covered()
