"""Applies runs of stored and removed blocks together, as vector operations, and their copies. A run
that removes a block and stores it again is split, so that no part does both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..logs.history import LoggedTables
from ..ranking.copies import worth_spilling
from ..tables.blocks import as_slice
from ..tables.columns import distinct
from ..types import IS_PROTECTED, LAYER_NAMES, NO_ROW, Keys, Rows, Tier, as_keys
from ..wire.events import (
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
)
from .chains import ChainLinker
from .slices import SLICE_KEYS


class CopyRecorder:
    """Applies reports about copies to the tier bits, from which SPILL_LINKs derive."""

    def __init__(
        self, tables: LoggedTables, counters: Counter[str], under_lru: Callable[[int], bool]
    ) -> None:
        self._tables = tables
        self._counters = counters
        self._under_lru = under_lru

    def spilled(self, engine: int, event: BlocksSpilled, now: float) -> None:
        """Note completed copies; an unknown block gets a row."""
        keys = self._keys(event)
        if keys is None:
            return
        tier, blocks = Tier(event.tier), self._tables.blocks
        if tier is Tier.POOL:
            self._in_store(engine, keys)
            return
        rows = distinct(blocks.ensure(keys, now, self._tables.salt(engine))[0])
        self._note(rows[~self._anywhere(rows, tier)], tier, 1, now)
        blocks.mark(engine, rows, tier)
        self._tables.history.copied(engine, rows)
        self._counters["blocks_spilled"] += len(rows)
        self._counters["bytes_spilled"] += len(rows) * event.bytes_per_block

    def loaded(self, engine: int, event: BlocksLoaded, now: float) -> None:
        if len(event.hashes) % 8:
            self._counters["events_refused"] += 1
            return
        blocks, keys = self._tables.blocks, as_keys(event.hashes)
        rows, _ = blocks.ensure(keys, now, self._tables.salt(engine))
        blocks.mark(engine, rows, Tier.HOT)
        blocks.last_hit[rows] = now
        self._tables.history.prefetched(engine, rows)
        self._counters["blocks_warmed"] += len(rows)

    def dropped(self, engine: int, event: CopiesDropped, now: float) -> None:
        keys = self._keys(event)
        if keys is not None:
            blocks, tier = self._tables.blocks, Tier(event.tier)
            rows = distinct(blocks.find(keys, self._tables.salt(engine)))
            if tier is Tier.POOL:
                self._lost_by_store(engine, rows, event.cause)
                return
            self._unmark(engine, rows[blocks.has(engine, rows, tier)], tier, now)
            bare = rows[~blocks.has(engine, rows, Tier.WARM | Tier.COLD)]
            self._tables.history.copies_lost(engine, bare, event.cause)

    def forget(self, engine: int, now: float, part: slice) -> None:
        """Forget an engine's copies in these rows, which are gone or about to be listed again."""
        blocks = self._tables.blocks
        if not blocks.had_copies:
            return
        for tier in (Tier.WARM, Tier.COLD):
            copied = part.start + np.flatnonzero(blocks.has(engine, part, tier))
            if len(copied):
                self._unmark(engine, copied.astype(np.int32), tier, now)

    def _in_store(self, engine: int, keys: Keys) -> None:
        """Note that the shared store has these blocks; unknown ones get no row."""
        rows = distinct(self._tables.blocks.find(keys, self._tables.salt(engine)))
        self._tables.blocks.mark(engine, rows, Tier.POOL)
        self._tables.history.copied(engine, rows)

    def _lost_by_store(self, engine: int, rows: Rows, cause: int) -> None:
        """Note that the shared store failed to deliver blocks, for every engine."""
        blocks = self._tables.blocks
        rows = rows[self._anywhere(rows, Tier.POOL)]
        for column in range(len(blocks.tiers)):
            blocks.unmark(column, rows, Tier.POOL)
        bare = rows[~blocks.has(engine, rows, Tier.WARM | Tier.COLD)]
        self._tables.history.copies_lost(engine, bare, cause)

    def _unmark(self, engine: int, rows: Rows, tier: Tier, now: float) -> None:
        self._tables.blocks.unmark(engine, rows, tier)
        self._note(rows[~self._anywhere(rows, tier)], tier, -1, now)

    def _anywhere(self, rows: Rows, tier: Tier) -> npt.NDArray[np.bool_]:
        """bool ``[n]``: whether any engine has a copy of each block in this tier."""
        tiers = np.bitwise_or.reduce(self._tables.blocks.tiers[:, rows], axis=0)
        return np.asarray((tiers & int(tier)) != 0)

    def _note(self, rows: Rows, tier: Tier, sign: int, now: float) -> None:
        self._tables.history.copies.add(self._tables.blocks.keys[rows], tier, sign, now)

    def count_evicted(self, engine: int, rows: Rows, now: float) -> None:
        """Count evicted blocks of an engine with tiers, by whether each had or deserved a copy."""
        copied = self._tables.blocks.has(engine, rows, Tier.WARM | Tier.COLD)
        lost = rows[~copied]
        judged = not self._under_lru(engine)  # under LRU every block is worth a copy
        missed = int(worth_spilling(self._tables, lost, now).sum()) if judged else len(lost)
        self._counters["evicted_with_copy"] += len(rows) - len(lost)
        self._counters["evicted_without_copy"] += missed
        self._counters["evicted_not_worth_copy"] += len(lost) - missed

    def _keys(self, event: BlocksSpilled | CopiesDropped) -> Keys | None:
        """Block keys of the event; None (and counted) if they are malformed."""
        if len(event.hashes) % 8 == 0 and Tier(event.tier) in (Tier.WARM, Tier.COLD, Tier.POOL):
            return as_keys(event.hashes)
        self._counters["events_refused"] += 1
        return None


