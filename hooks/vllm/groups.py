"""``ObservedGroup``: the KV cache group whose blocks we observe."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Final

from ...graph.wire.events import CacheGroup, GroupKind
from ..keys import GROUP_BYTES
from .shapes import is_full_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """The KV cache group whose blocks we observe; sizes in tokens."""

    index: int  # which of the engine's groups it is
    block_size: int
    hash_block_size: int  # tokens that each of a request's hashes covers
    groups_take: int = 1  # most blocks that all groups together take when this one takes a block
    # whether vLLM may keep its blocks out of the prefix cache, such as those outside a window
    skips: bool = False
    scale: int = field(init=False)  # hashes of a request per block of this group
    suffix: bytes = field(init=False)  # the ending of this group's keys in the prefix cache

    def __post_init__(self) -> None:  # once: they are read several times a request
        object.__setattr__(self, "scale", self.block_size // self.hash_block_size)
        object.__setattr__(self, "suffix", self.index.to_bytes(GROUP_BYTES, "big"))

    def hashes(self, request: Request, tokens: int) -> Sequence[bytes]:
        scale = self.scale
        # A hash covers its whole prefix, so a larger block's hash is that of its last part.
        hashes: Sequence[bytes] = request.block_hashes
        return hashes[scale - 1 : tokens // self.hash_block_size : scale]

    def is_in(self, pool: BlockPool, block_hash: bytes) -> bool:
        """Whether the prefix cache has this block of the group."""
        cached = pool.cached_block_hash_to_block  # looked up each time: a reset makes another map
        return cached.get_one_block(block_hash + self.suffix) is not None

    def computed(self, request: Request, exact: int | None) -> Sequence[bytes]:
        """Return the hashes of the full blocks whose KV a finished request left in the pool."""
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        return self.hashes(request, tokens if exact is None else min(tokens, exact))


def observed_group(kv_cache: KVCacheConfig, pool: BlockPool) -> ObservedGroup:
    """Return the group whose prefix reaches furthest back: the first one with full attention.

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


_OF_CONTENT: Final = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")  # what vLLM digests media to


def first_named_token(request: Request) -> int | None:
    """Return the first token of a prompt from which on hashes follow from a name instead of from
    content; None if there is none. A LoRA adapter may be trained further under its name, and what
    a client gives an id of its own (``uuid``) may be another picture the next time.
    """
    if request.lora_request is not None:
        return 0
    media = request.mm_features or ()
    starts = [
        each.mm_position.offset for each in media if not _OF_CONTENT.fullmatch(str(each.identifier))
    ]
    return min(starts, default=None)


def most_blocks_per_step(config: VllmConfig, group: ObservedGroup) -> int:
    """Return an upper bound of the blocks that one step allocates: in each group, every batched
    token new, and one partly filled block per request.
    """
    scheduler = config.scheduler_config
    blocks = scheduler.max_num_batched_tokens // group.block_size + scheduler.max_num_seqs
    return int(blocks) * group.groups_take


class OtherGroups:
    """The KV cache groups other than the observed one.

    vLLM matches a prefix only as far as every group allows. A full-attention group needs all blocks
    before that point, a sliding-window group the last few, a state group the last one.
    """

    def __init__(self, kv_cache: KVCacheConfig, pool: BlockPool, observed: ObservedGroup) -> None:
        specs = [_first(group.kv_cache_spec) for group in kv_cache.kv_cache_groups]
        # all groups, as the hello names them
        self.named = tuple(CacheGroup(*_kind(spec), spec.block_size) for spec in specs)
        self._pool, self._observed, self._scale = pool, observed, pool.hash_block_size
        matched = [group.block_size for group in self.named if group.kind != GroupKind.OTHER]
        self._unit = lcm(observed.block_size, *matched)  # matches are multiples of it
        self._others = [
            (index, index.to_bytes(GROUP_BYTES, "big"), group)
            for index, group in enumerate(self.named)
            if index != observed.index and group.kind != GroupKind.OTHER
        ]

    def lacking(self, request: Request, cached_tokens: int) -> int | None:
        """Return the index of the first other group that limited a lookup to ``cached_tokens``.
        None if the observed group lacks the next block itself, or no other group is known to lack
        its part.

        Call it right after the lookup. Costs one lookup in the prefix cache if the observed group
        has no further block, else up to a window's blocks in each other group.
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
        hashes, scale = request.block_hashes, self._scale
        holds = self._pool.cached_block_hash_to_block.get_one_block  # a reset makes another map
        ends = range(end, start, -size)  # the last are the likeliest to be gone
        return all(holds(hashes[each // scale - 1] + suffix) is not None for each in ends)


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    """A group's own specification, or the first of several that differ in sizes alone."""
    together = getattr(spec, "kv_cache_specs", None)
    return next(iter(together.values())) if together else spec


def _kind(spec: KVCacheSpec) -> tuple[GroupKind, int]:
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


# How this engine hashes blocks, so that engines can be compared.

_PATIENCE_S: Final = 0.5  # chosen: vLLM sets the seed some milliseconds after creating us
_LOOK_S: Final = 0.01  # chosen
_ROUNDS: Final = 100_000  # of PBKDF2, some 40 ms: trying every PYTHONHASHSEED takes years
_DIGEST_BYTES: Final = 4


def block_hashing(algorithm: str, patience_s: float = _PATIENCE_S) -> str:
    """Return the algorithm (``prefix_caching_hash_algo``) and a digest of the hash of a fixed
    block, such as ``sha256 5be0cd19``. Empty if the algorithm is unknown here, or if vLLM sets no
    seed within ``patience_s``, for which this thread waits.

    That hash depends on vLLM's start value before a prompt's first block (``NONE_HASH``, from
    ``PYTHONHASHSEED`` or, without it, random for some algorithms) and on how blocks are serialized.
    The digest is slow to compute and too short to reveal the seed.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    until = time.monotonic() + patience_s
    while True:
        try:
            probe = hash_block_tokens(get_hash_fn_by_name(algorithm), None, (0,))
        except NameError:  # the seed's: vLLM has not set it yet
            if time.monotonic() >= until:
                return ""
            time.sleep(_LOOK_S)
        except Exception:
            return ""
        else:
            return f"{algorithm} {_digest(probe)}"


@lru_cache(maxsize=8)
def _digest(probe: bytes) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", probe, b"kvgraph block hashing", _ROUNDS, _DIGEST_BYTES)
    return digest.hex()
