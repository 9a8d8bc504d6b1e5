"""``Window``: a ranking's next victims, at the head of vLLM's free queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.messages.advice import EvictionRanking
from ....graph.types import Keys
from ..observe.index import BlockIndex

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_WINDOW: Final = 4096  # blocks; chosen
_LEAST: Final = 512  # victims, however few a step takes: laid anew once in many steps; chosen
_FADE: Final = 0.98  # what the largest step of late counts, one step later; chosen
_SCAN_PER_VICTIM: Final = 2  # ranked keys looked at per victim wanted, at most, per step; chosen
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)


class Window:
    """The victims that stand at the head; laid anew for a new ranking, or when few are left.

    Args:
        pool: The live block pool.
        index: Finds a ranked key's block.
        blocks_per_step: The most blocks that one engine step can allocate.
        is_stated: Whether a caller's statement on a key counts, which no ranking overrules.

    Attributes:
        reach: The most blocks that the next step can take.
        prompts: Of them, those of prompts that it can begin or go on with.
        laid: Blocks moved to the head since the engine's start.
        recycled: Ranked blocks left alone since then: gone, reused, referenced, or used since.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: BlockIndex,
        blocks_per_step: int,
        is_stated: Callable[[int], bool],
    ) -> None:
        self.reach, self.prompts = blocks_per_step, 0
        self._most = min(2 * blocks_per_step, MAX_WINDOW)
        self._largest_step = float(blocks_per_step)  # of late; nothing is known yet
        self.laid = 0
        self.recycled = 0
        self._pool = pool
        self._index = index
        self._is_stated = is_stated
        self._order = _NO_KEYS
        self._next = 0  # place in the order of the next victim
        self._victims: dict[int, tuple[int, KVCacheBlock]] = {}  # by block id: (key, block)
        self._marker: tuple[int, KVCacheBlock] | None = None  # the first of the last victims
        self._last: set[int] = set()  # those that stand there still, by block id
        self._due = False

    @property
    def size(self) -> int:
        """Victims that it holds at most: what two steps of late took, or what prompts need."""
        return min(self._most, max(_LEAST, 2 * int(self._largest_step), self.prompts))

    def step_ended(self, evicted: int) -> None:
        """Note that a step has taken all its blocks, and evicted so many by that."""
        self._largest_step = max(float(evicted), _FADE * self._largest_step)

    def follows(self, ranking: EvictionRanking) -> bool:
        """Whether the victims are this ranking's."""
        return ranking.order is self._order  # not the epoch: a restarted sidecar counts anew

    def adopt(self, ranking: EvictionRanking) -> None:
        """Follow ``ranking`` from now on."""
        self._order, self._next = ranking.order, 0
        self._victims, self._marker = {}, None
        self._due = True

    def reset(self) -> None:
        """Follow no ranking."""
        self._order, self._next = _NO_KEYS, 0
        self._victims, self._marker, self._due = {}, None, False

    @property
    def stands(self) -> bool:
        """Whether the last of its victims were seen at the head, and not to be gone."""
        return self._marker is not None

    @property
    def suffices(self) -> bool:
        """Whether no step takes more blocks than the window has."""
        return self._marker is not None and len(self._last) >= self.reach

    def touched(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again, wherever in the queue they stood; returns whether
        fewer of the last victims are left."""
        before = len(self._last)
        self._last.difference_update(ids)
        fewer = len(self._last) < before and self._marker is not None
        self._due = self._due or (fewer and not self.suffices)
        return fewer

    def falls_due(self) -> bool:
        """Whether the window is due to be laid: notes it if most of the victims are gone."""
        if self._marker is not None and not self._holds(*self._marker):
            self._marker = None
            self._due = True
        more = self.prompts > len(self._victims) and self._next < len(self._order)
        return self._due or more

    def lay(self, blanks: int, known_of: float) -> bool:
        """Move the next victims to the head, behind ``blanks`` blank blocks there; returns whether
        any moved.

        Args:
            known_of: The ranking knows the events before this time.
        """
        window = {
            i: (key, block)
            for i, (key, block) in self._victims.items()
            if self._holds(key, block) and self._may_go(key, block, known_of)
        }
        kept, size = len(window), self.size
        self._fill(window, size, known_of)
        self._victims = window
        self._due = self._next < len(self._order) and len(window) < size // 2
        if len(window) == kept:
            return False  # nothing new: what is left of the window stands where it stood
        self._to_front(blanks, [block for _, block in window.values()])
        self.laid += len(window) - kept
        last = min((len(window) + 1) // 2, max(1, 2 * int(self._largest_step)))
        self._marker = list(window.values())[len(window) - last]
        self._last = set(list(window)[len(window) - last :])
        return True

    def _holds(self, key: int, block: KVCacheBlock) -> bool:
        return self._index.find(key) is block

    def _may_go(self, key: int, block: KVCacheBlock, known_of: float) -> bool:
        """Whether a ranking that knows the events before ``known_of`` may move this block.

        A block that was used since stays where its use put it: the ranking does not know of that
        use. Nor does a ranking overrule a caller's statement that it does not know of.
        """
        return self._index.freed_at(block) <= known_of and not self._is_stated(key)

    def _fill(
        self, window: dict[int, tuple[int, KVCacheBlock]], size: int, known_of: float
    ) -> None:
        """Add the ranking's next free blocks to ``window``, up to ``size``."""
        start, find = self._next, self._index.find
        scan = self._order[start : start + _SCAN_PER_VICTIM * size].tolist()
        taken = 0
        for key in scan:
            if len(window) >= size:
                break
            taken += 1
            block = find(key)
            if block is None or not self._may_go(key, block, known_of):
                self.recycled += 1
            else:
                window.setdefault(block.block_id, (key, block))
        self._next = start + taken

    def _to_front(self, blanks: int, victims: list[KVCacheBlock]) -> None:
        queue = self._pool.free_block_queue
        taken = queue.popleft_n(blanks)
        try:
            for block in victims:
                queue.remove(block)
                taken.append(block)
        finally:  # whatever happens, no block that left the queue stays out of it
            queue.prepend_n(taken)
