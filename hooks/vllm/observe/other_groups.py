"""``OtherGroups``: which KV cache group ends a match that the observed one would carry on."""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from ....graph.messages.cache_groups import CacheGroup, GroupKind
from ...keys import GROUP_BYTES
from ..shapes import is_full_attention
from .group import ObservedGroup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request


class OtherGroups:
    """The KV cache groups beside the observed one.

    vLLM matches a prefix only where every group can go on: one of full attention needs all blocks
    before it, one of a sliding window the last ones, one of states the last one.

    Args:
        kv_cache: The engine's groups.
        pool: The live block pool.
        observed: The group whose blocks are reported.

    Attributes:
        named: All groups, as the hello names them.
    """

    def __init__(self, kv_cache: KVCacheConfig, pool: BlockPool, observed: ObservedGroup) -> None:
        specs = [_first(group.kv_cache_spec) for group in kv_cache.kv_cache_groups]
        self.named = tuple(map(_named, specs))
        self._pool, self._observed, self._scale = pool, observed, pool.hash_block_size
        matched = [group.block_size for group in self.named if group.kind != GroupKind.OTHER]
        self._unit = lcm(observed.block_size, *matched)  # matches are multiples of it
        self._others = [
            (index, index.to_bytes(GROUP_BYTES, "big"), group)
            for index, group in enumerate(self.named)
            if index != observed.index and group.kind != GroupKind.OTHER
        ]

    def lacking(self, request: Request, cached_tokens: int) -> int | None:
        """The first other group because of which a lookup found no more than ``cached_tokens``.

        Costs a look at the prefix cache where the observed group has no more either, else as many
        as a window has blocks in each other group. To be asked right after the lookup.

        Returns:
            Its place among the groups; None if the observed group lacks the next block itself, if
            there is none that could be matched, or if no group lacks what is known to be needed.
        """
        if not self._others:
            return None
        end = cached_tokens - cached_tokens % self._unit + self._unit
        if end >= request.num_tokens:
            return None  # the last token is always computed
        observed = self._observed
        if not self._has(request, observed.suffix, observed.block_size, cached_tokens, end):
            return None
        for index, suffix, group in self._others:
            start = _needed_from(group, cached_tokens, end)
            if not self._has(request, suffix, group.block_size, start, end):
                return index
        return None

    def _has(self, request: Request, suffix: bytes, size: int, start: int, end: int) -> bool:
        """Whether a group's blocks that end behind token ``start``, up to ``end``, are cached."""
        hashes, scale = request.block_hashes, self._scale
        holds = self._pool.cached_block_hash_to_block.get_one_block  # a reset makes another map
        ends = range(end, start, -size)  # the last are the likeliest to be gone
        return all(holds(hashes[each // scale - 1] + suffix) is not None for each in ends)


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    """A group's own specification, or the first of several that differ in sizes alone."""
    together = getattr(spec, "kv_cache_specs", None)
    return next(iter(together.values())) if together else spec


def _named(spec: KVCacheSpec) -> CacheGroup:
    return CacheGroup(*_kind(spec), spec.block_size)


def _kind(spec: KVCacheSpec) -> tuple[GroupKind, int]:
    """What a group keeps, and how many tokens of it."""
    if not getattr(spec, "prefix_cacheable", True):
        return GroupKind.OTHER, 0
    if is_full_attention(spec):
        return GroupKind.FULL, 0
    if window := getattr(spec, "sliding_window", None):
        return GroupKind.WINDOW, int(window)
    if chunk := getattr(spec, "attention_chunk_size", None):
        return GroupKind.CHUNK, int(chunk)
    return (GroupKind.STATE if hasattr(spec, "mamba_type") else GroupKind.OTHER), 0


def _needed_from(group: CacheGroup, cached_tokens: int, end: int) -> int:
    """The token behind which a match of ``end`` tokens needs a group's blocks."""
    size = group.block_size
    match group.kind:
        case GroupKind.WINDOW:  # the next token looks at the window less itself
            blocks = max(1, -(-(group.window - 1) // size))  # vLLM matches by one at least
            return max(0, end - blocks * size)
        case GroupKind.CHUNK:
            return end - end % group.window
        case GroupKind.STATE:
            return end - size
        case _:
            return cached_tokens
