"""Which block holds which key: from a ranking's keys to the pool's block objects."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from ....graph.types import Keys
from ...keys import array_in_pool, key_in_pool

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

_NOBODY: Final = 0  # id of vLLM's null block, which never holds a key
_NO_KEY: Final = 0  # that blank bytes read as
_MOST_PER_BLOCK: Final = 2  # entries: those of blocks that vLLM skipped are never evicted; chosen


class BlockIndex:
    """Blocks that entered the prefix cache, by key.

    An entry may be outdated, and is checked before use: ``find`` returns a block only while it
    still carries the key that it was noted with.

    Args:
        pool: The live block pool.
        clock: Monotonic seconds, the clock that rankings are dated in.
        hears_all: Whether every block that enters the prefix cache is noted here. Otherwise
            duplicates are looked for at each eviction.
    """

    def __init__(
        self,
        pool: BlockPool,
        clock: Callable[[], float] = time.monotonic,
        hears_all: bool = True,
    ) -> None:
        self._pool = pool
        self._hears_all = hears_all
        self._clock = clock
        self._ids: dict[int, int] = {}
        self._twice: set[int] = set()  # keys that more than one block may hold
        self._freed_at: list[float] = [-math.inf] * len(pool.blocks)  # by block id
        self._most = _MOST_PER_BLOCK * len(pool.blocks)

    def __len__(self) -> int:
        return len(self._ids)

    def cached(self, keys: Sequence[int], block_ids: Iterable[int]) -> None:
        """Note which blocks hold ``keys`` from now on."""
        ids, before = self._ids, len(self._ids)
        ids.update(zip(keys, block_ids, strict=False))
        if len(ids) - before < len(keys):
            self._twice.update(keys)
        if len(ids) > self._most:
            self._forget_outdated()

    def freed(self, block_ids: Iterable[int]) -> None:
        """Note that a request gives these blocks back now."""
        now, freed_at = self._clock(), self._freed_at
        for block_id in block_ids:
            freed_at[block_id] = now

    def remember(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """Note a chain of cached blocks that is freed now.

        Args:
            keys: Of the chain's blocks, from its start.
            block_ids: As many, or more.
        """
        self.cached(keys, block_ids)
        self.freed(block_ids[: len(keys)])

    def find(self, key: int) -> KVCacheBlock | None:
        """The free block that holds ``key``, or None if it is gone, reused or referenced."""
        block = self._pool.blocks[self._ids.get(key, _NOBODY)]
        if block.ref_cnt or block.next_free_block is None:
            return None
        block_hash = block.block_hash
        return None if block_hash is None or key_in_pool(block_hash) != key else block

    def find_unused(self, keys: Keys, since: float) -> list[tuple[int, KVCacheBlock]]:
        """The free blocks that hold ``keys`` and that no request gave back after ``since``, each
        with its key's place; checked as in ``find``."""
        blocks, freed_at = self._pool.blocks, self._freed_at
        ids = list(map(self._ids.get, keys.tolist(), repeat(_NOBODY)))
        held = [blocks[at] for at in ids]
        hashes = [
            None if block.ref_cnt or block.next_free_block is None else block.block_hash
            for block in held
        ]
        blank = bytes(len(next(filter(None, hashes), b"")))
        if not blank:
            return []
        same = (array_in_pool([each or blank for each in hashes]) == keys) & (keys != _NO_KEY)
        places = np.flatnonzero(same).tolist()
        return [(place, held[place]) for place in places if freed_at[ids[place]] <= since]

    def rediscover(self, hashes: Sequence[bytes]) -> None:
        """Remember what the prefix cache holds of a chain that was freed without a report.

        Args:
            hashes: Of the chain's blocks, from its start, as the prefix cache keeps them: with the
                group's id.
        """
        now, block_of = self._clock(), self._pool.cached_block_hash_to_block.get_one_block
        for block_hash in hashes:
            block = block_of(block_hash)
            if block is not None and not block.is_null:
                self._ids[key_in_pool(block_hash)] = block.block_id
                self._freed_at[block.block_id] = now

    def freed_at(self, block: KVCacheBlock) -> float:
        """When a request that used ``block`` last gave it back; -inf if none ever did."""
        freed_at: float = self._freed_at[block.block_id]
        return freed_at

    def forget(self, hashes: Sequence[bytes], keys: Sequence[int]) -> Sequence[int]:
        """Take note that a block of each hash was evicted; returns the keys that are gone.

        vLLM keeps duplicates of a block that two requests computed at the same time, and reports
        a removal for each: the key is gone only when none is left.

        Args:
            hashes: As the prefix cache keeps them: with the group's id.
            keys: Those of ``hashes``.
        """
        deque(map(self._ids.pop, keys, repeat(None)), maxlen=0)
        twice = self._twice
        if self._hears_all and (not twice or twice.isdisjoint(keys)):
            return keys
        return self._without_survivors(hashes, keys)

    def clear(self) -> None:
        """Forget everything: the prefix cache was reset."""
        self._ids.clear()
        self._twice.clear()

    def _without_survivors(self, hashes: Sequence[bytes], keys: Sequence[int]) -> list[int]:
        block_of, gone = self._pool.cached_block_hash_to_block.get_one_block, []
        for block_hash, key in zip(hashes, keys, strict=True):
            survivor = block_of(block_hash)
            if survivor is None:
                gone.append(key)
                self._twice.discard(key)
            else:
                self._ids[key] = survivor.block_id
        return gone

    def _forget_outdated(self) -> None:
        """Forget keys of blocks that do not hold them; those that are left fit the pool."""
        blocks = self._pool.blocks
        held = ((key, at, blocks[at].block_hash) for key, at in self._ids.items())
        self._ids = {key: at for key, at, has in held if has and key_in_pool(has) == key}
        self._twice &= self._ids.keys()
