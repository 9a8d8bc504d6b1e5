"""A vectorised hash map from uint64 keys to row numbers.

Open addressing with double hashing: every operation takes arrays, and its cost is the longest
probe sequence of the batch, which double hashing keeps short. The map stores rows only, 4 bytes
per slot: the keys are in the owner's key column, which the index grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, Keys, Rows
from .columns import refilled, taken_in_parts
from .slots import EMPTY, TOMBSTONE, Positions, Slots, mix

_CLAIM: Final = -3  # minus the place of a key in the batch that is being added
_FEW: Final = 8  # keys that are faster looked for one by one; chosen
_MIN_SLOTS: Final = 1024  # slots; chosen
_FULL: Final = 0.625  # share of used slots beyond which the map is rebuilt; chosen
# A map of so many slots takes long to rebuild, and is rebuilt ahead of need, part by part, from
# this share on; so many slots are a part. All chosen.
_MANY_SLOTS: Final = 1 << 17
_NEARLY_FULL: Final = 0.59375
_PART: Final = 1 << 16
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
        self._slots = Slots.empty(_MIN_SLOTS)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self._slots.rows.nbytes

    def growing(self, capacity: int) -> Iterator[None]:
        """Make room for rows below ``capacity``, slice by slice; no key may be added or removed
        meanwhile."""
        room = yield from taken_in_parts(self.keys, capacity)
        self.keys = refilled(room, self.keys)
        yield

    def find(self, keys: Keys) -> Rows:
        """int32 ``[n]``: the row of each key, ``NO_ROW`` where there is none."""
        found = np.full(len(keys), NO_ROW, dtype=np.int32)
        slots, pending, mixed = self._slots, np.arange(len(keys)), mix(keys)
        position, step = slots.first(mixed), None
        while pending.size:
            rows = slots.rows[position]
            hit = (rows >= 0) & (self.keys[rows] == keys[pending])
            found[pending[hit]] = rows[hit]
            onward = (~hit & (rows != EMPTY)).nonzero()[0]
            pending, position = pending[onward], position[onward]
            step = slots.step(mixed[pending]) if step is None else step[onward]
            position = slots.onward(position, step)
        return found

    def find_one(self, key: int) -> int:
        """The row of one key, ``NO_ROW`` if there is none; faster than ``find`` for a single
        one."""
        slots = self._slots
        for slot in slots.sequence(key):
            row = slots.rows.item(slot)
            if row == EMPTY or (row >= 0 and self.keys.item(row) == key):
                return row if row >= 0 else NO_ROW
        raise AssertionError("a sequence has no end")

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Add distinct keys that are not in the map yet."""
        self.keys[rows] = keys
        if self._is_crowded(len(rows)):
            self.rebuild(len(rows))
        self._slots.place(rows, keys)
        self._size += len(rows)

    def ensure(self, keys: Keys, take: Callable[[int], Rows]) -> tuple[Rows, Mask]:
        """The row of each key (repeats allowed), after adding those that are not in the map.

        Args:
            take: Gives rows for so many new keys, in the order in which those first appear; makes
                room for them.

        Returns:
            rows int32 ``[n]``, and a bool ``[n]`` that is true where the key was added.
        """
        if len(keys) <= _FEW:  # also none at all
            known = np.array([self.find_one(key) for key in keys.tolist()], dtype=np.int32)
            if (known != NO_ROW).all():
                return known, np.zeros(len(keys), dtype=np.bool_)
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
            self._slots.rows[slots[first]] = EMPTY
            raise
        self.keys[rows] = keys[first]
        self._slots.rows[slots[first]] = found[first] = rows
        found[added] = found[claimants]
        self._size += len(rows)
        return found, added

    def remove(self, rows: Rows) -> None:
        """Remove rows that are in the map."""
        slots, pending, mixed = self._slots, rows, mix(self.keys[rows])
        position, step = slots.first(mixed), slots.step(mixed)
        while pending.size:
            here = slots.rows[position] == pending
            slots.rows[position[here]] = TOMBSTONE
            pending, step = pending[~here], step[~here]
            position = slots.onward(position[~here], step)
        self._size -= len(rows)
        self._tombstones += len(rows)

    def rows(self) -> Rows:
        """int32 ``[len(self)]``: the rows in the map, in no order."""
        return self._slots.taken()

    def tidying(self) -> Iterator[None]:
        """Rebuild a large map, part by part, before it is so crowded that ``ensure`` must rebuild
        it at once.

        Until the last part the old map serves; no key may be added or removed meanwhile.
        """
        used = self._size + self._tombstones
        if len(self._slots) < _MANY_SLOTS or used <= _NEARLY_FULL * len(self._slots):
            return
        slots = yield from Slots.making(_slots_for(self._size + len(self._slots) // 8))
        for rows in self._slots.in_parts(_PART):
            slots.place(rows, self.keys[rows])
            yield
        self._slots, self._tombstones = slots, 0

    def _claim(self, keys: Keys) -> tuple[Rows, Positions]:
        """int32 ``[n]``: the row of each key, or ``_CLAIM`` minus the position where it
        first appears; and the slot that each of those first ones claimed. There is room for
        all of them."""
        found, slots = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=np.int64)
        table, pending, mixed = self._slots, np.arange(len(keys)), mix(keys)
        position, step = table.first(mixed), None
        while pending.size > _FEW:
            here = table.rows[position]
            empty = (here == EMPTY).nonzero()[0]
            if empty.size:
                free, who = position[empty], pending[empty]
                slots[who] = free
                # Backwards, so that the first of several claims to a slot wins.
                table.rows[free[::-1]] = (_CLAIM - who[::-1]).astype(np.int32)
                here[empty] = table.rows[free]
            found[pending] = here  # whoever goes on writes it once more
            onward = (~self._is_same(here, keys, keys[pending])).nonzero()[0]
            pending, position = pending[onward], position[onward]
            step = table.step(mixed[pending]) if step is None else step[onward]
            position = table.onward(position, step)
        for place in pending.tolist():
            found[place], slots[place] = self._claim_one(place, keys)
        return found, slots

    def _claim_one(self, place: int, keys: Keys) -> tuple[int, int]:
        """``_claim``, for one key by its place in the batch; faster for a few."""
        rows, key = self._slots.rows, keys.item(place)
        for slot in self._slots.sequence(key):
            row = rows.item(slot)
            if row == EMPTY:
                rows[slot] = row = _CLAIM - place
            known = key == (keys.item(_CLAIM - row) if row <= _CLAIM else self.keys.item(row))
            if known and row != TOMBSTONE:
                return row, slot
        raise AssertionError("a sequence has no end")

    def _is_same(self, here: Rows, keys: Keys, wanted: Keys) -> Mask:
        """Whether what stands in each one's slot, a row or a claim in ``keys``, has its key."""
        claimed = (here <= _CLAIM).nonzero()[0]
        if len(claimed) == len(here):
            return np.asarray(keys[_CLAIM - here] == wanted)
        same = (self.keys[np.maximum(here, EMPTY)] == wanted) & (here >= 0)
        same[claimed] = keys[_CLAIM - here[claimed]] == wanted[claimed]
        return np.asarray(same)

    def _make_room(self, keys: Keys) -> None:
        """Rebuild if adding those of ``keys`` that are new would crowd the map."""
        if self._is_crowded(len(keys)):
            new = int(np.count_nonzero(self.find(keys) == NO_ROW))
            if self._is_crowded(new):
                self.rebuild(new)

    def _is_crowded(self, new: int) -> bool:
        return self._size + self._tombstones + new > _FULL * len(self._slots)

    def rebuild(self, new: int) -> None:
        """Rebuild the map at once, without removed rows, with room for so many new keys."""
        rows = self.rows()
        self._slots, self._tombstones = Slots.empty(_slots_for(len(rows) + new)), 0
        self._slots.place(rows, self.keys[rows])


def _slots_for(rows: int) -> int:
    slots = _MIN_SLOTS
    while rows > _FULL * slots:
        slots *= 2
    return slots
