"""``Victims``: the blocks that advice laid at the head of the free queue, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..pool.found_blocks import FoundBlocks, hash_of, stands

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Victims:
    """Follows blocks that stand one behind the other, while a step takes them from the front.

    A block that is free, with the hash that it was laid with, stands where it was laid, unless
    somebody moved it: whoever does that says so (``forget``). All work is done on many at once: a
    step of 16k tokens takes a thousand.

    Args:
        pool_blocks: Blocks of the pool.

    Attributes:
        blocks: In their order.
        followed: bool ``[pool_blocks]``, by number: which blocks are among them.
        looked: How many of them, from the front, were looked at; see ``look``.
    """

    def __init__(self, pool_blocks: int) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.followed: npt.NDArray[np.bool_] = np.zeros(pool_blocks, dtype=bool)
        self.looked = 0
        self._hashes: list[bytes] = []
        self._ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def last(self) -> KVCacheBlock | None:
        """The last of them, if it stands."""
        if self.blocks and stands(self.blocks[-1], self._hashes[-1]):
            return self.blocks[-1]
        return None

    def add(self, found: FoundBlocks) -> None:
        """Follow blocks that were laid behind the last one."""
        self.blocks += found.blocks
        self._hashes += found.hashes
        self._ids = np.concatenate((self._ids, found.ids))
        self.followed[found.ids] = True

    def drop_taken(self) -> None:
        """Forget those at the front that are gone.

        Those that are gone are the first ones, so that a few looks find the first that is not. One
        that lost its hash in their midst, as a failed load's, can only move that on.
        """
        blocks, hashes = self.blocks, self._hashes
        if not blocks or hash_of(blocks[0]) is hashes[0]:
            return
        gone, there = 0, len(blocks)
        while there - gone > 1:
            middle = (gone + there) // 2
            if hash_of(blocks[middle]) is hashes[middle]:
                there = middle
            else:
                gone = middle
        self._keep(slice(there, None), slice(0, there))

    def keep_first(self, most: int) -> None:
        """Forget all but the first ones; ``most`` may count from the end."""
        self._keep(slice(0, most), slice(most, None))

    def forget(self, ids: Sequence[int]) -> int:
        """Forget blocks that were used or moved; returns how many of these were followed."""
        gone = int(self.followed[ids].sum()) if len(self) and len(ids) else 0
        if gone:
            self.followed[ids] = False
            left = self.followed[self._ids]
            marks = left.tolist()
            self.looked = sum(marks[: self.looked])
            self._ids = self._ids[left]
            self.blocks = list(compress(self.blocks, marks))
            self._hashes = list(compress(self._hashes, marks))
        return gone

    def look(self, most: int) -> FoundBlocks:
        """The next of them that were not looked at, ``most`` at most."""
        part = slice(self.looked, self.looked + most)
        found = FoundBlocks.told(self.blocks[part], self._hashes[part], self._ids[part])
        self.looked += len(found.blocks)
        return found

    def _keep(self, kept: slice, gone: slice) -> None:
        before = len(self.blocks)
        self.followed[self._ids[gone]] = False
        self._ids = self._ids[kept]
        del self.blocks[gone], self._hashes[gone]
        first = before - len(self.blocks) if kept.start else 0  # that were dropped from the front
        self.looked = min(max(0, self.looked - first), len(self.blocks))
