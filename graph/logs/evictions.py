"""One engine's log of evictions: 20 bytes each, 3 per block row, and 64 KiB of score terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from secrets import token_hex
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..tables.columns import grown, refilled, taken_in_parts
from ..types import STATE_NAMES, Keys, Rows, SourceLayer, Tier
from .reasons import RULE_NAMES, Cause, DepartureRule
from .requests import Bytes, Origin, as_byte

if TYPE_CHECKING:
    from ..tables.tables import Tables

RING_BYTES: Final = 65_536  # per engine: the last 8,192 evictions, if a score has four terms
Parts = npt.NDArray[np.float16]  # three digits are enough for display
_LARGEST: Final = float(np.finfo(np.float16).max)


class TermsAtRanking(NamedTuple):
    """Score terms of ranked blocks, ``[n, names]``; NaN where unknown."""

    names: tuple[str, ...]
    parts: Parts

    @classmethod
    def of(cls, terms: Mapping[str, npt.NDArray[np.float64]]) -> TermsAtRanking:
        """Pack a policy's terms, each ``[n]``; values beyond float16 are clipped."""
        if not terms:
            return NO_TERMS
        columns = np.stack([np.clip(each, -_LARGEST, _LARGEST) for each in terms.values()], axis=1)
        return cls(tuple(terms), columns.astype(np.float16))

    def at(self, places: npt.NDArray[np.uint16]) -> TermsAtRanking:
        """Return the terms of the blocks at these places; NaN for places beyond the last."""
        parts = np.full((len(places), len(self.names)), np.nan, dtype=np.float16)
        known = places < len(self.parts)
        parts[known] = self.parts[places[known]]
        return TermsAtRanking(self.names, parts)


NO_TERMS: Final = TermsAtRanking((), np.empty((0, 0), dtype=np.float16))


class TermRing:
    """Terms of an engine's last evictions, by record id; other names restart the ring."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._parts = NO_TERMS.parts
        self._first = self._next = 0

    @property
    def nbytes(self) -> int:
        return self._parts.nbytes

    def add(self, first: int, terms: TermsAtRanking) -> None:
        """Store the terms of consecutive records starting at id ``first``."""
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
        """Return the terms of a record; None if unknown or overwritten."""
        room = len(self._parts)
        if not room or not max(self._first, self._next - room) <= number < self._next:
            return None
        parts = self._parts[number % room]
        if np.isnan(parts).any():
            return None
        return dict(zip(self._names, parts.tolist(), strict=True))


LIMIT: Final = 28_672  # records per engine; chosen: 573 kB. Slots fit in 16 bits
UNPLACED: Final = 65_535  # not in the ranking, or further down
_GROWTH: Final = 2
_FIRST_COPY: Final = 1  # bit number of WARM in a Tier; COLD's is the next

_RECORD: Final = np.dtype(
    [
        ("key", "<u8"),  # the graph's key
        ("at", "<u4"),  # ticks
        ("place", "<u2"),  # place in the ranking in force
        ("why", "u1"),  # rule and layer
        ("worth", "u1"),  # importance, times 255
        ("hits", "u1"),  # hits, 255 at most
        ("state", "u1"),  # copies, the session's state, whether shared
        ("idle", "u1"),  # idle time; see small_times
        ("wanted", "u1"),  # time until requested again; 0: never
    ]
)
Places = npt.NDArray[np.uint16]
Ids = npt.NDArray[np.int64]


class EvictedBlocks(NamedTuple):
    """Blocks that leave an engine's pool at the same time, ``[n]``."""

    engine: int  # the engine's column
    rows: Rows  # int32 ``[n]``
    place: Places  # each block's place in the ranking in force
    rule: Bytes  # why it left: a ``DepartureRule``
    used: npt.NDArray[np.float64]  # float64 ``[n]``: when each block was last used


class Eviction(NamedTuple):
    rule: DepartureRule
    layer: SourceLayer
    copies: Tier  # colder tiers that had a copy
    session_state: int  # a ``SessionState``; one above the highest: no session
    shared: bool


class RowMark:
    """Marks per block row: how it left the pool, whether it is being computed or was prefetched,
    and why its copy is gone.
    """

    HERE: Final = 0  # it has not left, or never was there
    EVICTED: Final = 1
    RESET: Final = 2
    UNHEARD: Final = 3
    MASK: Final = 0x03
    COMPUTING: Final = 0x04  # a running request computes it
    CAUSE: Final = 0x70  # why its copy is gone; all values are used, none is free
    CAUSE_SHIFT: Final = 4
    PREFETCHED: Final = 0x80  # loaded back, and not requested yet