Churn = BlocksStored | BlocksRemoved
_LISTED: Final = 32  # parts of a list of resident blocks looked up in one slice; chosen
_PARTS: Final = 64  # parts of a run applied in one slice: some milliseconds; chosen


_EVICTED_NAMES: Final = [f"evicted_{name}" for name in LAYER_NAMES]


class Stores(NamedTuple):
    hashes: bytes  # uint64: ``blocks`` keys, event after event, then the keys before the events
    blocks: int
    counts: bytes  # int64 ``[events]``: blocks per event
    has_parent: bytes  # bool ``[events]``: whether a key precedes them
    sizes: bytes  # uint16 ``[events]``: tokens per block
    sessions: list[str | None] | None  # names of the sessions that stored them; None: no names

    @property
    def keys(self) -> Keys:
        """The stored blocks' keys, uint64 ``[blocks]``."""
        return as_keys(self.hashes)[: self.blocks]


class ChurnRecorder:
    """Applies the blocks that engines store and remove: rows, links, residency."""

    def __init__(
        self,
        tables: LoggedTables,
        chains: ChainLinker,
        copies: CopyRecorder,
        counters: Counter[str],
    ) -> None:
        self._tables = tables
        self._chains = chains
        self._copies = copies
        self._counters = counters

    def apply(self, engine: int, churn: Sequence[Churn], now: float) -> Iterator[None]:
        """Apply stored and removed blocks in order, in slices."""
        rest = yield from self._after_step(engine, churn, now)
        yield from self._apply(engine, rest, now)

    def _after_step(
        self, engine: int, churn: Sequence[Churn], now: float
    ) -> Generator[None, None, Sequence[Churn]]:
        """Apply events up to the first evictions, if these are awaited; returns the rest."""
        # These evictions belong to the step whose requests were reported last.
        open_cases = self._tables.history.open_cases
        if not open_cases.awaits(engine):
            return churn
        kinds = enumerate(churn)
        places = (
            at for at, each in kinds if type(each) is BlocksRemoved and not len(each.hashes) % 8
        )
        if (first := next(places, None)) is None:
            return churn
        yield from self._apply(engine, churn[: first + 1], now)
        open_cases.step_reported(engine, now)
        return churn[first + 1 :]

    def listing(self, engine: int, event: BlocksResident, now: float) -> Iterator[None]:
        """Replace an engine's pool contents by this list, in slices; the engine lists its copies
        anew.

        Until the last slice, the pool also appears to hold its old contents, and ``tables.listing``
        contains the engine.
        """
        if len(event.hashes) % 8:
            self._counters["events_refused"] += 1
            return
        self._tables.listing.add(engine)
        if self._tables.blocks.had_copies:
            for part in self._tables.blocks.parts():
                self._copies.forget(engine, now, part)
                yield
        keys, found = as_keys(event.hashes), list[Rows]()
        for start in range(0, len(keys), SLICE_KEYS):
            found.append(self._list(engine, keys[start : start + SLICE_KEYS], now))
            yield
            yield from self._tables.blocks.tidying()
        yield from self._keeping_only(engine, found)
        self._tables.listing.discard(engine)

    def _keeping_only(self, engine: int, found: Sequence[Rows]) -> Iterator[None]:
        """Mark all other blocks as gone from the engine's pool, in slices."""
        blocks = self._tables.blocks
        others = np.ones(blocks.size, dtype=np.bool_)
        for number, rows in enumerate(found, 1):
            others[rows] = False
            if number % _LISTED == 0:
                yield
        for part in blocks.parts():
            yield
            gone = np.flatnonzero(blocks.has(engine, part, Tier.HOT) & others[part])
            lost = (part.start + gone).astype(np.int32)
            self._tables.history.left_unreported(engine, part, lost)
            blocks.unmark(engine, lost, Tier.HOT)

    def _list(self, engine: int, keys: Keys, now: float) -> Rows:
        """Mark these blocks as resident; returns their rows."""
        blocks = self._tables.blocks
        rows, _ = blocks.ensure(keys, now, self._tables.salt(engine))
        blocks.mark(engine, as_slice(rows), Tier.HOT)
        return rows

    def _apply(self, engine: int, churn: Sequence[Churn], now: float) -> Iterator[None]:
        told = core.churn(churn, BlocksStored)
        stored, gone = Stores._make(told[:6]), as_keys(told[6])
        if len(gone) and stored.hashes and core.overlap(gone, stored.keys):
            ends = core.churn_parts(churn, BlocksStored)
            if len(ends) > 1:
                yield from self._apply_parts(engine, churn, ends, now)
                return
        self._apply_told(engine, stored, gone, told[7], now)

    def _apply_parts(
        self, engine: int, churn: Sequence[Churn], ends: Sequence[int], now: float
    ) -> Iterator[None]:
        """Apply events part by part: within one, what is stored comes first."""
        start = 0
        for number, end in enumerate(ends, 1):
            told = core.churn(churn[start:end], BlocksStored)
            self._apply_told(engine, Stores._make(told[:6]), as_keys(told[6]), told[7], now)
            start = end
            if number % _PARTS == 0:
                yield

    def _apply_told(
        self, engine: int, stored: Stores, gone: Keys, malformed: int, now: float
    ) -> None:
        if malformed:
            self._counters["events_refused"] += malformed
        if stored.hashes:
            self._store(engine, stored, now)
        if len(gone):
            self._remove(engine, gone, now)

    def _store(self, engine: int, stored: Stores, now: float) -> None:
        counts, blocks = np.frombuffer(stored.counts, dtype=np.int64), self._tables.blocks
        # A predecessor that is not known gets a row, too.
        rows, new = blocks.ensure(as_keys(stored.hashes), now, self._tables.salt(engine))
        self._chains.extend(rows, new, stored.has_parent, counts)
        rows = rows[: stored.blocks]
        sizes, claims = np.frombuffer(stored.sizes, np.uint16), self._claims(stored, now)
        kept = blocks.hold(engine, rows, counts, sizes, claims)
        self._tables.changed[engine] += len(rows)
        self._counters["blocks_stored"] += len(rows)
        self._counters["blocks_protected"] += kept

    def _claims(self, stored: Stores, now: float) -> Rows:
        """The session that stored each run, which owns those without an owner; ``NO_ROW``: none."""
        if stored.sessions is None:
            return np.full(len(stored.counts) // 8, NO_ROW, dtype=np.int32)
        known = self._tables.sessions
        owner = {
            name: known.ensure(name, NO_ROW, now) if name else NO_ROW
            for name in dict.fromkeys(stored.sessions)
        }
        return np.array([owner[name] for name in stored.sessions], dtype=np.int32)

    def _remove(self, engine: int, keys: Keys, now: float) -> None:
        blocks = self._tables.blocks
        rows = blocks.unhold(engine, keys, self._tables.salt(engine))
        self._tables.history.evicted(engine, rows, now)
        if self._tables.reports[engine].tiers is not None:
            self._copies.count_evicted(engine, rows, now)
        self._count_removed(rows)

    def _count_removed(self, rows: Rows) -> None:
        blocks = self._tables.blocks
        *by_layer, kept = core.tally(blocks, IS_PROTECTED, rows, len(_EVICTED_NAMES))
        for name, count in zip(_EVICTED_NAMES, by_layer, strict=True):
            self._counters[name] += count
        self._counters["protected_evicted"] += kept
        self._counters["blocks_removed"] += len(rows)
