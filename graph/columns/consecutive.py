"""Finds keys that stand in consecutive rows: one look-up per stretch, and the others compared.

Blocks that came together stand so, until their rows are reused; then, mostly, in a few stretches.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW, Keys, Rows
from .hash_index import HashIndex

_LEAST: Final = 32  # keys from which on a stretch costs less than as many look-ups; chosen
_MOST: Final = 512  # compared at once: a short stretch costs no look at the whole chain; chosen
Mask = npt.NDArray[np.bool_]
Counts64 = npt.NDArray[np.int64]


def follow_chains(
    index: HashIndex, alive: Mask, keys: Keys, rows: Rows, counts: Counts64 | None = None
) -> slice | npt.NDArray[np.intp]:
    """Find the first keys of each chain, as far as they stand in long stretches; returns where in
    ``keys`` the others are, known or not.

    Args:
        alive: bool ``[capacity]``: the rows in use.
        keys: uint64 ``[n]``, chain after chain.
        rows: int32 ``[n]``: takes the rows of those that are found.
        counts: int64 ``[chains]``: keys of each chain; None: they are one.
    """
    if counts is None or len(counts) == 1:
        return np.s_[_follow(index, alive, keys, rows) if len(keys) >= _LEAST else 0 :]
    long = np.flatnonzero(counts >= _LEAST)
    if not len(long):
        return np.s_[:]
    left = np.ones(len(keys), dtype=np.bool_)
    ends = np.cumsum(counts)
    for end, count in zip(ends[long].tolist(), counts[long].tolist(), strict=True):
        chain = slice(end - count, end)
        found = _follow(index, alive, keys[chain], rows[chain])
        left[end - count : end - count + found] = False
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
