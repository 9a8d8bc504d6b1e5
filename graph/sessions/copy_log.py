"""``CopyLog``: when blocks got copies in colder tiers, and when the last copy there was gone."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..columns.columns import grown
from ..types import Keys, Tier

LIMIT: Final = 32_768  # changes; chosen: 590 kB
_LEAST: Final = 1024  # changes that it has room for at first; chosen
_CHANGE: Final = np.dtype(
    [
        ("key", "<u8"),  # the graph's
        ("at", "<f8"),  # the clock's seconds
        ("tier", "u1"),
        ("sign", "i1"),  # 1: it got its first copy there; -1: no engine has one any more
    ]
)
Changes = npt.NDArray[np.void]


class CopyLog:
    """A ring of the last changes, told by block; whose a block is may change later."""

    def __init__(self) -> None:
        self._ring = np.zeros(0, dtype=_CHANGE)
        self._next = 0

    @property
    def nbytes(self) -> int:
        return int(self._ring.nbytes)

    def add(self, keys: Keys, tier: Tier, sign: int, now: float) -> None:
        """Note that these blocks got copies (``sign`` 1), or have none any more (-1)."""
        keys = keys[-LIMIT:]
        if not len(keys):
            return
        end = self._next + len(keys)
        if len(self._ring) < min(LIMIT, end):
            self._ring = grown(self._ring, min(LIMIT, max(_LEAST, 2 * end)))
        slots = np.arange(self._next, end) % len(self._ring)
        self._ring["key"][slots], self._ring["at"][slots] = keys, now
        self._ring["tier"][slots], self._ring["sign"][slots] = int(tier), sign
        self._next = end

    def changes(self) -> Changes:
        """``key, at, tier, sign`` of those that are remembered, the oldest first."""
        count = min(self._next, len(self._ring))
        slots = np.arange(self._next - count, self._next) % max(1, len(self._ring))
        remembered: Changes = self._ring[slots]
        return remembered
