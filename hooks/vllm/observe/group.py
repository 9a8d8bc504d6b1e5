"""``ObservedGroup``: the KV cache group whose blocks we observe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...keys import GROUP_BYTES
from ..shapes import is_full_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """The KV cache group whose blocks we observe; sizes in tokens.

    Attributes:
        index: Which of the engine's groups it is.
        block_size, hash_block_size: Of its blocks, and of what a request's hashes cover each.
        groups_take: Blocks that all groups take at most where this one takes a block.
        skips: Whether vLLM may leave blocks of it out of the prefix cache, as those outside of a
            window.
    """

    index: int
    block_size: int
    hash_block_size: int
    groups_take: int = 1
    skips: bool = False

    @property
    def scale(self) -> int:
        """Hashes of a request per block of this group."""
        return self.block_size // self.hash_block_size

    @property
    def suffix(self) -> bytes:
        """The ending of this group's keys in the prefix cache."""
        return self.index.to_bytes(GROUP_BYTES, "big")

    def hashes(self, request: Request, tokens: int) -> Sequence[bytes]:
        """The hashes of the full blocks in the request's first ``tokens`` tokens."""
        scale = self.scale
        # A hash covers its whole prefix, so a larger block's hash is that of its last part.
        hashes: Sequence[bytes] = request.block_hashes
        return hashes[scale - 1 : tokens // self.hash_block_size : scale]

    def computed(self, request: Request, exact: int | None) -> Sequence[bytes]:
        """The hashes of the full blocks whose KV a request that ended left.

        Args:
            exact: How many of its tokens, from the first on, are exact; None: all.
        """
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return self.hashes(request, tokens if exact is None else min(tokens, exact))


def observed_group(kv_cache: KVCacheConfig, pool: BlockPool) -> ObservedGroup:
    """The group whose prefix reaches furthest back: the first with full attention.

    Hybrid models keep several groups under the same hashes. A sliding-window group drops blocks
    that the others still hold, so events of several groups would contradict each other.
    """
    groups = kv_cache.kv_cache_groups
    full = [i for i, group in enumerate(groups) if is_full_attention(group.kv_cache_spec)]
    index = full[0] if full else 0
    size = groups[index].kv_cache_spec.block_size if len(groups) > 1 else pool.hash_block_size
    others = (group.kv_cache_spec.block_size for i, group in enumerate(groups) if i != index)
    take = 1 + sum(-(-size // other) for other in others)
    return ObservedGroup(index, size, pool.hash_block_size, take, skips=not full)


def most_blocks_per_step(config: VllmConfig, group: ObservedGroup) -> int:
    """An upper bound of what one step allocates: every batched token new, and a tail per
    request, in each group."""
    scheduler = config.scheduler_config
    blocks = scheduler.max_num_batched_tokens // group.block_size + scheduler.max_num_seqs
    return int(blocks) * group.groups_take
