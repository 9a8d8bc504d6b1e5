"""Digests of what prompts say, whatever their salt: computed on the thread that sends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import numpy as np

_BYTES: Final = 8  # of a digest: as many as of a block's key
_AT_ONCE: Final = 4_096  # tokens between two moments in which other threads may run; chosen


class PromptDigests:
    """What one prompt says, block by block.

    Args:
        key: The sidecar's; see ``ContentKey``.
        tokens: The prompt's; not changed any more.
        block_size: Tokens.
        salt: The prompt's cache salt.
    """

    __slots__ = ("_block_size", "_key", "_salt", "_tokens")

    def __init__(
        self, key: bytes, tokens: Sequence[int], block_size: int, salt: str | None
    ) -> None:
        self._key, self._tokens = key, tokens
        self._block_size, self._salt = block_size, salt

    def digests(self) -> bytes:
        """Eight bytes for each full block: of all that the prompt says up to its end."""
        hasher, size = blake2b(digest_size=_BYTES, key=self._key), self._block_size
        found: list[bytes] = []
        step = max(1, _AT_ONCE // size) * size
        end = len(self._tokens) // size * size
        for first in range(0, end, step):
            part = np.array(self._tokens[first : min(first + step, end)], dtype="<i8").tobytes()
            for at in range(0, len(part), 8 * size):
                hasher.update(part[at : at + 8 * size])
                found.append(hasher.copy().digest())
            time.sleep(0)
        return b"".join(found)

    def salt(self) -> int:
        """A digest of the salt; 0: it has none."""
        if self._salt is None:
            return 0
        digest = blake2b(self._salt.encode(), digest_size=_BYTES, key=self._key).digest()
        return int.from_bytes(digest, "little") or 1
