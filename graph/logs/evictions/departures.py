"""How blocks left: by which rule, after which ranking, and what was known of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...sessions.copy_log import CopyLog
from ...types import (
    NO_ROW,
    STATE_NAMES,
    BlockFlag,
    Rows,
    SessionState,
    SourceLayer,
    Tier,
)
from ..reasons import Cause, DepartureRule
from ..small_times import Bytes, Origin
from .eviction_log import UNPLACED, EvictionLog, Left, Places, Way
from .in_force import InForce, Mask
from .score_terms import TermsThen

if TYPE_CHECKING:
    from ...messages.advice import EvictionRanking
    from ...messages.cache_groups import CacheGroup
    from ...tables.engine_words import EngineWords
    from ...tables.tables import Tables

_NO_SESSION: Final = len(STATE_NAMES)
_COPIES: Final = np.uint8(Tier.WARM | Tier.COLD)


class Departures:
    """Evictions by engine, each with what decided it; one writer, under the graph's lock.

    Attributes:
        evictions: By residency column.
        copies: When copies came and went; it grows where engines have tiers alone.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._origin = Origin()
        self.copies = CopyLog()
        self._in_force: dict[int, InForce] = {}
        self._left: dict[int, str] = {}  # columns whose engine is gone, and which it was
        self.evictions: dict[int, EvictionLog] = {}

    # Engines ------------------------------------------------------------------------------------

    def pool_blocks(self, engine: str) -> int:
        """Blocks of an engine's pool; 0: not known."""
        return self._tables.pool_blocks.get(self._tables.engines.get(engine, NO_ROW), 0)

    def words(self, engine: str) -> EngineWords:
        """What an engine last said of itself; nothing, where it is not known."""
        return self._tables.words_of(engine)

    def evictions_of(self, engine: str) -> EvictionLog | None:
        """What left an engine's pool; None where nothing has, or it is gone."""
        return self.evictions.get(self._tables.engines.get(engine, NO_ROW))

    def group(self, engine: str, place: int) -> CacheGroup | None:
        """One of an engine's KV cache groups; None: not known."""
        hello = self.words(engine).hello
        groups = () if hello is None else hello.groups
        return groups[place] if place < len(groups) else None

    # Rankings and evictions ---------------------------------------------------------------------

    def ranked(
        self,
        engine: int,
        ranking: EvictionRanking,
        layers: Iterable[SourceLayer],
        terms: TermsThen | None,
    ) -> None:
        """Note an engine's new ranking; one that names no block leaves the engine its own order.

        Args:
            layers: Those that are protected in it.
            terms: Of the blocks that it lets go first; None: nobody asked for them, and those of an
                earlier ranking still hold.
        """
        self._in_force.setdefault(engine, InForce()).adopt(ranking, layers, terms)

    def wants_terms(self, engine: int, now: float) -> bool:
        """Whether a ranking that is made now should come with the terms of its first blocks."""
        in_force = self._in_force.get(engine)
        return in_force is None or in_force.wants_terms(now)

    def ranking_at(self, engine: int, then: float) -> int | None:
        """The epoch of the ranking that was in force then."""
        in_force = self._in_force.get(engine)
        return None if in_force is None else in_force.at(then)

    def evicted(self, engine: int, rows: Rows, now: float) -> None:
        """Note that blocks left the pool."""
        if not len(rows):
            return
        blocks, sessions = self._tables.blocks, self._tables.sessions
        in_force = self._in_force.setdefault(engine, InForce())
        keys = blocks.wire_keys(rows)
        place = in_force.places(keys)
        owner = blocks.session[rows]
        state = np.where(owner == NO_ROW, np.uint8(_NO_SESSION), sessions.state[owner])
        shared = (blocks.flags[rows] & int(BlockFlag.SHARED)) != 0
        used = np.maximum(blocks.last_attended[rows], blocks.last_hit[rows])
        left = Left(
            keys=blocks.keys[rows],
            place=place,
            rule=self._rules(rows, place, state, shared, in_force, used),
            layer=blocks.layer[rows],
            importance=blocks.importance[rows],
            hits=blocks.hit_count[rows],
            copies=blocks.tiers[engine, rows] & _COPIES,
            session_state=state,
            shared=shared,
            idle_s=now - used,
        )
        self._log(engine).add(rows, left, in_force.terms(keys, place), now)

    def _rules(
        self, rows: Rows, place: Places, state: Bytes, shared: Mask, in_force: InForce,
        used: npt.NDArray[np.float64],
    ) -> Bytes:  # fmt: skip
        blocks = self._tables.blocks
        is_over = (state == SessionState.ENDED) & ~shared
        if in_force.is_lrus:
            rule = np.full(len(rows), int(DepartureRule.LRU), dtype=np.uint8)
        else:
            named = place != UNPLACED
            rule = np.where(named, int(DepartureRule.POLICY), int(DepartureRule.UNRANKED)).astype(
                np.uint8
            )
            rule[named & is_over] = DepartureRule.SESSION_OVER
            superseded = (blocks.flags[rows] & int(BlockFlag.SUPERSEDED)) != 0
            rule[named & superseded] = DepartureRule.SUPERSEDED
        protected = in_force.layers[blocks.layer[rows]] & (blocks.stated[rows] != 0) & ~is_over
        if protected.any():
            gave_up = in_force.gave_up(blocks.wire_keys(rows), place, used)
            rule[protected] = DepartureRule.PROTECTED_LAYER
            rule[protected & gave_up] = DepartureRule.PROTECTED_SHARE
        return rule

    def emptied(self, engine: int, part: slice, way: int) -> None:
        """Note in which way all blocks of the pool in this part of the table are gone; called while
        they are still listed. An engine that is gone gets no log for that."""
        there = self._tables.blocks.has(engine, part, Tier.HOT)
        is_gone = self._tables.name_of(engine) is None and engine not in self.evictions
        if there.any() and not is_gone:
            self._log(engine).marks[part][there] = way

    def unheard(self, engine: int, gone: Rows) -> None:
        """Note that these blocks of the pool are gone, and that it is unknown how."""
        self._log(engine).marks &= ~np.uint8(Way.COMING)  # ends of requests may be lost as well
        self._mark(engine, gone, Way.UNHEARD)

    def _mark(self, engine: int, rows: Rows, way: int) -> None:
        if len(rows):
            self._log(engine).marks[rows] = way

    # Blocks that are being computed ---------------------------------------------------------------

    def comes_no_longer(self, engine: int, rows: Rows, others: Iterable[Rows]) -> None:
        """Note that a request computes these blocks no longer; ``others`` are what the engine's
        other requests compute."""
        marks = self._log(engine).marks
        open_ends = rows[(marks[rows] & Way.COMING) != 0]
        marks[rows] &= ~np.uint8(Way.COMING)
        open_ends = open_ends[~self._tables.blocks.has(engine, open_ends, Tier.HOT)]
        if not len(open_ends):
            return  # it was computed to its end, as nearly always
        for computed in others:
            marks[np.intersect1d(open_ends, computed)] |= np.uint8(Way.COMING)

    def nothing_comes(self, engine: int) -> None:
        """Note that an engine computes no block any more."""
        if engine in self.evictions:
            self.evictions[engine].marks &= ~np.uint8(Way.COMING)

    # Copies -------------------------------------------------------------------------------------

    def prefetched(self, engine: int, rows: Rows) -> None:
        """Note that blocks were brought back before any request asked."""
        self._log(engine).marks[rows] |= np.uint8(Way.PREFETCHED)

    def copied(self, engine: int, rows: Rows) -> None:
        """Note that blocks have copies now."""
        self._log(engine).marks[rows] &= ~np.uint8(Way.CAUSE)

    def copies_lost(self, engine: int, rows: Rows, cause: int) -> None:
        """Note that copies of blocks are gone, and no tier has another."""
        known = Cause(cause) if cause in Cause.__members__.values() else Cause.UNKNOWN
        self._log(engine).lose_copies(rows, known)

    # Rows and engines that go ---------------------------------------------------------------------

    def forget_rows(self, rows: Rows) -> None:
        """Forget these block rows, which are about to be reused."""
        for log in self.evictions.values():
            log.reserve(self._tables.blocks.size)
            log.marks[rows] = 0

    def forget(self, engine: int) -> None:
        """An engine is gone. It may come back, by its own id: then its log goes on; another one in
        its column begins anew.
        """
        log = self.evictions.get(engine)
        if log is not None:
            self._left[engine] = log.owner
        self._in_force.pop(engine, None)

    def arrived(self, engine: int) -> None:
        """Note who holds a column. The engine that left goes on with its log; another one begins
        its own; while nobody does, news is the old one's."""
        name = self._tables.name_of(engine) if engine in self._left else None
        if name is not None and self._left.pop(engine) != name:
            del self.evictions[engine]

    def _log(self, engine: int) -> EvictionLog:
        self.arrived(engine)
        log = self.evictions.get(engine)
        if log is None:
            name = self._tables.name_of(engine) or ""
            log = self.evictions[engine] = EvictionLog(self._origin, name)
        log.reserve(self._tables.blocks.size)
        return log
