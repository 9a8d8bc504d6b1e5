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
        self._entries: dict[int, tuple[KVCacheBlock, bytes]] = {}
        self._freed_at: list[float] = [-math.inf] * len(pool.blocks)  # by block id

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """Remember a chain of cached blocks that is freed now.

        Walks from the tail and stops at the first block that is known already: the blocks before it
        were remembered with it, so a conversation costs only its newest turn.

        Args:
            keys: Of the chain's blocks, from its start.
            block_ids: As many, or more.
        """
        now, freed_at = self._clock(), self._freed_at
        for block_id in block_ids[: len(keys)]:
            freed_at[block_id] = now
        entries, blocks = self._entries, self._pool.blocks
        for i in range(len(keys) - 1, -1, -1):
            key, block = keys[i], blocks[block_ids[i]]
            block_hash, known = block.block_hash, entries.get(key)
            if known is not None and known[0] is block and known[1] == block_hash:
                return
            if block_hash is not None and not block.is_null:
                entries[key] = (block, block_hash)

    def find(self, key: int) -> KVCacheBlock | None:
        """The free block that holds ``key``, or None if it is gone, reused or referenced."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        block, block_hash = entry
        if block.ref_cnt or block.block_hash != block_hash or block.next_free_block is None:
            return None
        return block

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
                self._entries[key_in_pool(block_hash)] = (block, block_hash)
                self._freed_at[block.block_id] = now

    def freed_at(self, block: KVCacheBlock) -> float:
        """When a request that used ``block`` last gave it back; -inf if none ever did."""
        freed_at: float = self._freed_at[block.block_id]
        return freed_at

    def forget(self, keys: Sequence[int]) -> list[int]:
        """Note that a block of each key was evicted; returns the keys that are gone.

        vLLM keeps duplicates of a block that two requests computed at the same time, and reports a
        removal for each: the key is gone only when none is left.
        """
        entries, gone = self._entries, []
        block_of = self._pool.cached_block_hash_to_block.get_one_block
        for key in keys:
            entry = entries.pop(key, None)
            if entry is not None and (survivor := block_of(entry[1])) is not None:
                entries[key] = (survivor, entry[1])
            else:
                gone.append(key)
        return gone

    def clear(self) -> None:
        """Forget everything: the prefix cache was reset."""
        self._entries.clear()
