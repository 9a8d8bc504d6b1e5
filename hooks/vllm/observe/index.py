"""Which block holds which key: from a ranking's keys to the pool's block objects."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...keys import key_in_pool

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockIndex:
    """Blocks that finished requests left in the prefix cache, by key.

    An entry may be outdated, and is checked before use: ``find`` returns a block only while it
    still carries the hash that it was remembered with.

    Args:
        pool: The live block pool.
        clock: Monotonic seconds, the clock that rankings are dated in.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._entries: dict[int, KVCacheBlock] = {}
        self._freed_at: list[float] = [-math.inf] * len(pool.blocks)  # by block id

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """Remember a chain of cached blocks that is freed now.

        What comes before a block that is known was remembered with it, so a conversation costs
        only its newest turn.

        Args:
            keys: Of the chain's blocks, from its start.
            block_ids: As many, or more.
        """
        now, freed_at = self._clock(), self._freed_at
        block_ids = block_ids[: len(keys)]
        for block_id in block_ids:
            freed_at[block_id] = now
        known = self._known(keys, block_ids)
        blocks = map(self._pool.blocks.__getitem__, block_ids[known:])
        self._entries.update(zip(keys[known:], blocks, strict=True))

    def _known(self, keys: Sequence[int], block_ids: Sequence[int]) -> int:
        """How many of a chain's blocks, from its start, were remembered before: by bisection."""
        entries, blocks = self._entries, self._pool.blocks
        low, high = 0, len(keys)
        if high and entries.get(keys[-1]) is blocks[block_ids[-1]]:
            return high
        while low < high:
            middle = (low + high) // 2
            if entries.get(keys[middle]) is blocks[block_ids[middle]]:
                low = middle + 1
            else:
                high = middle
        return low

    def find(self, key: int) -> KVCacheBlock | None:
        """The free block that holds ``key``, or None if it is gone, reused or referenced."""
        block = self._entries.get(key)
        if block is None or block.ref_cnt or block.next_free_block is None:
            return None
        block_hash = block.block_hash
        return None if block_hash is None or key_in_pool(block_hash) != key else block

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
                self._entries[key_in_pool(block_hash)] = block
                self._freed_at[block.block_id] = now

    def freed_at(self, block: KVCacheBlock) -> float:
        """When a request that used ``block`` last gave it back; -inf if none ever did."""
        freed_at: float = self._freed_at[block.block_id]
        return freed_at

    def forget(self, hashes: Sequence[bytes], keys: Sequence[int]) -> list[int]:
        """Take note that a block of each hash was evicted; returns the keys that are gone.

        vLLM keeps duplicates of a block that two requests computed at the same time, and reports
        a removal for each: the key is gone only when none is left.

        Args:
            hashes: As the prefix cache keeps them: with the group's id.
            keys: Those of ``hashes``.
        """
        entries = self._entries
        block_of = self._pool.cached_block_hash_to_block.get_one_block
        for key in keys:
            entries.pop(key, None)
        survivors = [block_of(block_hash) for block_hash in hashes]
        if not any(survivors):
            return list(keys)
        gone = []
        for key, survivor in zip(keys, survivors, strict=True):
            if survivor is None:
                gone.append(key)
            else:
                entries[key] = survivor
        return gone

    def clear(self) -> None:
        """Forget everything: the prefix cache was reset."""
        self._entries.clear()
