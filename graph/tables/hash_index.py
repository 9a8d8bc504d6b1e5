"""A vectorised hash map from uint64 keys to row numbers.

Open addressing with double hashing: every operation takes arrays, and its cost is the longest
probe sequence of the batch, which double hashing keeps short. The map stores rows only, 4 bytes
per slot: the keys are in the owner's key column, which the index grows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, Keys, Rows
from .columns import refilled, taken_in_parts

# ``Slots``: an open-addressed array of row numbers, with double hashing.

EMPTY: Final = -1
TOMBSTONE: Final = -2
# Fibonacci hashing: composite keys (edges) are far from uniform in their low bits.
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(29)
_WORD: Final = (1 << 64) - 1
_SLOTS_PART: Final = 1 << 18  # slots that are made or looked at in one slice; chosen
Positions = npt.NDArray[np.int64]


class Slots:
    """Slots of a hash map; how many is a power of two.

    Args:
        rows: int32 ``[n]``: what stands in each of them.

    Attributes:
        rows: int32 ``[n]``: a row number, or less than zero.
    """

    def __init__(self, rows: Rows) -> None:
        self.rows, count = rows, len(rows)
        self._mask = count - 1
        self._shift = np.uint64(64 - (count.bit_length() - 1))

    @classmethod
    def empty(cls, count: int) -> Slots:
        """So many empty slots."""
        return cls(np.full(count, EMPTY, dtype=np.int32))

    @classmethod
    def making(cls, count: int) -> Generator[None, None, Slots]:
        """``empty``, slice by slice."""
        rows = np.empty(count, dtype=np.int32)
        for start in range(0, count, _SLOTS_PART):
            rows[start : start + _SLOTS_PART] = EMPTY
            yield
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def taken(self) -> Rows:
        """int32: the rows that stand here, in no order."""
        return self.rows[self.rows >= 0]

    def in_parts(self, part: int) -> Iterator[Rows]:
        """``taken``, from so many slots at a time."""
        for start in range(0, len(self), part):
            rows = self.rows[start : start + part]
            yield rows[rows >= 0]

    def first(self, mixed: Keys) -> Positions:
        """The first slot of each key's probe sequence; see ``mix``."""
        return np.asarray((mixed >> self._shift).astype(np.int64))

    def step(self, mixed: Keys) -> Positions:
        """The distance from each slot of a sequence to the next; odd, so that the sequence visits
        all slots."""
        return np.asarray(((mixed ^ (mixed >> _FOLD)).astype(np.int64) & self._mask) | 1)

    def onward(self, position: Positions, step: Positions) -> Positions:
        """The next slot of each sequence."""
        return np.asarray((position + step) & self._mask)

    def sequence(self, key: int) -> Iterator[int]:
        """The slots of one key, without end."""
        mixed = key * int(_MULTIPLIER) & _WORD
        position = mixed >> int(self._shift)
        yield position
        step = ((mixed ^ (mixed >> int(_FOLD))) & self._mask) | 1
        while True:
            position = (position + step) & self._mask
            yield position

    def place(self, rows: Rows, keys: Keys) -> None:
        """Find slots for rows that are not here yet; ``keys`` are theirs."""
        mixed = mix(keys)
        position, step = self.first(mixed), self.step(mixed)
        while rows.size:
            free = self.rows[position] < 0
            self.rows[position[free]] = rows[free]  # of two rivals for a slot, the last one wins
            astray = self.rows[position] != rows
            rows, step = rows[astray], step[astray]
            position = self.onward(position[astray], step)


def mix(keys: Keys) -> Keys:
    """uint64: what a sequence of slots follows from."""
    return keys * _MULTIPLIER


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


# Finds the rows of chains' keys without a look-up of each, by where they are likely to be.
#
# ``KnownChains`` remembers the rows of chains that were told lately. Other keys are found where
# they stand in consecutive rows: one look-up per stretch, and the others compared. Blocks that
# came together stand so, until their rows are reused; then, mostly, in a few stretches.

_LEAST: Final = 32  # keys from which on a stretch costs less than as many look-ups; chosen
_MOST_KNOWN: Final = 1 << 20  # rows of known chains: 4 MB; chosen
_MOST_NAMES: Final = 16_384  # of known chains; chosen
_MOST: Final = 512  # compared at once: a short stretch costs no look at the whole chain; chosen
Counts64 = npt.NDArray[np.int64]


