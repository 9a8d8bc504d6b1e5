"""A vectorised hash map from uint64 keys to row numbers.

Open addressing with double hashing: every operation takes arrays, and its cost is the longest
probe sequence of the batch, which double hashing keeps short. The map stores rows only, 4 bytes
per slot: the keys are in the owner's key column, which the index grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, Keys, Rows
from .columns import grown

_EMPTY: Final = -1
_TOMBSTONE: Final = -2
_CLAIM: Final = -3  # minus the place of a key in the batch that is being added
_MIN_SLOTS: Final = 1024  # slots; chosen
# Fibonacci hashing: composite keys (edges) are far from uniform in their low bits.
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(29)
_FULL: Final = 0.625  # share of used slots beyond which the map is rebuilt; chosen
_Slots = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
        self.keys = grown(self.keys, capacity)

    def find(self, keys: Keys) -> Rows:
        """int32 ``[n]``: the row of each key, ``NO_ROW`` where there is none."""
        found = np.full(len(keys), NO_ROW, dtype=np.int32)
        pending, mixed = np.arange(len(keys)), keys * _MULTIPLIER
        position, step = self._first(mixed), None
        while pending.size:
            rows = self._slots[position]
            hit = (rows >= 0) & (self.keys[rows] == keys[pending])
            found[pending[hit]] = rows[hit]
            onward = (~hit & (rows != _EMPTY)).nonzero()[0]
            pending, position = pending[onward], position[onward]
            step = self._step(mixed[pending]) if step is None else step[onward]
            position = (position + step) & self._mask
        return found

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Add distinct keys that are not in the map yet."""
        self.keys[rows] = keys
        if self._is_crowded(len(rows)):
            self._rebuild(len(rows))
        self._place(rows)
        self._size += len(rows)

    def ensure(self, keys: Keys, take: Callable[[int], Rows]) -> tuple[Rows, Mask]:
        """The row of each key (repeats allowed), after adding those that are not in the map.

        Args:
            take: Gives rows for so many new keys, in the order in which those first appear; makes
                room for them.

        Returns:
            rows int32 ``[n]``, and a bool ``[n]`` that is true where the key was added.
        """
        self._make_room(keys)
        found, slots = self._claim(keys)
        added = found <= _CLAIM
        if not added.any():
            return found, added
        claimants = _CLAIM - found[added]
        first = added.nonzero()[0]
        first = first[claimants == first]
        try:
            rows = take(len(first))
        except BaseException:
            self._slots[slots[first]] = _EMPTY
            raise
        self.keys[rows] = keys[first]
        self._slots[slots[first]] = found[first] = rows
        found[added] = found[claimants]
        self._size += len(rows)
        return found, added

    def remove(self, rows: Rows) -> None:
        """Remove rows that are in the map."""
        pending = rows
        mixed = self.keys[rows] * _MULTIPLIER
        position, step = self._first(mixed), self._step(mixed)
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

    def _claim(self, keys: Keys) -> tuple[Rows, _Slots]:
        """int32 ``[n]``: the row of each key, or ``_CLAIM`` minus the position where it
        first appears; and the slot that each of those first ones claimed. There is room for
        all of them."""
        found, slots = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=np.int64)
        pending = np.arange(len(keys))
        mixed = keys * _MULTIPLIER
        position, step = self._first(mixed), None
        while pending.size:
            here = self._slots[position]
            empty = (here == _EMPTY).nonzero()[0]
            if empty.size:
                free, who = position[empty], pending[empty]
                slots[who] = free
                # Backwards, so that the first of several claims to a slot wins.
                self._slots[free[::-1]] = (_CLAIM - who[::-1]).astype(np.int32)
                here[empty] = self._slots[free]
            found[pending] = here  # whoever goes on writes it once more
            onward = (~self._is_same(here, keys, keys[pending])).nonzero()[0]
            pending, position = pending[onward], position[onward]
            step = self._step(mixed[pending]) if step is None else step[onward]
            position = (position + step) & self._mask
        return found, slots

    def _is_same(self, here: Rows, keys: Keys, wanted: Keys) -> Mask:
        """Whether what stands in each one's slot, a row or a claim in ``keys``, has its key."""
        claimed = (here <= _CLAIM).nonzero()[0]
        if len(claimed) == len(here):
            return np.asarray(keys[_CLAIM - here] == wanted)
        same = (self.keys[np.maximum(here, _EMPTY)] == wanted) & (here >= 0)
        same[claimed] = keys[_CLAIM - here[claimed]] == wanted[claimed]
        return np.asarray(same)

    def _make_room(self, keys: Keys) -> None:
        """Rebuild if adding those of ``keys`` that are new would crowd the map."""
        if self._is_crowded(len(keys)):
            new = int(np.count_nonzero(self.find(keys) == NO_ROW))
            if self._is_crowded(new):
                self._rebuild(new)

    def _is_crowded(self, new: int) -> bool:
        return self._size + self._tombstones + new > _FULL * len(self._slots)

    def _allocate(self, slots: int) -> None:
        self._slots: Rows = np.full(slots, _EMPTY, dtype=np.int32)
        self._mask = slots - 1
        self._shift = np.uint64(64 - (slots.bit_length() - 1))

    def _first(self, mixed: Keys) -> _Slots:
        """The first slot of each key's probe sequence."""
        return np.asarray((mixed >> self._shift).astype(np.int64))

    def _step(self, mixed: Keys) -> _Slots:
        """The distance from each slot of a sequence to the next; odd, so that the sequence visits
        all slots."""
        return np.asarray(((mixed ^ (mixed >> _FOLD)).astype(np.int64) & self._mask) | 1)

    def _rebuild(self, new: int) -> None:
        """Rebuild the map, without removed rows, with room for so many new keys."""
        rows = self.rows()
        slots = _MIN_SLOTS
        while len(rows) + new > _FULL * slots:
            slots *= 2
        self._allocate(slots)
        self._tombstones = 0
        self._place(rows)

    def _place(self, rows: Rows) -> None:
        """Find slots for rows whose keys are set, and which are not in the map yet."""
        mixed = self.keys[rows] * _MULTIPLIER
        position, step = self._first(mixed), self._step(mixed)
        while rows.size:
            free = self._slots[position] < 0
            self._slots[position[free]] = rows[free]  # of two rivals for a slot, the last one wins
            astray = self._slots[position] != rows
            rows, step = rows[astray], step[astray]
            position = (position[astray] + step) & self._mask
