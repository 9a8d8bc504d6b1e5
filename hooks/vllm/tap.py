"""What a block pool caches and evicts, noted as it happens at the price of one append each.

vLLM's own KV events tell the same story, but each carries its tokens and extra keys: building them
costs a decode step of 32 requests more than all the rest of our observing. So they stay as the
user set them, and the pool's own methods are followed on the instance instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class Cached(NamedTuple):
    """Blocks ``[first, end)`` of a request's chain entered the prefix cache."""

    request: Request
    first: int
    end: int


class Cleared(NamedTuple):
    """The prefix cache was reset."""


Change = Cached | Cleared | list[bytes]  # a list holds evicted hashes, with their group's id


class PoolTap:
    """Follows a pool's changes to one KV cache group's prefix cache.

    Args:
        pool: The live block pool; three of its methods are shadowed on the instance until
            ``detach``. Each calls vLLM's own first and appends to a list: nothing can fail.
        group: The KV cache group whose stores are noted. Evictions are noted for all groups.

    Attributes:
        was_reset: Whether the prefix cache was reset since the last ``take``.
        borrowed: Blocks that we hold ourselves, empty, so that workers can write to them; they
            do not stand in the way of a reset.
    """

    def __init__(self, pool: BlockPool, group: int) -> None:
        self.was_reset = False  # among what was not taken yet
        self.borrowed: list[KVCacheBlock] = []
        self._pool = pool
        self._group = group
        self._changes: list[Change] = []
        self._attach()

    def take(self) -> list[Change]:
        """What changed since the last call, in order."""
        self.was_reset = False
        if not self._changes:
            return self._changes
        changes, self._changes = self._changes, []
        return changes

    def detach(self) -> None:
        """Leave the pool as it was."""
        for name in _FOLLOWED:
            self._pool.__dict__.pop(name, None)

    def _attach(self) -> None:
        pool, group = self._pool, self._group
        cache, emit_removed, reset = (getattr(pool, name) for name in _FOLLOWED)

        def cache_full_blocks(
            request: Request,
            blocks: Any,
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            kv_cache_group_id: int,
            block_mask: Any = None,
        ) -> None:
            cache(
                request, blocks, num_cached_blocks, num_full_blocks, block_size,
                kv_cache_group_id, block_mask,
            )  # fmt: skip
            if kv_cache_group_id == group and num_cached_blocks < num_full_blocks:
                self._changes.append(Cached(request, num_cached_blocks, num_full_blocks))

        def emit_block_removed_events(block_hashes: list[bytes]) -> None:
            emit_removed(block_hashes)
            self._changes.append(block_hashes)

        def reset_prefix_cache() -> bool:
            borrowed = self.borrowed
            pool.free_blocks(borrowed)  # stock vLLM would have them free, and refuses otherwise
            done: bool = reset()
            pool.touch(borrowed)
            if done:
                self.was_reset = True
                self._changes.append(Cleared())
            return done

        shadows = (cache_full_blocks, emit_block_removed_events, reset_prefix_cache)
        for name, shadow in zip(_FOLLOWED, shadows, strict=True):
            setattr(pool, name, shadow)


_FOLLOWED = ("cache_full_blocks", "_emit_block_removed_events", "reset_prefix_cache")