class KnownChains:
    """The rows of chains that were told last, each by the name of who told it.

    They are guesses, of which whoever takes them checks every key: rows are reused, and names are
    anybody's.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Rows] = {}  # the longest ago noted first
        self._count = 0

    @property
    def nbytes(self) -> int:
        return 4 * self._count

    def note(self, name: str, rows: Rows) -> None:
        """Note where a chain is; the longest ago noted are forgotten beyond some bounds."""
        self._count += len(rows) - len(self._rows.pop(name, ()))
        self._rows[name] = rows.copy()  # it may be a part of many others'
        while self._count > _MOST_KNOWN or len(self._rows) > _MOST_NAMES:
            self._count -= len(self._rows.pop(next(iter(self._rows))))

    def guess(self, names: Sequence[str], counts: Counts64) -> Rows:
        """int32 ``[sum(counts)]``: where each key of these chains may be; row 0, like any other a
        guess, where nobody knows.

        Args:
            counts: int64 ``[chains]``: how many keys each of them has.
        """
        guessed = np.zeros(int(counts.sum()), dtype=np.int32)
        start = 0
        for name, count in zip(names, counts.tolist(), strict=True):
            if (known := self._rows.get(name)) is not None:
                known = known[:count]
                guessed[start : start + len(known)] = known
            start += count
        return guessed


def follow_chains(
    index: HashIndex,
    alive: Mask,
    keys: Keys,
    rows: Rows,
    counts: Counts64 | None = None,
    guessed: Rows | None = None,
) -> slice | npt.NDArray[np.intp]:
    """Find the keys of each chain that are where they were guessed, or else the first of them, as
    far as they stand in long stretches; returns where in ``keys`` the others are, known or not.

    Args:
        alive: bool ``[capacity]``: the rows in use.
        keys: uint64 ``[n]``, chain after chain.
        rows: int32 ``[n]``: takes the rows of those that are found.
        counts: int64 ``[chains]``: keys of each chain; None: they are one.
        guessed: int32 ``[n]``: where they may be, see ``KnownChains``.
    """
    if guessed is None and (counts is None or len(counts) == 1):
        return np.s_[_follow(index, alive, keys, rows) if len(keys) >= _LEAST else 0 :]
    assert counts is not None
    starts = np.cumsum(counts) - counts
    chosen = counts >= _LEAST
    left = np.ones(len(keys), dtype=np.bool_)
    if guessed is not None:
        rows[:] = guessed
        left = (index.keys[guessed] != keys) | ~alive[guessed]
        chosen[chosen] = left[starts[chosen]]  # of the others, the guesses stand
    elif not chosen.any():
        return np.s_[:]
    for start, count in zip(starts[chosen].tolist(), counts[chosen].tolist(), strict=True):
        chain = slice(start, start + count)
        left[start : start + _follow(index, alive, keys[chain], rows[chain])] = False
    return np.flatnonzero(left)


def _follow(index: HashIndex, alive: Mask, keys: Keys, rows: Rows) -> int:
    """Find the first keys of one chain; returns how many."""
    at, count = 0, len(keys)
    while at < count and (row := index.find_one(int(keys[at]))) != NO_ROW:
        wanted = keys[at : at + _MOST]
        up = slice(row, row + len(wanted))
        length = _same(index.keys[up], alive[up], wanted)
        rows[at : at + length] = np.arange(row, row + length, dtype=np.int32)
        if length == 1 and row and len(wanted) > 1:
            down = slice(max(0, row - len(wanted) + 1), row + 1)
            length = _same(index.keys[down][::-1], alive[down][::-1], wanted)
            rows[at : at + length] = np.arange(row, row - length, -1, dtype=np.int32)
        at += length
        if length < _LEAST:
            break
    return at


def _same(keys: Keys, alive: Mask, wanted: Keys) -> int:
    """How many from the first on are the wanted ones, and in use."""
    same = keys == wanted[: len(keys)]
    same &= alive
    return int(same.argmin()) if not same.all() else len(same)
