"""Finds the rows of chains' keys without a look-up of each, by where they are likely to be.

``KnownChains`` remembers the rows of chains that were told lately. Other keys are found where they
stand in consecutive rows: one look-up per stretch, and the others compared. Blocks that came
together stand so, until their rows are reused; then, mostly, in a few stretches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, Keys, Rows
from .hash_index import HashIndex

_LEAST: Final = 32  # keys from which on a stretch costs less than as many look-ups; chosen
_MOST_KNOWN: Final = 1 << 20  # rows of known chains: 4 MB; chosen
_MOST_NAMES: Final = 16_384  # of known chains; chosen
_MOST: Final = 512  # compared at once: a short stretch costs no look at the whole chain; chosen
Mask = npt.NDArray[np.bool_]
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
