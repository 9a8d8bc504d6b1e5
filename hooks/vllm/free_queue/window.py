"""``Window``: a ranking's next victims, at the head of vLLM's free queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, count, islice
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ....graph.types import Keys
from ....graph.wire.advice import BlockIds, EvictionRanking
from ..index import BlockIndex, FoundBlocks, hash_of, stands

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Victims:
    """Tracks consecutive blocks of the queue, which steps take from the front.

    A block that is still free, with its hash unchanged, is still at its position unless it was
    moved, and code that moves it calls ``forget``. All work is done on many blocks at once: a step
    of 16k tokens takes a thousand.
    """

    def __init__(self, pool_blocks: int) -> None:
        self.blocks: list[KVCacheBlock] = []  # in their order
        # bool `[pool_blocks]`, by number: which blocks are among them
        self.followed: npt.NDArray[np.bool_] = np.zeros(pool_blocks, dtype=bool)
        self.looked = 0  # how many of them, from the front, were looked at; see `look`
        self._hashes: list[bytes] = []
        self._ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def last(self) -> KVCacheBlock | None:
        if self.blocks and stands(self.blocks[-1], self._hashes[-1]):
            return self.blocks[-1]
        return None

    def add(self, found: FoundBlocks) -> None:
        """Track blocks that were moved behind the last one."""
        self.blocks += found.blocks
        self._hashes += found.hashes
        self._ids = np.concatenate((self._ids, found.ids))
        self.followed[found.ids] = True

    def drop_taken(self) -> None:
        """Forget the blocks at the front that were taken.

        Taken blocks come first, so that a few checks find the first that is left. A block that lost
        its hash in between, as after a failed load, can only make this drop more.
        """
        blocks, hashes = self.blocks, self._hashes
        if not blocks or hash_of(blocks[0]) is hashes[0]:
            return
        gone, there = 0, len(blocks)
        while there - gone > 1:
            middle = (gone + there) // 2
            if hash_of(blocks[middle]) is hashes[middle]:
                there = middle
            else:
                gone = middle
        self._keep(slice(there, None), slice(0, there))

    def keep_first(self, most: int) -> None:
        self._keep(slice(0, most), slice(most, None))

    def forget(self, ids: Sequence[int]) -> int:
        """Forget blocks that were used or moved; returns how many of these were tracked."""
        gone = int(self.followed[ids].sum()) if len(self) and len(ids) else 0
        if gone:
            self.followed[ids] = False
            left = self.followed[self._ids]
            marks = left.tolist()
            self.looked = sum(marks[: self.looked])
            self._ids = self._ids[left]
            self.blocks = list(compress(self.blocks, marks))
            self._hashes = list(compress(self._hashes, marks))
        return gone

    def look(self, most: int) -> FoundBlocks:
        """Return the next blocks that were not examined yet, ``most`` at most."""
        part = slice(self.looked, self.looked + most)
        found = FoundBlocks.told(self.blocks[part], self._hashes[part], self._ids[part])
        self.looked += len(found.blocks)
        return found

    def _keep(self, kept: slice, gone: slice) -> None:
        before = len(self.blocks)
        self.followed[self._ids[gone]] = False
        self._ids = self._ids[kept]
        del self.blocks[gone], self._hashes[gone]
        first = before - len(self.blocks) if kept.start else 0  # that were dropped from the front
        self.looked = min(max(0, self.looked - first), len(self.blocks))


_next_of: Final = attrgetter("next_free_block")


def move_behind(place: KVCacheBlock, blocks: Sequence[KVCacheBlock]) -> int:
    """Move free ``blocks`` directly behind ``place``, in their order; returns how many were moved.

    The queue links its blocks in both directions and counts them. Consecutive blocks are moved as
    one, and blocks already in position are left alone. If this is interrupted, the count is still
    right, and only the blocks being moved are outside the queue.
    """
    if not blocks:
        return 0
    moved = 0
    apart = map(is_not, map(_next_of, blocks), islice(blocks, 1, None))
    ends, start = list(compress(count(1), apart)), 0
    for end in chain(ends, (len(blocks),)):
        first, last = blocks[start], blocks[end - 1]
        before = first.prev_free_block
        if before is not place:
            after, behind = last.next_free_block, place.next_free_block
            assert before is not None
            assert after is not None
            assert behind is not None
            before.next_free_block, after.prev_free_block = after, before
            first.prev_free_block, last.next_free_block = place, behind
            place.next_free_block, behind.prev_free_block = first, last
            moved += end - start
        place, start = last, end
    return moved


MAX_WINDOW: Final = 4096  # blocks; chosen
LEAST_AHEAD: Final = 512  # victims if copies are made ahead, however few a step takes; chosen
_SPARE: Final = 64  # victims beyond what the next step can take: one pass examines as many; chosen
_STEPS_SPARE: Final = 4  # recent steps that these victims suffice for; chosen
AT_ONCE: Final = 256  # fewest victims moved in a step, if more are due; chosen
REACH_STEP: Final = 16  # blocks; one more request is no reason to rearrange; chosen
FADE: Final = 0.98  # per step, the weight left to the largest recent step; chosen
SCAN_PER_VICTIM: Final = 2  # most ranked keys examined per victim that is due; chosen
_LOOKED_AT_ONCE: Final = 64  # fewest ranked keys examined; one pass costs as much as 30; chosen
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)


class Window:
    """The victims at the head of the queue: a new ranking's, refilled when few are left.

    Victims that the next step may take are moved at once, the others in parts, one in each step.
    There are hardly more of them than one step can take, since the next ranking would move them
    again.
    """

    reach: int  # the most blocks that the next step can take
    prompts: int  # of these, the blocks for prompts that it can start or continue
    _largest_step: float  # in blocks, recently

    def __init__(
        self,
        pool: BlockPool,  # the live block pool
        index: BlockIndex,  # finds a ranked key's block
        blocks_per_step: int,  # the most blocks that one engine step can allocate
        # which of some blocks a caller's statement protects, which no ranking overrules
        stated: Callable[[Sequence[KVCacheBlock]], Sequence[KVCacheBlock]],
    ) -> None:
        self._blocks_per_step = blocks_per_step
        self._size_steps()
        self.laid = 0  # blocks moved to the head since the engine's start
        # ranked blocks left alone since then: gone, reused, referenced, or used since
        self.recycled = 0
        self._pool = pool
        self._index = index
        self._stated = stated
        self._followed = self._order = _NO_KEYS  # the ranking's keys that are still to be looked up
        self._holders: BlockIds | None = None  # numbers of the blocks that held these keys
        self._next = 0  # place in the order of the next victim
        self._victims = Victims(len(pool.blocks))
        self._due = False
        # steps as large as those of late for which victims are laid beforehand. What one takes for
        # prompts is known when these are looked up, and early enough to lay it
        self.ahead = 0
        # told of the victims when more are laid, and whether these are the first
        self.laid_more: Callable[[Victims, bool], None] = lambda victims, at_head: None

    @property
    def size(self) -> int:
        """Most victims to keep: what ``ahead`` steps take, or what prompts need. If ``ahead`` is 0,
        what the next step can take, and what some average steps take after it.
        """
        most = self._most
        if not self.ahead:
            return min(most, self.reach + max(_SPARE, int(_STEPS_SPARE * self._largest_step)))
        return min(most, max(LEAST_AHEAD, int(self.ahead * self._largest_step), self.prompts))

    def expect(self, decoding: int, prompts: int, loads: int) -> bool:
        """Note how many blocks the next step can take: for ``decoding`` requests, for ``prompts``,
        and for ``loads``, which take theirs at once. Returns whether that is more than before.
        """
        wanted = (1 + (decoding + prompts) // REACH_STEP) * REACH_STEP  # never none
        reach = min(self._blocks_per_step, wanted) + loads
        grown = reach > self.reach
        if grown or reach < self.reach - REACH_STEP:  # as in the last step, or nearly so
            self.reach = reach
        self.prompts = min(prompts, reach)
        return grown

    def step_ended(self, evicted: int) -> None:
        faded = FADE * self._largest_step
        self._largest_step = faded if faded > evicted else float(evicted)

    def follows(self, ranking: EvictionRanking) -> bool:
        return ranking.order is self._followed  # not the epoch: a restarted sidecar counts anew

    def adopt(self, ranking: EvictionRanking, carried: int = 0) -> Victims:
        """Follow ``ranking`` from now on; its victims go behind those of the last ranking that
        ``carried`` steps take. Returns the latter.
        """
        self._followed = self._order = ranking.order
        self._holders, self._next, self._due = ranking.order_blocks, 0, True
        self._victims.drop_taken()
        self._victims.keep_first(carried * max(self.prompts, int(self._largest_step)))
        if len(self._victims) and self._holders is not None:
            new = ~self._victims.followed[self._holders]  # a ranking may name all of them again
            self._order, self._holders = self._order[new], self._holders[new]
        return self._victims

    def reset(self) -> None:
        self._followed = self._order = _NO_KEYS
        self._holders, self._next = None, 0
        self._victims.keep_first(0)
        self._due = False

    @property
    def victims(self) -> Victims:
        """The blocks that were moved to the head, some of which may be gone."""
        return self._victims

    def still_suffices(self) -> bool:
        """Return whether no step takes more blocks than the window has; forgets those that are
        gone.
        """
        self._victims.drop_taken()
        return len(self._victims) >= self.reach

    @property
    def holds_enough(self) -> bool:
        """Whether the victims at the head suffice for the next step and no more are due, or the
        ranking names no others; forgets those that are gone.
        """
        if self.is_exhausted:
            return True
        return not self._due and self.still_suffices() and not self._is_low(len(self._victims))

    def forget(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again or moved, from any position in the queue; returns
        whether fewer victims are left.
        """
        return self._victims.forget(ids) > 0

    def forget_all(self) -> None:
        """Forget all victims, because other blocks were moved before them."""
        self._victims.keep_first(0)

    def falls_due(self) -> bool:
        if self.is_exhausted:
            return False
        self._victims.drop_taken()
        self._due = self._due or self._is_low(len(self._victims))
        return self._due

    @property
    def is_exhausted(self) -> bool:
        """Whether all of the ranking was looked at."""
        return self._next >= len(self._order)

    @property
    def is_settled(self) -> bool:
        """Whether all victims that were due for the last ranking were moved."""
        return not self._due or self.is_exhausted

    def find_anchor(self, known_of: float) -> KVCacheBlock | None:
        """Return the last victim that was not used since ``known_of``, the time up to which the
        ranking knows events; forgets those behind it.
        """
        victims, freed_at = self._victims, self._index.freed_at
        while len(victims):
            last = victims.last
            if last is not None and freed_at(last) <= known_of:
                return last
            victims.keep_first(-1)
        return None

    def lay(self, place: KVCacheBlock, known_of: float, least: int) -> None:
        """Move the next victims behind ``place``: the last victim, or else the last block that goes
        before any victim. The ranking knows the events before ``known_of``.

        Moves at least ``least`` at once, if the ranking has so many. If any blocks are protected,
        pass all that a step can take: moving them costs less than examining as many.
        """
        victims = self._victims
        left = len(victims)
        for found in self._next_victims(self._to_lay(left, least), known_of):
            move_behind(place, found.blocks)
            if len(victims) == left:
                self.laid_more(victims, not left)
            victims.add(found)
            place = found.blocks[-1]
        self.laid += len(victims) - left
        self._due = len(victims) + AT_ONCE <= self.size and self._next < len(self._order)

    def last_blank(self, blanks: int) -> KVCacheBlock:
        """Return the last of the blank blocks at the head, or the queue's fake head."""
        queue = self._pool.free_block_queue
        blank: KVCacheBlock = queue.fake_free_list_head
        for block in islice(queue.iter_blocks_after(None), blanks):
            blank = block
        return blank

    @property
    def _most(self) -> int:
        return min(MAX_WINDOW, max(2, self.ahead) * self._blocks_per_step)

    def _size_steps(self) -> None:
        self.reach, self.prompts = self._blocks_per_step, 0
        self._largest_step = float(self._blocks_per_step)  # nothing is known yet

    def _is_low(self, left: int) -> bool:
        if not self.ahead:
            return left < min(self.reach, self.size)
        return left < self.size // 2 or left < self.prompts

    def _to_lay(self, left: int, least: int) -> int:
        """How many victims to lay now, where ``left`` stand and ``least`` are to."""
        least = max(least, self.prompts, int(self.ahead * self._largest_step))
        return min(max(self.size, least) - left, max(AT_ONCE, least - left))

    def _next_victims(self, count: int, known_of: float) -> Iterator[FoundBlocks]:
        """The ranking's next free blocks, ``count`` in all, if there are so many."""
        most = SCAN_PER_VICTIM * count
        while count > 0 and most > 0:
            keys = self._order[self._next : self._next + min(most, max(count, _LOOKED_AT_ONCE))]
            if not len(keys):
                return
            found, looked_at = self._of_next(keys, count, known_of)
            self._next += looked_at
            self.recycled += looked_at - len(found.blocks)
            most -= looked_at
            count -= len(found.blocks)
            if found.blocks:
                yield found

    def _of_next(self, keys: Keys, count: int, known_of: float) -> tuple[FoundBlocks, int]:
        """At most ``count`` victims from the next ``keys``; how many keys that took."""
        holders = self._holders
        at = None if holders is None else holders[self._next : self._next + len(keys)]
        found = self._index.find_unused(keys, known_of, at, self._victims.followed)
        if stated := {block.block_id for block in self._stated(found.blocks)}:
            found = found.only(~np.isin(found.ids, list(stated)))
        if len(found.blocks) <= count:
            return found, len(keys)
        return found.first(count), found.places[count - 1] + 1
