"""``FoundBlocks``: free blocks that hold wanted keys, found many at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from ....graph.types import Keys
from ...keys import array_in_pool
from ...link.held_ranking import Places

if TYPE_CHECKING:
    from collections.abc import Callable

Mask = npt.NDArray[np.bool_]

_HASH: Final = "_block_hash"  # behind a property, which is a call of Python's for each block
hash_of: Final[Callable[[KVCacheBlock], bytes]] = attrgetter(
    _HASH if hasattr(KVCacheBlock, _HASH) else "block_hash"
)
_id_of: Final[Callable[[KVCacheBlock], int]] = attrgetter("block_id")
_users_of: Final[Callable[[KVCacheBlock], int]] = attrgetter("ref_cnt")


def stands(block: KVCacheBlock, block_hash: bytes) -> bool:
    """Whether a block is in the free queue still, with the same content."""
    return block.next_free_block is not None and hash_of(block) is block_hash


class FoundBlocks(NamedTuple):
    """Free blocks that hold wanted keys.

    Attributes:
        places: Of their keys among those that were asked for.
        ids, blocks, hashes: Of each, its number, itself, and its hash with the group's id.
    """

    places: Sequence[int]
    ids: Places
    blocks: list[KVCacheBlock]
    hashes: list[bytes]

    @classmethod
    def of(cls, keys: Keys, held: list[KVCacheBlock], ids: Places) -> FoundBlocks:
        """Of ``held``, numbered ``ids``, those that are free and hold the key beside them."""
        hashes = list(map(hash_of, held))
        found = cls(range(len(held)), ids, held, hashes)
        if not all(hashes) or any(map(_users_of, held)):
            full = np.fromiter(map(_users_of, held), np.int64, len(held)) == 0
            full &= np.fromiter(map(bool, hashes), np.bool_, len(held))
            found, keys = found.only(full), keys[full]
        if not found.blocks:
            return found
        same = array_in_pool(found.hashes) == keys
        return found if same.all() else found.only(same)

    @classmethod
    def told(
        cls,
        blocks: list[KVCacheBlock],
        hashes: list[bytes] | None = None,
        ids: Places | None = None,
    ) -> FoundBlocks:
        """Blocks that are known to be free, as they stand; what is not said of them is read."""
        return cls(
            range(len(blocks)),
            np.fromiter(map(_id_of, blocks), np.int64, len(blocks)) if ids is None else ids,
            blocks,
            list(map(hash_of, blocks)) if hashes is None else hashes,
        )

    def only(self, marks: Mask) -> FoundBlocks:
        """Those that are marked."""
        chosen = marks.tolist()
        return FoundBlocks(
            list(compress(self.places, chosen)), self.ids[marks],
            list(compress(self.blocks, chosen)), list(compress(self.hashes, chosen)),
        )  # fmt: skip

    def first(self, count: int) -> FoundBlocks:
        """The first ones."""
        return FoundBlocks(
            self.places[:count], self.ids[:count], self.blocks[:count], self.hashes[:count]
        )
