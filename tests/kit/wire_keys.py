"""Keys of blocks as events carry them."""

from __future__ import annotations

import numpy as np


def pack(*keys: int) -> bytes:
    """Eight bytes a key, little-endian."""
    return np.array(keys, dtype="<u8").tobytes()
