"""A model's part in the identity of a block.

An engine's block hash covers the block's tokens and all before them, but not the model: in every
engine the same prompt has the same hash. So the graph mixes a digest of the model's name into each
key. On the wire, and wherever people read or type a key, it is the engine's own.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np

NO_SALT: Final = np.uint64(0)
"""Of engines that name no model: those that are only observed, and all before their hello."""


@lru_cache(maxsize=256)
def salt_of(model: str) -> np.uint64:
    """What ``model`` adds to its blocks' keys, the same in every process: 64 bits of BLAKE2b."""
    if not model:
        return NO_SALT
    digest = hashlib.blake2b(model.encode(errors="surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
