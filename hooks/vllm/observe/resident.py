"""Lists a whole pool's keys, as a sidecar's resync asks for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ...keys import GROUP_BYTES, pack_hashes

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_SLICE: Final = 4096  # blocks between two chances for the engine's thread; chosen


def resident_keys(pool: BlockPool, suffix: bytes) -> bytes:
    """Keys of all cached blocks of a group, packed, each once.

    Reads the pool's list of blocks, which never changes, in slices, so that the engine's thread can
    run in between.

    Args:
        pool: The live block pool.
        suffix: The ending of the group's keys in the prefix cache.
    """
    hashes: set[bytes] = set()
    for start in range(0, len(pool.blocks), _SLICE):
        for block in pool.blocks[start : start + _SLICE]:
            block_hash = block.block_hash
            if block_hash is not None and block_hash.endswith(suffix):
                hashes.add(block_hash[:-GROUP_BYTES])
        time.sleep(0)
    return pack_hashes(list(hashes))
