"""``ProtectedKeys``: the keys that a ranking or a caller protects.

Which blocks are protected changes more slowly than the order of eviction, and an engine needs the
protection most when its sidecar is late. Therefore it is remembered longer, and a caller's
statement counts until a ranking knows that the request is over: then it knows all of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.messages.advice import EvictionRanking
from ....graph.types import MOST_SHARE, Keys
from ...keys import key_in_pool, keys_in_pool
from ...link.held_ranking import places_of
from ..pool.found_blocks import hash_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_LOOK_THROUGH_S: Final = 1.0  # between two looks through what is stated; chosen
_NO_KEYS: Final[Keys] = np.empty(0, dtype=np.uint64)
_Said = tuple[float, float]  # when a caller stated it, and when that request was over


class ProtectedKeys:
    """The keys that are protected, and how precious each is.

    Args:
        blocks: Number of blocks in the pool.
        stale_s: Seconds for which a caller's statement counts if no sidecar knows of it.
        clock: Monotonic seconds, the clock that rankings are dated in.

    Attributes:
        evicted_protected: Protected blocks that the engine evicted since its start.
    """

    def __init__(self, blocks: int, stale_s: float, clock: Callable[[], float]) -> None:
        self.evicted_protected = 0
        self._stale_s = stale_s
        self._clock = clock
        self._most_stated = int(MOST_SHARE * blocks)  # until a sidecar knows them, and their price
        self._stated: dict[int, _Said] = {}  # by key, the latest last
        self._over: set[int] = set()  # the part of these whose last word was that it is over
        self._looked_through = 0.0  # ts of the ranking by which these were looked through
        self._linked_since = -math.inf  # when the last ranking was made
        self._keys = _NO_KEYS
        self._place: dict[int, int] = {}  # of each protected key, the least precious first

    def __bool__(self) -> bool:
        return bool(self._place or self._stated)

    def __len__(self) -> int:
        return len(self._place) + len(self._stated)

    def adopt(self, ranking: EvictionRanking | None, linked_since: float) -> bool:
        """Protect what ``ranking`` protects from now on, nothing if it is None; returns whether
        that changes.

        Args:
            linked_since: As in ``look_through``: what the last ranking protected and the first one
                after this time does not stays protected for as long as what no sidecar knows.
        """
        keys = _NO_KEYS if ranking is None else ranking.protected
        if keys is self._keys:
            return False
        news = keys.tobytes() != self._keys.tobytes()
        before = self._place
        if news:
            self._place = {} if ranking is None else places_of(ranking)
        if ranking is not None and ranking.ts >= linked_since != self._linked_since:
            self._linked_since = linked_since
            self._keep_unheard(before.keys() - self._place.keys() - self._stated.keys())
        self._keys = keys
        return news

    def state(self, keys: Sequence[int]) -> None:
        """Protect what the caller of a request that starts states, until a ranking knows that it is
        over."""
        stated, said = self._stated, (self._clock(), math.inf)
        for key in keys:
            stated.pop(key, None)
            stated[key] = said
        self._over.difference_update(keys)
        self._forget_beyond_share()

    def over(self, keys: Sequence[int]) -> None:
        """Note that a request which stated these is over, as the sidecar was told before."""
        stated, now = self._stated, self._clock()
        for key in keys:
            said, _ = stated.pop(key, (now, now))
            stated[key] = said, now
        self._over.update(keys)
        self._forget_beyond_share()

    def stated_among(self, blocks: Sequence[KVCacheBlock]) -> Sequence[KVCacheBlock]:
        """Those of some cached blocks that a caller's statement protects."""
        stated = self._stated
        hashes = list(map(hash_of, blocks)) if stated else []
        keys = keys_in_pool(hashes)
        if stated.keys().isdisjoint(keys):
            return ()
        return list(compress(blocks, map(stated.__contains__, keys)))

    def look_through(self, ranking: EvictionRanking | None, linked_since: float) -> bool:
        """Leave to ``ranking`` the statements that it knows, and forget those of long ago; returns
        whether there were any.

        Their age alone tells nothing: on busy cores a sidecar may be as far behind. Keys that were
        last stated, and not said to be over, count and are not looked at: those may be many.

        Args:
            linked_since: The sidecar may have missed what was stated before this time.
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
        for key in settled:
            del stated[key]
        self._over.difference_update(settled)
        return bool(settled)

    def parted(self, blocks: list[KVCacheBlock]) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """The protected ones of ``blocks``, and the others, each in their order.

        Usually none is, and then none is looked at by itself.
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
        """Protected blocks, the least precious first."""
        keys, place = keys_in_pool(list(map(hash_of, blocks))), self._place
        ranks = np.fromiter((place.get(key, -1) for key in keys), np.int64, len(keys))
        return [blocks[at] for at in ranks.argsort(kind="stable").tolist()]

    def rank_of(self, block: KVCacheBlock) -> int | None:
        """How precious a protected block is; None if it is not protected."""
        block_hash = block.block_hash
        if block_hash is None:
            return None
        key = key_in_pool(block_hash)
        return self._place.get(key, -1 if key in self._stated else None)

    def evicted(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``."""
        place, stated = self._place, self._stated
        if place or stated:
            self.evicted_protected += sum(map(place.__contains__, keys))
        if stated:
            self.evicted_protected += sum(key in stated and key not in place for key in keys)

    def reset(self) -> None:
        """Forget what is protected: the prefix cache was reset."""
        self._keys, self._place = _NO_KEYS, {}
        self._stated.clear()
        self._over.clear()

    def _keep_unheard(self, keys: Iterable[int]) -> None:
        """Keep what an earlier sidecar protected, of which the one that ranks now may not know."""
        unheard = dict.fromkeys(keys, (-math.inf, self._clock()))
        self._stated.update(unheard)
        self._over.update(unheard)
        self._forget_beyond_share()

    def _forget_beyond_share(self) -> None:
        """Forget what was stated first, where callers state more than their share of the pool."""
        stated = self._stated
        while len(stated) > self._most_stated:
            first = next(iter(stated))
            del stated[first]
            self._over.discard(first)
