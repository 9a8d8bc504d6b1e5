"""Which block holds which key: the bridge from a ranking's keys to the pool's block objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockIndex:
    """Blocks that finished requests left in the prefix cache, by key.

    An entry is a promise about the past, checked before use: ``find`` returns a block only while
    it still carries the hash that it was remembered with.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[int, tuple[KVCacheBlock, bytes]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """Remember a chain of cached blocks; ``block_ids`` may be longer than ``keys``.

        Walks from the tail and stops at the first block that is known already: what comes before
        it was remembered with it, so a conversation costs only its newest turn.
        """
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

    def forget(self, keys: Sequence[int]) -> list[int]:
        """Take note that a block of each key was evicted; returns the keys that are gone.

        vLLM keeps duplicates of a block that two requests computed at the same time, and reports
        a removal for each: the key is gone only when none is left.
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
