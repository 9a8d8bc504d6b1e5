"""``Slots``: an open-addressed array of row numbers, with double hashing."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import Keys, Rows

EMPTY: Final = -1
TOMBSTONE: Final = -2
# Fibonacci hashing: composite keys (edges) are far from uniform in their low bits.
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_FOLD: Final = np.uint64(29)
_WORD: Final = (1 << 64) - 1
_PART: Final = 1 << 18  # slots that are made or looked at in one slice; chosen
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
        for start in range(0, count, _PART):
            rows[start : start + _PART] = EMPTY
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
