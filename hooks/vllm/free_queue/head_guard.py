"""Keeps protected blocks away from the head of vLLM's free queue.

What is protected changes more slowly than the order in which blocks should go, and an engine needs
it most when its sidecar is late: so it is remembered longer, and a caller's word counts until a
sidecar can have its say. Looking is what costs, so the head is looked at only when half of the
blocks that were last seen there are gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.messages.advice import EvictionRanking
from ....graph.types import Keys
from ...keys import key_in_pool
from ..observe.index import BlockIndex
from ..settings import PROTECT_STALE_S

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_HEARD_S: Final = 10.0  # chosen: a ranking this much younger knows of a request, on busy cores too
_LOOK_THROUGH_S: Final = 1.0
_MOST_STATED: Final = 0.5  # of a pool, as much as a sidecar protects by default
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)


class HeadGuard:
    """Moves protected blocks that stand where the engine will take next to the queue's back.

    Where no other block is free, the least precious are laid at the head; a block that becomes
    free then goes before them.

    Args:
        pool: The live block pool.
        index: Finds a protected key's block.
        blocks_per_step: The most blocks that one engine step can allocate.
        stale_s: How long a caller's word counts where no sidecar heard it.
        clock: Monotonic seconds, the clock that rankings are dated in.

    Attributes:
        moved: Blocks moved since the engine's start.
        evicted_protected: Protected blocks that the engine evicted since its start.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: BlockIndex,
        blocks_per_step: int,
        stale_s: float = PROTECT_STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.moved = 0
        self.evicted_protected = 0
        self._pool = pool
        self._index = index
        self._blocks_per_step = blocks_per_step
        self._stale_s = stale_s
        self._clock = clock
        self._most_stated = int(_MOST_STATED * len(pool.blocks))
        self._stated: dict[int, float] = {}  # key → when, the latest last
        self._looked_through = 0.0  # ts of the ranking by which these were looked through
        self._keys = _NO_KEYS
        self._place: dict[int, int] = {}  # of each protected key, the least precious first
        self._marker: tuple[KVCacheBlock, object] | None = None  # of what was seen at the head
        self._only_protected_are_free = False

    def adopt(self, ranking: EvictionRanking | None) -> None:
        """Protect what ``ranking`` does from now on; None: nothing."""
        keys = _NO_KEYS if ranking is None else ranking.protected
        if keys is self._keys:
            return
        if not np.array_equal(keys, self._keys):
            self._place = {key: place for place, key in enumerate(keys.tolist())}
            self._marker = None
        self._keys = keys

    def state(self, keys: Sequence[int]) -> None:
        """A caller says that these are protected: true until a sidecar that heard it ranks them."""
        now, stated = self._clock(), self._stated
        for key in keys:
            stated.pop(key, None)
            stated[key] = now
        while len(stated) > self._most_stated:
            del stated[next(iter(stated))]

    def heeds(self, key: int) -> bool:
        """Whether a caller's word on it counts."""
        return key in self._stated

    def look_through(self, ranking: EvictionRanking | None, linked_since: float) -> None:
        """Leave to ``ranking`` what its sidecar heard, and forget what was stated long ago.

        Args:
            linked_since: What was stated before this, the sidecar may have missed.
        """
        as_of = self._clock() if ranking is None else ranking.ts
        if not self._stated or as_of - self._looked_through < _LOOK_THROUGH_S:
            return
        self._looked_through = as_of
        heard_of = -math.inf if ranking is None else as_of - _HEARD_S
        oldest = self._clock() - self._stale_s
        self._stated = {
            key: at
            for key, at in self._stated.items()
            if at > oldest and not linked_since < at < heard_of
        }

    def step(self) -> None:
        """See that what the next step can take is not protected, if anything else is free."""
        if not self._place and not self._stated:
            return
        if self._only_protected_are_free:
            self._let_go_first_what_came_last()
        if self._head_is_clear():
            return
        protected, others = self._look()
        self._only_protected_are_free = len(others) < self._blocks_per_step
        if self._only_protected_are_free:
            self._least_precious_first(others)
        elif protected:
            self._to_back(protected)

    def look_again(self) -> None:
        """What was seen at the head holds no more."""
        self._marker, self._only_protected_are_free = None, False

    def freed(self) -> None:
        """Blocks were given back: they go before the protected ones, if nothing else is free."""
        if self._only_protected_are_free:
            self._let_go_first_what_came_last()

    def evicted(self, keys: Sequence[int]) -> None:
        """Take note that the engine evicted ``keys``."""
        if self._place or self._stated:
            protected = (self._place, self._stated)
            self.evicted_protected += sum(any(key in each for each in protected) for key in keys)

    def clear(self) -> None:
        """Forget what is protected: the prefix cache was reset."""
        self._keys, self._place, self._marker = _NO_KEYS, {}, None
        self._stated = {}
        self._only_protected_are_free = False

    def _head_is_clear(self) -> bool:
        """Whether at least a step's blocks are left of those that were seen at the head."""
        if self._marker is None:
            return False
        block, block_hash = self._marker
        if block.ref_cnt == 0 and block.block_hash is block_hash:
            return True
        self._marker = None
        return False

    def _look(self) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """The protected blocks near the head, and the others there: as many as two steps can take.

        The bound is only a bound: more protected blocks than were named can stand there where the
        pool holds duplicates of them.
        """
        step = self._blocks_per_step
        protected: list[KVCacheBlock] = []
        others: list[KVCacheBlock] = []
        most = len(self._place) + len(self._stated) + 2 * step
        for looked, block in enumerate(self._pool.free_block_queue.iter_blocks_after(None)):
            if looked == most or len(others) == 2 * step:
                break
            (others if self._rank_of(block) is None else protected).append(block)
        if len(others) >= step:
            self._mark(others[-step])  # while it stands there, a step's blocks are left
        return protected, others

    def _rank_of(self, block: KVCacheBlock) -> int | None:
        """How precious a protected block is; None for one that is not protected."""
        block_hash = block.block_hash
        if block_hash is None:
            return None
        key = key_in_pool(block_hash)
        return self._place.get(key, -1 if key in self._stated else None)

    def _mark(self, block: KVCacheBlock) -> None:
        self._marker = (block, block.block_hash)

    def _to_back(self, protected: list[KVCacheBlock]) -> None:
        """Move some protected blocks to the back, the most precious last."""
        protected.sort(key=lambda block: self._rank_of(block) or 0)
        queue, taken = self._pool.free_block_queue, []
        try:
            for block in protected:
                queue.remove(block)
                taken.append(block)
        finally:  # whatever happens, no block that left the queue stays out of it
            queue.append_n(taken)
        self.moved += len(taken)

    def _least_precious_first(self, others: list[KVCacheBlock]) -> None:
        """Lay as many protected blocks as two steps can take behind ``others``, in their order."""
        chosen: list[KVCacheBlock] = []
        unranked = (key for key in self._stated if key not in self._place)
        for key in chain(unranked, self._place):
            if len(chosen) == 2 * self._blocks_per_step:
                break
            if (block := self._index.find(key)) is not None:
                chosen.append(block)
        self._to_front(others + chosen)
        if chosen:
            self._mark(chosen[len(chosen) // 2])

    def _let_go_first_what_came_last(self) -> None:
        """Blocks that became free behind the protected ones go before them."""
        queue = self._pool.free_block_queue
        found: list[KVCacheBlock] = []
        block = queue.fake_free_list_tail.prev_free_block
        while block is not None and block is not queue.fake_free_list_head:
            enough = len(found) == 2 * self._blocks_per_step
            if enough or block.block_hash is None or self._rank_of(block) is not None:
                break
            found.append(block)
            block = block.prev_free_block
        blanks = self._blanks() if found else []
        if found and len(blanks) < 2 * self._blocks_per_step:
            self._to_front(blanks + found[::-1])

    def _blanks(self) -> list[KVCacheBlock]:
        """The empty blocks at the head: they go first, always."""
        blanks: list[KVCacheBlock] = []
        for block in self._pool.free_block_queue.iter_blocks_after(None):
            if block.block_hash is not None or len(blanks) == 2 * self._blocks_per_step:
                break
            blanks.append(block)
        return blanks

    def _to_front(self, blocks: list[KVCacheBlock]) -> None:
        queue, taken = self._pool.free_block_queue, []
        try:
            for block in blocks:
                queue.remove(block)
                taken.append(block)
        finally:
            queue.prepend_n(taken)
        self.moved += len(taken)
