"""``ContentIndex``: blocks by what they say, so that the same under another salt is found."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import Keys

_BITS: Final = 17  # of a slot's number; chosen: 3.1 MB
Slots = npt.NDArray[np.int64]
_SLOT: Final = np.dtype([("content", "<u8"), ("key", "<u8"), ("salt", "<u8")])


class ContentIndex:
    """Of each content that was told lately, the last block that has it.

    Contents and salts are digests (see ``ContentKey``), keys the graph's. Each content has two
    slots that it may stand in; when others stand in both, one of these goes. It takes no memory
    before the first content is told.
    """

    def __init__(self) -> None:
        self._slots = np.zeros(0, dtype=_SLOT)

    @property
    def nbytes(self) -> int:
        return int(self._slots.nbytes)

    def add(self, contents: Keys, keys: Keys, salt: int) -> None:
        """Note which blocks have these contents, one each."""
        if not len(self._slots):
            self._slots = np.zeros(1 << _BITS, dtype=_SLOT)
        first, second = _slots_of(contents)
        at = np.where(self._takes(first, contents), first, second)
        self._slots["content"][at], self._slots["key"][at] = contents, keys
        self._slots["salt"][at] = np.uint64(salt)

    def elsewhere(self, content: np.uint64, salt: int) -> int | None:
        """The graph's key of a block with this content under another salt; None: none is known."""
        if not len(self._slots):
            return None
        for at in _slots_of(np.array([content], dtype=np.uint64)):
            slot = self._slots[at[0]]
            if slot["content"] == content and slot["salt"] != np.uint64(salt):
                return int(slot["key"])
        return None

    def _takes(self, at: Slots, contents: Keys) -> npt.NDArray[np.bool_]:
        """Whether these slots are empty, or have these contents."""
        there = self._slots["content"][at]
        return np.asarray((there == 0) | (there == contents))


def _slots_of(contents: Keys) -> tuple[Slots, Slots]:
    """Digests are as good as random: their low bits are one slot, the next ones the other."""
    mask, bits = np.uint64((1 << _BITS) - 1), np.uint64(_BITS)
    return (contents & mask).astype(np.int64), ((contents >> bits) & mask).astype(np.int64)
