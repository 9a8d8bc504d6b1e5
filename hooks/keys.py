"""vLLM's block hashes as 64-bit keys: their last 8 bytes, as in vLLM's own KV events."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..graph.types import Keys

try:
    from .._engine import keys as _keys
    from .._engine import pack as _pack
except ImportError:  # no compiled core in this installation
    _keys = _pack = None  # type: ignore[assignment]

KEY_BYTES: Final = 8
GROUP_BYTES: Final = 4  # of the group id that the prefix cache appends to a hash
_VECTORISE_FROM: Final = 48  # hashes; shorter lists are faster without numpy, as measured


def key_of(block_hash: bytes) -> int:
    """Return the key of one block hash without a group id."""
    return int.from_bytes(block_hash[-KEY_BYTES:], "big")


def key_in_pool(block_hash: bytes) -> int:
    """Return the key of a hash with a group id, as the prefix cache has it."""
    return int.from_bytes(block_hash[-KEY_BYTES - GROUP_BYTES : -GROUP_BYTES], "big")


def keys_in_pool(hashes: Sequence[bytes]) -> list[int]:
    """Return the key of each hash, as ``key_in_pool`` does; all hashes have the same length."""
    if _keys is not None:
        return _keys(hashes if type(hashes) is list else list(hashes), GROUP_BYTES)
    if len(hashes) < _VECTORISE_FROM:
        return [key_in_pool(each) for each in hashes]
    keys: list[int] = array_in_pool(hashes).tolist()
    return keys


def keys_of(hashes: list[bytes]) -> list[int]:
    """Return the key of each hash, as ``key_of`` does; all hashes have the same length."""
    return unpack(pack_hashes(hashes)) if _keys is None else _keys(hashes, 0)


def array_in_pool(hashes: Sequence[bytes]) -> Keys:
    """Return ``key_in_pool`` of at least one hash, all of one length, as an array."""
    return keys_in_table(np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), -1))


def keys_in_table(table: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> Keys:
    """Return ``key_in_pool`` of hashes of one length, given as uint8 ``[hashes, length]``."""
    keys = table[:, -KEY_BYTES - GROUP_BYTES : -GROUP_BYTES]
    return np.ascontiguousarray(keys).view(">u8").ravel().astype(np.uint64)


def pack_hash(block_hash: bytes) -> bytes:
    """Return one block hash as a packed little-endian uint64 key."""
    return block_hash[: -KEY_BYTES - 1 : -1]


def pack_hashes(hashes: Sequence[bytes]) -> bytes:
    """Return block hashes of one length as packed little-endian uint64 keys."""
    if _pack is not None and type(hashes) is list:
        return _pack(hashes, 0, len(hashes))
    if len(hashes) < _VECTORISE_FROM:
        return b"".join([block_hash[: -KEY_BYTES - 1 : -1] for block_hash in hashes])
    table = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), -1)
    return table[:, : -KEY_BYTES - 1 : -1].tobytes()


def pack_run(hashes: Sequence[bytes], first: int, end: int, scale: int) -> bytes:
    """Pack the keys of blocks ``[first, end)`` of a chain; ``scale`` hashes make up a block."""
    if end - first == scale == 1:  # a decoding request's, most of all
        return pack_hash(hashes[first])
    return pack_hashes(hashes[scale * (first + 1) - 1 : scale * end : scale])


def pack_keys(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack(packed: bytes) -> list[int]:
    count = len(packed) // KEY_BYTES
    if count < _VECTORISE_FROM:
        return list(struct.unpack(f"<{count}Q", packed))
    return np.frombuffer(packed, dtype="<u8").tolist()  # type: ignore[no-any-return]
