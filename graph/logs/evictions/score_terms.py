"""What made the scores by which blocks left: a ring of as many evictions as 64 KiB hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

RING_BYTES: Final = 65_536  # of an engine: the last 8,192 evictions, where a score has four terms
Parts = npt.NDArray[np.float16]  # three digits are enough for people
_LARGEST: Final = float(np.finfo(np.float16).max)


class TermsThen(NamedTuple):
    """Terms of blocks: ``parts`` ``[n, names]``, NaN for a block of which they are not known."""

    names: tuple[str, ...]
    parts: Parts

    @classmethod
    def of(cls, terms: Mapping[str, npt.NDArray[np.float64]]) -> TermsThen:
        """A policy's terms, each ``[n]``; larger ones than float16 holds become the largest."""
        if not terms:
            return NO_TERMS
        columns = np.stack([np.clip(each, -_LARGEST, _LARGEST) for each in terms.values()], axis=1)
        return cls(tuple(terms), columns.astype(np.float16))

    def at(self, places: npt.NDArray[np.uint16]) -> TermsThen:
        """Those of the blocks at these places, some of which may be beyond the last."""
        parts = np.full((len(places), len(self.names)), np.nan, dtype=np.float16)
        known = places < len(self.parts)
        parts[known] = self.parts[places[known]]
        return TermsThen(self.names, parts)


NO_TERMS: Final = TermsThen((), np.empty((0, 0), dtype=np.float16))


class TermRing:
    """The terms of an engine's last evictions, by the ids of their records.

    Terms of other names, as another policy has, begin the ring anew.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._parts = NO_TERMS.parts
        self._first = self._next = 0

    @property
    def nbytes(self) -> int:
        return self._parts.nbytes

    def add(self, first: int, terms: TermsThen) -> None:
        """Remember the terms of the records from this id on, without a gap."""
        if terms.names and terms.names != self._names:
            self._names, self._first = terms.names, first
            width = len(terms.names)
            self._parts = np.zeros((RING_BYTES // (2 * width), width), dtype=np.float16)
        self._next = first + len(terms.parts)
        room = len(self._parts)
        if room:
            ids = np.arange(max(first, self._next - room), self._next)
            known = terms.parts[-len(ids) :] if terms.names else np.nan
            self._parts[ids % room] = known

    def of(self, number: int) -> dict[str, float] | None:
        """The terms of a record; None if they are not known, or not any more."""
        room = len(self._parts)
        if not room or not max(self._first, self._next - room) <= number < self._next:
            return None
        parts = self._parts[number % room]
        if np.isnan(parts).any():
            return None
        return dict(zip(self._names, parts.tolist(), strict=True))
