"""A vectorised hash map from uint64 keys to row numbers.

Open addressing with double hashing: every operation takes arrays, and its cost is the longest
probe sequence of the batch, which double hashing keeps short. The map stores rows only (4 bytes
a slot): the keys stand in the owner's own key column, which the index owns and grows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, Keys, Rows

_EMPTY: Final = -1
_TOMBSTONE: Final = -2
_MIN_SLOTS: Final = 1024
# Fibonacci hashing: composite keys (edges) are far from uniform in their low bits.
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(29)
_Slots = npt.NDArray[np.int64]


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
        position, step = self._probe(keys)
        while pending.size:
            rows = self._slots[position]
            hit = (rows >= 0) & (self.keys[rows] == keys[pending])
            found[pending[hit]] = rows[hit]
            onward = ~hit & (rows != _EMPTY)
            pending, step = pending[onward], step[onward]
            position = (position[onward] + step) & self._mask
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
        pending = rows
        position, step = self._probe(self.keys[rows])
        while pending.size:
            here = self._slots[position] == pending
            self._slots[position[here]] = _TOMBSTONE
            pending, step = pending[~here], step[~here]
            position = (position[~here] + step) & self._mask
        self._size -= len(rows)
        self._tombstones += len(rows)

    def rows(self) -> Rows:
        """int32 ``[len(self)]``: the rows in the map, in no order."""
        return self._slots[self._slots >= 0]

    def _allocate(self, slots: int) -> None:
        self._slots: Rows = np.full(slots, _EMPTY, dtype=np.int32)
        self._mask = slots - 1
        self._shift = np.uint64(64 - (slots.bit_length() - 1))

    def _probe(self, keys: Keys) -> tuple[_Slots, _Slots]:
        """First slot and (odd) step of each key's probe sequence."""
        mixed = keys * _MULTIPLIER
        first = (mixed >> self._shift).astype(np.int64)
        step = ((mixed ^ (mixed >> _FOLD)).astype(np.int64) & self._mask) | 1
        return first, step

    def _rebuild(self, added: Rows) -> None:
        rows = np.concatenate([self.rows(), added])
        slots = _MIN_SLOTS
        while slots < 2 * len(rows) + 1:
            slots *= 2
        self._allocate(slots)
        self._tombstones = 0
        self._place(self.keys[rows], rows)

    def _place(self, keys: Keys, rows: Rows) -> None:
        position, step = self._probe(keys)
        while rows.size:
            free = self._slots[position] < 0
            self._slots[position[free]] = rows[free]  # of two rivals for a slot, the last one wins
            astray = self._slots[position] != rows
            rows, step = rows[astray], step[astray]
            position = (position[astray] + step) & self._mask
