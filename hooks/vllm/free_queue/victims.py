"""``Victims``: the blocks that advice laid at the head of the free queue, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import compress, count
from operator import is_
from typing import TYPE_CHECKING

from ...keys import keys_in_pool
from ..pool.found_blocks import FoundBlocks, hash_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Victims:
    """Follows blocks that stand one behind the other, while a step takes them from the front.

    A block that is free, with the hash that it was laid with, stands where it was laid, unless
    somebody moved it: whoever does that says so (``forget``). All work is done on many at once: a
    step of 16k tokens takes a thousand.
    """

    def __init__(self) -> None:
        self._blocks: list[KVCacheBlock] = []
        self._hashes: list[bytes] = []
        self._ids: list[int] = []
        self._among: set[int] = set()  # the same

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def ids(self) -> Set[int]:
        """Numbers of those that are followed."""
        return self._among

    def holding(self, wanted: Callable[[Sequence[int]], Sequence[bool]]) -> list[int]:
        """Numbers of those whose keys ``wanted`` marks."""
        return list(compress(self._ids, wanted(keys_in_pool(self._hashes))))

    @property
    def last(self) -> KVCacheBlock | None:
        """The last of them, if it stands."""
        if self._blocks and _stands(self._blocks[-1], self._hashes[-1]):
            return self._blocks[-1]
        return None

    def add(self, found: FoundBlocks) -> None:
        """Follow blocks that were laid behind the last one."""
        self._blocks += found.blocks
        self._hashes += found.hashes
        self._ids += found.ids
        self._among.update(found.ids)

    def drop_taken(self) -> None:
        """Forget those at the front that are gone."""
        same = map(is_, map(hash_of, self._blocks), self._hashes)
        self._keep(next(compress(count(), same), len(self._blocks)), len(self._blocks))

    def drop_last(self) -> None:
        """Forget the last one."""
        self._keep(0, len(self._blocks) - 1)

    def keep_first(self, most: int) -> None:
        """Forget all but the first ones."""
        self._keep(0, most)

    def forget(self, ids: Iterable[int]) -> int:
        """Forget blocks that were used or moved; returns how many of these were followed."""
        gone = self._among.intersection(ids)
        if gone:
            left = [at not in gone for at in self._ids]
            self._blocks = list(compress(self._blocks, left))
            self._hashes = list(compress(self._hashes, left))
            self._ids = list(compress(self._ids, left))
            self._among -= gone
        return len(gone)

    def _keep(self, first: int, end: int) -> None:
        for gone in (slice(end, None), slice(0, first)):
            self._among.difference_update(self._ids[gone])
            del self._blocks[gone], self._hashes[gone], self._ids[gone]


def _stands(block: KVCacheBlock, block_hash: bytes) -> bool:
    """Whether a block is free still, with the same content."""
    return block.next_free_block is not None and block.block_hash is block_hash
