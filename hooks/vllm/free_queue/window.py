"""``Window``: a ranking's next victims, at the head of vLLM's free queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.messages.advice import EvictionRanking
from ....graph.types import Keys
from ..observe.index import BlockIndex
from .splice import move_behind

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MAX_WINDOW: Final = 4096  # blocks; chosen
_LEAST: Final = 512  # victims, however few a step takes: laid anew once in many steps; chosen
_STEPS: Final = 1.5  # that it suffices for: a ranking comes every few of them; chosen
_FADE: Final = 0.98  # what the largest step of late counts, one step later; chosen
_SCAN_PER_VICTIM: Final = 2  # ranked keys looked at per victim of a window, at most; chosen
_LOOKED_AT_ONCE: Final = 64  # ranked keys at least: one pass costs as much as 30 of them; chosen
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)


Victim = tuple["KVCacheBlock", object]  # and its hash, as it was when it was laid


class Window:
    """The victims that stand at the head; laid anew for a new ranking, or when few are left.

    Args:
        pool: The live block pool.
        index: Finds a ranked key's block.
        blocks_per_step: The most blocks that one engine step can allocate.
        stated: Which of some blocks a caller's statement protects, which no ranking overrules.

    Attributes:
        reach: The most blocks that the next step can take.
        prompts: Of them, those of prompts that it can begin or go on with.
        steps: Steps as large as those of late that it suffices for.
        laid_behind: Told behind which victim new ones were laid, None at the head, and how many
            victims stand there then.
        laid: Blocks moved to the head since the engine's start.
        recycled: Ranked blocks left alone since then: gone, reused, referenced, or used since.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: BlockIndex,
        blocks_per_step: int,
        stated: Callable[[Sequence[KVCacheBlock]], Sequence[KVCacheBlock]],
    ) -> None:
        self.reach, self.prompts = blocks_per_step, 0
        self._blocks_per_step = blocks_per_step
        self._largest_step = float(blocks_per_step)  # of late; nothing is known yet
        self.laid = 0
        self.recycled = 0
        self._pool = pool
        self._index = index
        self._stated = stated
        self._order = _NO_KEYS
        self._next = 0  # place in the order of the next victim
        self._victims: dict[int, Victim] = {}  # by block id
        self._marker: Victim | None = None  # the first of the last victims
        self._last: set[int] = set()  # those that stand there still, by block id
        self._due = False
        self.steps = _STEPS
        self.laid_behind: Callable[[KVCacheBlock | None, int], None] = _nobody_asks

    @property
    def size(self) -> int:
        """Victims that it holds at most: what ``steps`` of late took, or what prompts need."""
        most = min(MAX_WINDOW, int(max(2, self.steps) * self._blocks_per_step))
        return min(most, max(_LEAST, int(self.steps * self._largest_step), self.prompts))

    def step_ended(self, evicted: int) -> None:
        """Note that a step has taken all its blocks, and evicted so many by that."""
        self._largest_step = max(float(evicted), _FADE * self._largest_step)

    def follows(self, ranking: EvictionRanking) -> bool:
        """Whether the victims are this ranking's."""
        return ranking.order is self._order  # not the epoch: a restarted sidecar counts anew

    def adopt(self, ranking: EvictionRanking, before: Sequence[Victim] = ()) -> None:
        """Follow ``ranking`` from now on; its victims go behind those of ``before``."""
        self._order, self._next = ranking.order, 0
        self._victims = {victim[0].block_id: victim for victim in before}
        self._marker = None
        self._due = True

    def next(self, steps: int) -> list[Victim]:
        """The victims that so many steps take."""
        standing = filter(_stands, self._victims.values())
        return list(islice(standing, steps * max(self.reach, int(self._largest_step))))

    def reset(self) -> None:
        """Follow no ranking."""
        self._order, self._next = _NO_KEYS, 0
        self._victims, self._marker, self._due = {}, None, False

    @property
    def stands(self) -> bool:
        """Whether the last of its victims were seen at the head, and not to be gone."""
        return self._marker is not None

    @property
    def has_victims(self) -> bool:
        """Whether any block was laid, and may be there."""
        return bool(self._victims)

    @property
    def suffices(self) -> bool:
        """Whether no step takes more blocks than the window has."""
        return self._marker is not None and len(self._last) >= self.reach

    def touched(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again, wherever in the queue they stood; returns whether
        fewer of the last victims are left."""
        for block_id in ids:
            self._victims.pop(block_id, None)
        before = len(self._last)
        self._last.difference_update(ids)
        fewer = len(self._last) < before and self._marker is not None
        self._due = self._due or (fewer and not self.suffices)
        return fewer

    def falls_due(self) -> bool:
        """Whether the window is due to be laid: notes it if most of the victims are gone."""
        if self._marker is not None and not _stands(self._marker):
            self._marker = None
            self._due = True
        more = self.prompts > len(self._victims) and self._next < len(self._order)
        return self._due or more

    def lay(self, blanks: int, known_of: float) -> bool:
        """Move the next victims to the head, behind those that are left there and ``blanks`` blank
        blocks; returns whether any moved.

        Args:
            known_of: The ranking knows the events before this time.
        """
        window = self._left(known_of)
        kept, size = len(window), self.size
        last_kept = next(reversed(window.values()))[0] if window else None
        self._fill(window, size, known_of)
        self._victims = window
        self._due = self._next < len(self._order) and len(window) < size // 2
        if len(window) == kept:
            return False  # nothing new: what is left of the window stands where it stood
        new = [block for block, _ in islice(window.values(), kept, None)]
        move_behind(last_kept or self._last_blank(blanks), new)
        self.laid_behind(last_kept, kept)
        self.laid += len(new)
        last = min((len(window) + 1) // 2, max(1, 2 * int(self._largest_step)))
        self._last = set(islice(window, len(window) - last, None))
        self._marker = next(islice(window.values(), len(window) - last, None))
        return True

    def _last_blank(self, blanks: int) -> KVCacheBlock:
        """The last of the blank blocks at the head, or the queue's fake head."""
        queue = self._pool.free_block_queue
        blank: KVCacheBlock = queue.fake_free_list_head
        for block in islice(queue.iter_blocks_after(None), blanks):
            blank = block
        return blank

    def _left(self, known_of: float) -> dict[int, Victim]:
        """Victims that stand there still, and that a ranking which knows the events before
        ``known_of`` may move.

        A block that was used since stays where its use put it: the ranking does not know of that
        use. Nor does a ranking overrule a caller's statement that it does not know of.
        """
        freed_at = self._index.freed_at
        left = {
            victim[0].block_id: victim
            for victim in filter(_stands, self._victims.values())
            if freed_at(victim[0]) <= known_of
        }
        for block in self._stated([block for block, _ in left.values()]):
            del left[block.block_id]
        return left

    def _fill(self, window: dict[int, Victim], size: int, known_of: float) -> None:
        """Add the ranking's next free blocks to ``window``, up to ``size``."""
        most = _SCAN_PER_VICTIM * size
        while len(window) < size and most > 0:
            count = min(most, max(size - len(window), _LOOKED_AT_ONCE))
            keys = self._order[self._next : self._next + count]
            if not len(keys):
                return
            looked_at = self._add(window, size, keys, known_of)
            self._next += looked_at
            most -= looked_at

    def _add(self, window: dict[int, Victim], size: int, keys: Keys, known_of: float) -> int:
        """Add the free blocks of ``keys``, until there are ``size``; returns how many keys that
        took."""
        found, before = self._index.find_unused(keys, known_of), len(window)
        stated = {block.block_id for block in self._stated([block for _, block in found])}
        looked_at = len(keys)
        for place, block in found:
            if block.block_id not in stated:
                window.setdefault(block.block_id, (block, block.block_hash))
                if len(window) == size:
                    looked_at = place + 1
                    break
        self.recycled += looked_at - (len(window) - before)
        return looked_at


def _stands(victim: Victim) -> bool:
    """Whether a victim is free still, with the same content."""
    block, block_hash = victim
    return (
        not block.ref_cnt and block.next_free_block is not None and block.block_hash is block_hash
    )


def _nobody_asks(block: KVCacheBlock | None, place: int) -> None:
    pass