class EvictionLog:
    """A ring of eviction records, with each block row's slot of its latest record.

    Ids count from 0 and never repeat; ``first`` is the oldest one still stored. ``owner`` is the
    engine's id, and ``name`` is unique among logs.
    """

    def __init__(self, origin: Origin, owner: str) -> None:
        self._origin = origin
        self.owner, self.name = owner, token_hex(4)
        self._ring = np.zeros(1024, dtype=_RECORD)
        self._rows = 0
        self._slot = np.zeros(0, dtype=np.uint16)  # by row
        self.marks: Bytes = np.zeros(0, dtype=np.uint8)  # by row, see RowMark
        self.terms = TermRing()
        self.next = 0
        self.evicted = np.zeros(len(DepartureRule), dtype=np.int64)
        self.wanted = np.zeros(len(DepartureRule), dtype=np.int64)

    @property
    def first(self) -> int:
        return max(0, self.next - LIMIT)

    @property
    def nbytes(self) -> int:
        by_row = (self._slot.itemsize + self.marks.itemsize) * self._rows
        return int(self._ring.nbytes + by_row + self.terms.nbytes)

    def reserve(self, rows: int, capacity: int) -> None:
        """Make room for ``rows`` rows; if there is not enough, for ``capacity``."""
        self._rows = rows
        if len(self.marks) < rows:
            for _ in self.growing(capacity):
                pass

    def growing(self, capacity: int) -> Iterator[None]:
        """Make room for ``capacity`` rows, in slices."""
        if len(self.marks) < capacity:
            for name in ("_slot", "marks"):
                room = yield from taken_in_parts(getattr(self, name), capacity)
                setattr(self, name, refilled(room, getattr(self, name)))
                yield

    def add(self, tables: Tables, left: EvictedBlocks, terms: TermsAtRanking, now: float) -> None:
        """Record that these blocks leave now; beyond ``LIMIT``, only the last ones get records."""
        self.terms.add(self.next, terms)
        self._grow(len(left.rows))
        core.depart(
            self._ring.view(np.uint8), self._slot, self.marks, tables.blocks.keys, tables.blocks,
            left.engine, tables.sessions, left.rows, left.place, left.rule, left.used,
            self.evicted, self.next, LIMIT, self._origin.ticks(now), RowMark.EVICTED,
            len(STATE_NAMES), now,
        )  # fmt: skip
        self.next += len(left.rows)

    def find(self, rows: Rows, keys: Keys) -> Ids:
        """Return the id of each block's last record, int64 ``[n]``; -1 if the ring has none."""
        ids = np.full(len(rows), -1, dtype=np.int64)
        if self.next:
            slots = self._slot[rows].astype(np.int64)
            newest = self.next - 1 - (self.next - 1 - slots) % LIMIT
            there = (newest >= 0) & (slots < len(self._ring))
            there &= self._ring["key"][np.minimum(slots, len(self._ring) - 1)] == keys
            ids[there] = newest[there]
        return ids

    def note_wanted(self, ids: Ids, now: float, window_s: float) -> Ids:
        """Note that these are requested again; returns those evicted within ``window_s`` before."""
        slots = ids % LIMIT
        passed = self._origin.ticks(now) - self._ring["at"][slots].astype(np.int64)
        ago = self._origin.seconds(passed)
        fresh = (self._ring["wanted"][slots] == 0) & (ago <= window_s)
        slots = slots[fresh]
        self._ring["wanted"][slots] = as_byte(ago[fresh])
        regretted: Ids = ids[fresh]
        self.wanted += np.bincount(self.rules(regretted), minlength=len(DepartureRule))
        return regretted

    def record(self, number: int) -> np.void:
        """Return one record; its id must be at least ``first`` and below ``next``."""
        found: np.void = self._ring[number % LIMIT]
        return found

    def eviction(self, number: int) -> Eviction:
        """Return an unpacked record; the id as for ``record``."""
        record = self.record(number)
        why, state = int(record["why"]), int(record["state"])
        copies, session_state = Tier((state & 3) << _FIRST_COPY), (state >> 2) & 7
        return Eviction(
            DepartureRule(why >> 4), SourceLayer(why & 15), copies, session_state, state >= 32
        )

    def rules(self, numbers: Ids) -> Bytes:
        """Return the rules of these records, uint8 ``[n]``."""
        found: Bytes = self._ring["why"][numbers % LIMIT] >> np.uint8(4)
        return found

    def by_rule(self) -> dict[str, tuple[int, int]]:
        """Return rule name → evictions and how many were regretted; only rules that evicted any."""
        counts = zip(RULE_NAMES, self.evicted.tolist(), self.wanted.tolist(), strict=True)
        return {name: (gone, back) for name, gone, back in counts if gone}

    def keys_since(self, begin: float) -> tuple[Ids, Keys]:
        """Return ids and graph keys of the records since ``begin``, oldest first."""
        numbers = np.arange(self.first, self.next)
        if len(numbers):
            times = self._origin.times(self._ring["at"][numbers % LIMIT])
            numbers = numbers[np.searchsorted(times, begin) :]
        return numbers, self._ring["key"][numbers % LIMIT]

    def at(self, number: int) -> float:
        """Return when the record was made, in the clock's seconds."""
        return self._origin.time(self._ring["at"][number % LIMIT])

    def lose_copies(self, rows: Rows, cause: Cause) -> None:
        """Record why copies of these blocks are gone."""
        self.marks[rows] &= ~np.uint8(RowMark.CAUSE)
        self.marks[rows] |= np.uint8((int(cause) + 1) << RowMark.CAUSE_SHIFT)

    def _grow(self, more: int) -> None:
        needed = min(self.next + more, LIMIT)
        if needed > len(self._ring):
            self._ring = grown(self._ring, min(LIMIT, max(needed, _GROWTH * len(self._ring))))
