"""``PackedHashes``: many hashes in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from ....graph.types import Keys
from ...keys import keys_in_table


class PackedHashes(Sequence[bytes]):
    """Hashes of one length, as the prefix cache keeps them (with a group's id), end to end.

    One object, however many they are: as many objects of Python's would each have to be made, kept
    and looked through by its garbage collector in an engine's step.

    Args:
        data: The hashes.
        width: Bytes of each.
    """

    __slots__ = ("_data", "_width")

    def __init__(self, data: bytes = b"", width: int = 1) -> None:
        self._data = data
        self._width = width

    def __len__(self) -> int:
        return len(self._data) // self._width

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        start = range(len(self))[at] * self._width
        return self._data[start : start + self._width]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def keys(self) -> Keys:
        """Their keys: uint64 ``[len]``."""
        return keys_in_table(self._table())

    def of_group(self, suffix: bytes) -> PackedHashes:
        """Those that end with ``suffix``, a group's id."""
        table = self._table()
        ending = np.frombuffer(suffix, dtype=np.uint8)
        of_it = (table[:, self._width - len(suffix) :] == ending).all(axis=1)
        return PackedHashes(table[of_it].tobytes(), self._width)

    def _table(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return np.frombuffer(self._data, dtype=np.uint8).reshape(-1, self._width)
