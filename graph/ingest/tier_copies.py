"""Copies of blocks in colder tiers: which engine has which, and what became of evicted blocks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from ..messages.events import BlocksLoaded, BlocksSpilled, CopiesDropped
from ..ranking.copy_worth import worth_spilling
from ..tables.tables import Tables
from ..types import NO_ROW, Keys, Rows, Tier, as_keys


class CopyRecorder:
    """Applies what engines report of their copies: as tier bits, from which SPILL_LINKs follow."""

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters

    def spilled(self, engine: int, event: BlocksSpilled, now: float) -> None:
        """Note that copies were completed; an unknown block becomes known by its copy."""
        keys = self._keys(event)
        if keys is None:
            return
        tier, blocks = Tier(event.tier), self._tables.blocks
        if tier is Tier.POOL:
            self._in_store(engine, keys)
            return
        rows = np.unique(blocks.ensure(keys, now, self._tables.salt(engine))[0])
        self._note(rows[~self._anywhere(rows, tier)], tier, 1, now)
        blocks.mark(engine, rows, tier)
        self._tables.history.copied(engine, rows)
        self._counters["blocks_spilled"] += len(rows)
        self._counters["bytes_spilled"] += len(rows) * event.bytes_per_block

    def loaded(self, engine: int, event: BlocksLoaded, now: float) -> None:
        """Note that copies came back into the engine's pool."""
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
        """Note that copies are gone."""
        keys = self._keys(event)
        if keys is not None:
            rows = np.unique(self._tables.blocks.find(keys, self._tables.salt(engine)))
            rows, blocks, tier = rows[rows != NO_ROW], self._tables.blocks, Tier(event.tier)
            if tier is Tier.POOL:
                self._lost_by_store(engine, rows, event.cause)
                return
            self._unmark(engine, rows[blocks.has(engine, rows, tier)], tier, now)
            bare = rows[~blocks.has(engine, rows, Tier.WARM | Tier.COLD)]
            self._tables.history.copies_lost(engine, bare, event.cause)

    def forget(self, engine: int, now: float, part: slice | None = None) -> None:
        """Forget an engine's copies: they are gone, or about to be announced anew.

        Args:
            part: Of the block rows; None: all.
        """
        blocks = self._tables.blocks
        if not blocks.had_copies:
            return
        rows = np.arange(blocks.size, dtype=np.int32)[part or slice(None)]
        for tier in (Tier.WARM, Tier.COLD):
            self._unmark(engine, rows[blocks.has(engine, rows, tier)], tier, now)

    def _in_store(self, engine: int, keys: Keys) -> None:
        """Note that the shared store has blocks; those that nobody heard of stay unknown."""
        rows = np.unique(self._tables.blocks.find(keys, self._tables.salt(engine)))
        rows = rows[rows != NO_ROW]
        self._tables.blocks.mark(engine, rows, Tier.POOL)
        self._tables.history.copied(engine, rows)

    def _lost_by_store(self, engine: int, rows: Rows, cause: int) -> None:
        """Note that an engine did not get blocks from the shared store: who gave them there knows
        no better."""
        blocks = self._tables.blocks
        rows = rows[self._anywhere(rows, Tier.POOL)]
        for column in range(len(blocks.tiers)):
            blocks.unmark(column, rows, Tier.POOL)
        bare = rows[~blocks.has(engine, rows, Tier.WARM | Tier.COLD)]
        self._tables.history.copies_lost(engine, bare, cause)

    def _unmark(self, engine: int, rows: Rows, tier: Tier, now: float) -> None:
        """Note that an engine has no copies of these blocks any more, which it had."""
        self._tables.blocks.unmark(engine, rows, tier)
        self._note(rows[~self._anywhere(rows, tier)], tier, -1, now)

    def _anywhere(self, rows: Rows, tier: Tier) -> npt.NDArray[np.bool_]:
        """bool ``[n]``: of which of these blocks any engine has a copy there."""
        tiers = np.bitwise_or.reduce(self._tables.blocks.tiers[:, rows], axis=0)
        return np.asarray((tiers & int(tier)) != 0)

    def _note(self, rows: Rows, tier: Tier, sign: int, now: float) -> None:
        self._tables.history.copies.add(self._tables.blocks.keys[rows], tier, sign, now)

    def count_evicted(self, engine: int, rows: Rows, now: float) -> None:
        """Count blocks that an engine with tiers lost: whether each has a copy, and should have
        one."""
        copied = self._tables.blocks.has(engine, rows, Tier.WARM | Tier.COLD)
        lost = rows[~copied]
        missed = int(worth_spilling(self._tables, lost, now).sum())
        self._counters["evicted_with_copy"] += len(rows) - len(lost)
        self._counters["evicted_without_copy"] += missed
        self._counters["evicted_not_worth_copy"] += len(lost) - missed

    def _keys(self, event: BlocksSpilled | CopiesDropped) -> Keys | None:
        """Block keys of the event; None (and counted) if they are malformed."""
        if len(event.hashes) % 8 == 0 and Tier(event.tier) in (Tier.WARM, Tier.COLD, Tier.POOL):
            return as_keys(event.hashes)
        self._counters["events_refused"] += 1
        return None
