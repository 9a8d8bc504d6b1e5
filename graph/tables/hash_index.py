"""A vectorised hash map from uint64 keys to row numbers: open addressing with double hashing, with
compiled probes (``core/graph/index.hpp``). It stores rows and one byte of each hash, 5 bytes per
slot; the keys are in the key column of the owner, which the index enlarges.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..types import NO_ROW, Keys, Rows
from .columns import refilled, taken_in_parts

# ``Slots``: an open-addressed array of row numbers, with double hashing (``core/graph/index.hpp``).

_SLOTS_PART: Final = 1 << 18  # slots created or scanned in one slice of work; chosen


class Slots:
    """A hash map's slots, a power of two: int32 ``rows``, then a byte each, 0 if empty."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows  # int32 ``[n + n / 4]``: a row number, or less than zero
        self._count = len(rows) * 4 // 5

    @classmethod
    def empty(cls, count: int) -> Slots:
        return cls(np.zeros(count + count // 4, dtype=np.int32))

    @classmethod
    def making(cls, count: int) -> Generator[None, None, Slots]:
        rows = np.empty(count + count // 4, dtype=np.int32)
        for start in range(0, len(rows), _SLOTS_PART):
            rows[start : start + _SLOTS_PART] = 0
            yield
        return cls(rows)

    def __len__(self) -> int:
        return self._count

    @property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self.rows[self._count :].view(np.uint8)

    def taken(self) -> Rows:
        """Return the rows in these slots, int32, in no order."""
        rows = self.rows[: self._count][self._bytes != 0]
        found: Rows = rows[rows >= 0]
        return found

    def place(self, rows: Rows, keys: Keys) -> None:
        """Find slots for rows that are not here yet; ``keys`` are the rows' keys."""
        core.place(self.rows, np.ascontiguousarray(rows), np.ascontiguousarray(keys))

    def give_up(self, places: npt.NDArray[np.int64]) -> None:
        """Empty slots that were claimed just now."""
        self._bytes[places] = 0


_MIN_SLOTS: Final = 1024  # slots; chosen
_FULL: Final = 0.625  # share of used slots beyond which the map is rebuilt; chosen
# Rebuilding a map of this many slots takes long, so it is rebuilt ahead of need, in parts of this
# many rows, once this share is used. All chosen.
_MANY_SLOTS: Final = 1 << 17
_NEARLY_FULL: Final = 0.59375
_PART: Final = 1 << 16
Mask = npt.NDArray[np.bool_]
_NONE: Final[Mask] = np.zeros(0, dtype=np.bool_)
Counts64 = npt.NDArray[np.int64]
Guesses = list[Rows | None]  # int32 per chain, the likely rows of its first keys; None if unknown


class KnownBlocks(NamedTuple):
    keys: Keys  # uint64 ``[n]``: the graph's keys, chain after chain
    rows: Rows  # int32 ``[n]``: ``NO_ROW`` for unknown keys
    counts: list[int]  # keys of each chain
    unknown: int  # number of unknown keys
    bad: list[bool] | None  # of each chain, whether it contains a key twice; None: none does


class HashIndex:
    """Maps ``keys[row]`` to ``row``; keys are unique."""

    def __init__(self, capacity: int) -> None:
        # uint64 ``[capacity]``; the key of each row, valid where the row is in use.
        self.keys: Keys = np.zeros(capacity, dtype=np.uint64)
        self._size = 0
        self._tombstones = 0
        self._slots = Slots.empty(_MIN_SLOTS)

    def __len__(self) -> int:
        return self._size

    def nbytes(self, size: int) -> int:
        """Return the bytes of the keys of ``size`` rows, and of the map."""
        return self.keys.itemsize * size + self._slots.rows.nbytes

    def growing(self, capacity: int) -> Iterator[None]:
        """Make room for rows below ``capacity``, in slices between which no key may change."""
        room = yield from taken_in_parts(self.keys, capacity)
        self.keys = refilled(room, self.keys)
        yield

    def find(self, keys: Keys) -> Rows:
        """Return the row of each key, int32 ``[n]``; ``NO_ROW`` if there is none."""
        found = np.empty(len(keys), dtype=np.int32)
        # A field of records, as logs have them, has gaps; the compiled loops take none.
        core.find(self._slots.rows, self.keys, np.ascontiguousarray(keys), found)
        return found

    def find_chains(
        self, alive: Mask, depth: Rows, chains: list[bytes], salt: int, guesses: Guesses
    ) -> KnownBlocks:
        """Return the rows of chains' keys as ``find`` does, looking first at likely rows.

        Args:
            alive: bool ``[capacity]``: the rows in use.
            depth: int32 ``[capacity]``: positions of the rows in their chains.
            chains: The keys of each chain, as on the wire.
            salt: What the graph mixes into each key.
            guesses: Likely rows of each chain's keys; see ``KnownChains``. Without one, the row
                after the previous key's is tried first.
        """
        counts = [len(hashes) // 8 for hashes in chains]
        keys, rows = np.empty(sum(counts), np.uint64), np.empty(sum(counts), np.int32)
        unknown, bad = core.find_chains(
            self._slots.rows, self.keys, alive, depth, chains, salt, guesses, keys, rows
        )
        return KnownBlocks(keys, rows, counts, unknown, bad)

    def unhold(self, tiers: npt.NDArray[np.uint8], keys: Keys) -> Rows:
        """Clear the pool's bit in an engine's ``tiers``; return rows that had it, ascending."""
        rows = core.unhold(self._slots.rows, self.keys, tiers, np.ascontiguousarray(keys))
        return np.frombuffer(rows, dtype=np.int32)

    def insert(self, keys: Keys, rows: Rows) -> None:
        """Add distinct keys that are not in the map yet."""
        self.keys[rows] = keys
        if self._is_crowded(len(rows)):
            self.rebuild(len(rows))
        self._slots.place(rows, keys)
        self._size += len(rows)

    def ensure(
        self, keys: Keys, take: Callable[[int], Rows], alive: Mask = _NONE
    ) -> tuple[Rows, Mask]:
        """Return the row of each key (repeats allowed), int32 ``[n]``, adding missing keys, and a
        bool ``[n]`` that marks added keys. ``take(n)`` returns rows for ``n`` new keys, in order of
        first appearance. ``alive``, bool ``[capacity]``, marks the rows in use; keys that arrive
        together probably have consecutive rows.
        """
        keys = np.ascontiguousarray(keys)
        self._make_room(keys)
        found = np.empty(len(keys), dtype=np.int32)
        found.fill(NO_ROW)
        return found, self._add(keys, found, len(keys), False, take, alive)

    def complete(
        self, keys: Keys, found: Rows, unknown: int, take: Callable[[int], Rows], alive: Mask
    ) -> Mask:
        """As ``ensure``, for keys that were already looked up. ``found``, int32 ``[n]``, has their
        rows, and receives new rows for the ``unknown`` keys without one, of which there are some.
        """
        if self._is_crowded(unknown):
            self.rebuild(unknown)
        return self._add(keys, found, unknown, True, take, alive)

    def _add(
        self, keys: Keys, found: Rows, most: int, looked_for: bool, take: Callable[[int], Rows],
        alive: Mask,
    ) -> Mask:  # fmt: skip
        """Add those keys, ``most`` at most, that have no row in ``found``, which takes it."""
        slots, (first, taken) = self._slots.rows, np.empty((2, most), dtype=np.int64)
        count = core.claim(slots, self.keys, alive, keys, found, first, taken, looked_for)
        if not count:
            return np.zeros(len(keys), dtype=np.bool_)
        try:
            rows = take(count)
        except BaseException:
            self._slots.give_up(taken[:count])
            raise
        new = np.empty(len(keys), dtype=np.bool_)
        core.settle(slots, self.keys, keys, rows, first, taken, found, new)
        self._size += count
        return new

    def remove(self, rows: Rows) -> None:
        self._tombstones += core.remove(self._slots.rows, self.keys, np.ascontiguousarray(rows))
        self._size -= len(rows)

    def rows(self) -> Rows:
        """Return the rows in the map, int32 ``[len(self)]``, in no order."""
        return self._slots.taken()

    def tidying(self, alive: Mask, rows: int) -> Iterator[None]:
        """Rebuild a large map, part by part, before it is so full that ``ensure`` must rebuild it
        at once. ``alive``, bool ``[capacity]``, marks the rows in the map, among the first
        ``rows``.

        The old map is used until the last part is done; no key may be added or removed meanwhile.
        """
        used = self._size + self._tombstones
        if len(self._slots) < _MANY_SLOTS or used <= _NEARLY_FULL * len(self._slots):
            return
        slots = yield from Slots.making(_slots_for(self._size + len(self._slots) // 8))
        for start in range(0, rows, _PART):
            core.place_all(self.keys, alive, start, min(start + _PART, rows), slots.rows)
            yield
        self._slots, self._tombstones = slots, 0

    def _make_room(self, keys: Keys) -> None:
        """Rebuild if adding those of ``keys`` that are new would crowd the map."""
        if self._is_crowded(len(keys)):
            new = int(np.count_nonzero(self.find(keys) == NO_ROW))
            if self._is_crowded(new):
                self.rebuild(new)

    def _is_crowded(self, new: int) -> bool:
        return self._size + self._tombstones + new > _FULL * len(self._slots)

    def rebuild(self, new: int) -> None:
        """Rebuild the map at once, without removed rows, with room for ``new`` more keys."""
        rows = self.rows()
        self._slots, self._tombstones = Slots.empty(_slots_for(len(rows) + new)), 0
        self._slots.place(rows, self.keys[rows])


def _slots_for(rows: int) -> int:
    slots = _MIN_SLOTS
    while rows > _FULL * slots:
        slots *= 2
    return slots


_MOST_KNOWN: Final = 1 << 20  # rows of known chains: 4 MB; chosen
_MOST_NAMES: Final = 16_384  # of known chains; chosen


class KnownChains:
    """The rows of recently reported chains, each under the name of its source. They are guesses:
    users must check every key, because rows are reused, and names are not verified.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[str, Rows] = OrderedDict()  # the longest ago noted first
        self._count = 0

    @property
    def nbytes(self) -> int:
        return 4 * self._count

    def note(self, name: str, rows: Rows) -> None:
        """Note the rows of a chain; beyond some bounds, the oldest notes are forgotten."""
        known, count = self._rows, self._count + len(rows)
        if (before := known.pop(name, None)) is not None:
            count -= len(before)
        known[name] = rows.copy()  # it may be a part of many others'
        while count > _MOST_KNOWN or len(known) > _MOST_NAMES:
            count -= len(known.popitem(last=False)[1])
        self._count = count

    def guess(self, names: Sequence[str]) -> Guesses:
        return [self._rows.get(name) for name in names]
