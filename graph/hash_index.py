"""A vectorised hash map from uint64 keys to row numbers.

Open addressing with linear probing. Every operation takes arrays; a batch of 4,096 lookups is a
handful of numpy calls. The map stores rows only (4 bytes a slot): the keys stand in the owner's
own key column, which the index owns and grows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .types import NO_ROW, Keys, Rows

_EMPTY: Final = -1
_TOMBSTONE: Final = -2
_MIN_SLOTS: Final = 1024
# Fibonacci hashing: composite keys (edges) are far from uniform in their low bits.
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


class HashIndex:
    """Maps ``keys[row]`` to ``row``; keys are unique.

    Attributes:
        keys: uint64 ``[capacity]``; the key of each row, valid where the row is in use.
    """

    def __init__(self, capacity: int) -> None:
        self.keys: Keys = np.zeros(capacity, dtype=np.uint64)
        self._size = 0
        self._tombstones = 0
        self._allocate(_MIN_SLOTS)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self._slots.nbytes

    def grow(self, capacity: int) -> None:
        """Make room for rows below ``capacity``."""
        grown = np.zeros(capacity, dtype=np.uint64)
        grown[: len(self.keys)] = self.keys
        self.keys = grown

    def find(self, keys: Keys) -> Rows:
        """int32 ``[n]``: the row of each key, ``NO_ROW`` where there is none."""
        found = np.full(len(keys), NO_ROW, dtype=np.int32)
        pending = np.arange(len(keys))
        position = self._home(keys)
        while pending.size:
            rows = self._slots[position]
            hit = (rows >= 0) & (self.keys[rows] == keys[pending])
            found[pending[hit]] = rows[hit]
            onward = ~hit & (rows != _EMPTY)
            pending = pending[onward]
            position = (position[onward] + 1) & self._mask
        return found

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Add keys that are distinct and not in the map yet."""
        self.keys[rows] = keys
        self._size += len(rows)
        if 2 * (self._size + self._tombstones) > len(self._slots):
            self._rebuild(rows)
        else:
            self._place(keys, rows)

    def remove(self, rows: Rows) -> None:
        """Forget rows that are in the map."""
        keys = self.keys[rows]
        pending, position = rows, self._home(keys)
        while pending.size:
            here = self._slots[position] == pending
            self._slots[position[here]] = _TOMBSTONE
            pending = pending[~here]
            position = (position[~here] + 1) & self._mask
        self._size -= len(rows)
        self._tombstones += len(rows)

    def rows(self) -> Rows:
        """int32 ``[len(self)]``: the rows in the map, in no order."""
        return self._slots[self._slots >= 0]

    def _allocate(self, slots: int) -> None:
        self._slots: Rows = np.full(slots, _EMPTY, dtype=np.int32)
        self._mask = slots - 1
        self._shift = np.uint64(64 - (slots.bit_length() - 1))

    def _home(self, keys: Keys) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return ((keys * _MULTIPLIER) >> self._shift).astype(np.int64)

    def _rebuild(self, added: Rows) -> None:
        rows = np.concatenate([self.rows(), added])
        slots = _MIN_SLOTS
        while slots < 2 * len(rows) + 1:
            slots *= 2
        self._allocate(slots)
        self._tombstones = 0
        self._place(self.keys[rows], rows)

    def _place(self, keys: Keys, rows: Rows) -> None:
        position = self._home(keys)
        while rows.size:
            free = self._slots[position] < 0
            self._slots[position[free]] = rows[free]  # of two rivals for a slot, the last one wins
            settled = self._slots[position] == rows
            rows = rows[~settled]
            position = (position[~settled] + 1) & self._mask
