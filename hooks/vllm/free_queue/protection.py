"""Keeps protected blocks away from the head of vLLM's free queue. The head is scanned again only
when half of the blocks last seen there are gone. If hardly any unprotected block is free, the whole
queue is scanned once, and its blocks are evicted in order of protection; blocks freed later go
after them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain, compress, islice
from operator import not_
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.tables.protection import first_share
from ....graph.types import Keys
from ....graph.wire.advice import EvictionRanking
from ...keys import keys_in_pool
from ...link.mailbox import places_of
from ..index import hash_of, stands
from .window import Window, move_behind

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# ``ProtectedKeys``: the keys that a ranking or a caller protects.
#
# Which blocks are protected changes more slowly than the order of eviction, and an engine needs
# protection most when its sidecar is late. So protection is kept longer than the order. A caller's
# statement counts until a ranking knows that the request has ended, since that ranking knows all of
# its blocks.

_LOOK_THROUGH_S: Final = 1.0  # between two checks of callers' statements; chosen
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)
_Said = tuple[float, float]  # when a caller stated it, and when that request ended


class ProtectedKeys:
    """The keys that are protected, with their order of precedence."""

    def __init__(self, blocks: int, stale_s: float, clock: Callable[[], float]) -> None:
        self.evicted_protected = 0  # protected blocks that the engine evicted since its start
        self.stated_count = 0  # grows whenever callers state others
        self._stale_s = stale_s
        self._clock = clock
        # most keys that callers may state: as many as the last ranking may protect; before any, as
        # many as a sidecar protects until it knows the price
        self._most = int(first_share(blocks - 1) * blocks)
        self._stated: dict[int, _Said] = {}  # by key, the latest last
        self._over: set[int] = set()  # of these, keys whose last request is over
        self._looked_through = 0.0  # ts of the ranking by which these were looked through
        self._linked_since = -math.inf  # when the last ranking was made
        self._keys = _NO_KEYS
        self._place: dict[int, int] = {}  # of each protected key, the least precious first

    def __bool__(self) -> bool:
        return bool(self._place or self._stated)

    def __len__(self) -> int:
        return len(self._place) + len(self._stated)

    def adopt(self, ranking: EvictionRanking | None, linked_since: float) -> bool:
        """Protect the keys of ``ranking`` from now on, or none if it is None; returns whether the
        set changes. After a new connection, keys that the last ranking protected and the first new
        one does not stay protected for a while, like statements that no sidecar knows.
        """
        keys = _NO_KEYS if ranking is None else ranking.protected
        if keys is self._keys:
            return False
        news = keys.tobytes() != self._keys.tobytes()
        before, stated = self._place, self.stated_count
        if ranking is not None and ranking.may_keep is not None:
            self._most = ranking.may_keep
        if news:
            places = None if ranking is None else ranking.protected_places
            self._place = places_of(keys) if places is None else places
        self._forget_beyond_share()
        if ranking is not None and ranking.ts >= linked_since != self._linked_since:
            self._linked_since = linked_since
            self._keep_unheard(before.keys() - self._place.keys() - self._stated.keys())
        self._keys = keys
        return news or self.stated_count != stated

    def state(self, keys: Sequence[int]) -> None:
        """Protect the keys that the caller of a starting request states, until a ranking knows that
        the request has ended.
        """
        stated, said = self._stated, (self._clock(), math.inf)
        self.stated_count += not stated.keys() >= set(keys)
        for key in reversed(keys):  # if there are too many, a prompt's last ones are forgotten
            stated.pop(key, None)
            stated[key] = said
        self._over.difference_update(keys)
        self._forget_beyond_share()

    def over(self, keys: Sequence[int]) -> None:
        """Note that a request which stated these keys ended; the sidecar was told before."""
        stated, now = self._stated, self._clock()
        self.stated_count += not stated.keys() >= set(keys)
        for key in reversed(keys):
            said, _ = stated.pop(key, (now, now))
            stated[key] = said, now
        self._over.update(keys)
        self._forget_beyond_share()

    def stated_among(self, blocks: Sequence[KVCacheBlock]) -> Sequence[KVCacheBlock]:
        """Return those of some cached blocks that a caller's statement protects."""
        stated = self._stated
        hashes = list(map(hash_of, blocks)) if stated else []
        keys = keys_in_pool(hashes)
        if stated.keys().isdisjoint(keys):
            return ()
        return list(compress(blocks, map(stated.__contains__, keys)))

    def stated_keys(self) -> Keys:
        return np.fromiter(self._stated, np.uint64, len(self._stated))

    def look_through(self, ranking: EvictionRanking | None, linked_since: float) -> bool:
        """Forget statements that ``ranking`` takes into account, and very old ones; returns whether
        any was forgotten. The sidecar may have missed statements from before ``linked_since``.

        Age alone is no reason, since a sidecar may be late on busy cores. Only keys whose request
        has ended are checked; there may be many others, and they still count.
        """
        as_of = self._clock() if ranking is None else ranking.ts
        if not self._over or as_of - self._looked_through < _LOOK_THROUGH_S:
            return False
        self._looked_through = as_of
        known_of = -math.inf if ranking is None else ranking.known_of
        oldest, stated = self._clock() - self._stale_s, self._stated
        settled = []
        for key in self._over:
            said, over = stated[key]
            if over <= oldest or (linked_since < said and over < known_of):
                settled.append(key)
        self.stated_count += bool(settled)
        for key in settled:
            del stated[key]
        self._over.difference_update(settled)
        return bool(settled)

    def parted(self, blocks: list[KVCacheBlock]) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Split ``blocks`` into protected ones and others, each in their order. Usually none is
        protected, which one check on the whole list shows.
        """
        if not self:
            return [], blocks
        hashes = list(map(hash_of, blocks))
        keys = keys_in_pool(list(filter(None, hashes)))
        if self._place.keys().isdisjoint(keys) and self._stated.keys().isdisjoint(keys):
            return [], blocks
        place, stated, of_cached = self._place, self._stated, iter(keys)
        marks = [
            block_hash is not None and ((key := next(of_cached)) in place or key in stated)
            for block_hash in hashes
        ]
        return list(compress(blocks, marks)), list(compress(blocks, map(not_, marks)))

    def ranked(self, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        keys, place = keys_in_pool(list(map(hash_of, blocks))), self._place
        ranks = np.fromiter((place.get(key, -1) for key in keys), np.int64, len(keys))
        return [blocks[at] for at in ranks.argsort(kind="stable").tolist()]

    def evicted(self, keys: Sequence[int]) -> None:
        place, stated = self._place, self._stated
        if place or stated:
            self.evicted_protected += sum(map(place.__contains__, keys))
        if stated:
            self.evicted_protected += sum(key in stated and key not in place for key in keys)

    def reset(self) -> None:
        self.stated_count += 1
        self._keys, self._place = _NO_KEYS, {}
        self._stated.clear()
        self._over.clear()

    def _keep_unheard(self, keys: Collection[int]) -> None:
        """Keep what an earlier sidecar protected, of which the one that ranks now may not know."""
        self.stated_count += 1
        self._most = max(self._most, len(keys))
        unheard = dict.fromkeys(keys, (-math.inf, self._clock()))
        self._stated.update(unheard)
        self._over.update(unheard)
        self._forget_beyond_share()

    def _forget_beyond_share(self) -> None:
        """Forget what was stated first, where callers state more than may be kept besides what the
        ranking protects.
        """
        stated, place, room = self._stated, self._place, max(0, self._most - len(self._place))
        if len(stated) <= room:
            return
        alone = [key for key in stated if key not in place]
        for key in alone[: max(0, len(alone) - room)]:
            del stated[key]
            self._over.discard(key)
            self.stated_count += 1


class HeadGuard:
    """Moves protected blocks that the engine would take next to the back of the queue.

    If no other block is free, the least precious ones are moved to the head; a block that becomes
    free then goes before them.
    """

    def __init__(self, pool: BlockPool, window: Window, protection: ProtectedKeys) -> None:
        self.moved = 0  # blocks moved since the engine's start
        # told the numbers of blocks that were moved to the back
        self.relaid: Callable[[Sequence[int]], object] = len
        # called when blocks were laid before those that stood at the head
        self.covered: Callable[[], object] = int
        self._ready: set[int] = set()  # ids of those that stand from the marker on
        self._ready_for = 0  # so many blocks, from the marker on, can go first
        self._pool = pool
        self._window = window
        self._protection = protection
        self._marker: tuple[KVCacheBlock, bytes] | None = None  # of what was seen at the head
        self._only_protected_are_free = False
        self._next: deque[tuple[KVCacheBlock, bytes]] = deque()  # protected, the next first; hashes
        self._known: dict[int, bytes] = {}  # hashes of all that stood in the queue then, by number

    @property
    def reach(self) -> int:
        return self._window.reach

    @property
    def stands(self) -> bool:
        """Whether anything seen in the queue is relied on: unprotected blocks at the head, or that
        only protected blocks are free.
        """
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
            self.to_back(protected)

    def forget_head(self, *, and_who_is_free: bool = False) -> None:
        """Scan the head again before the next step. With ``and_who_is_free``, also forget that only
        protected blocks were free, since others may have moved since.
        """
        self._marker = None
        self._next.clear()
        self._known.clear()
        if and_who_is_free:
            self._only_protected_are_free = False

    def to_back(self, protected: list[KVCacheBlock]) -> None:
        """Move free protected blocks to the back of the queue, the most precious last."""
        ids = [block.block_id for block in protected]
        place, moving = self._pool.free_block_queue.fake_free_list_tail.prev_free_block, set(ids)
        while place.block_id in moving:
            place = place.prev_free_block
        self.moved += move_behind(place, self._protection.ranked(protected))
        self.relaid(ids)

    def freed(self) -> None:
        """Note that blocks were freed: they go before the protected ones if no other is free."""
        if self._only_protected_are_free:
            self._let_go_first_what_came_last()

    def touched(self, ids: Sequence[int]) -> bool:
        """Note that blocks were used again, from any position in the queue; returns whether the
        head must be scanned again.
        """
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
        if len(blanks) >= 2 * self.reach:  # look again once they are gone
            self.forget_head(and_who_is_free=True)
        elif others:
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
