"""Records how blocks left a pool: by which rule and ranking, and what was known of them."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ..compiled import core
from ..tables.sessions import CopyLog
from ..types import (
    IS_PROTECTED,
    NO_ROW,
    BlockFlag,
    Keys,
    Rows,
    SessionState,
    SourceLayer,
    Tier,
    layer_mask,
)
from .evictions import (
    NO_TERMS,
    UNPLACED,
    EvictedBlocks,
    EvictionLog,
    Places,
    RowMark,
    TermsAtRanking,
)
from .reasons import Cause, DepartureRule
from .requests import Bytes, Origin

if TYPE_CHECKING:
    from ..tables.blocks import BlockTable
    from ..tables.tables import Tables
    from ..tables.walks import EngineReports
    from ..wire.advice import EvictionRanking
    from ..wire.events import CacheGroup

Mask = npt.NDArray[np.bool_]
_RANKINGS: Final = 4_096  # times of rankings remembered: half an hour of them; chosen
_TERMS_EVERY_S: Final = 1.0  # seconds; computing terms costs a third of a ranking; chosen


class _Order:
    """Keys in an order; sorted at the first lookup."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._sorted: Keys | None = None
        self._at = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def places(self, keys: Keys) -> Places:
        """uint16: the place of each key in the order; ``UNPLACED`` if absent."""
        if self._sorted is None:
            self._at = np.argsort(self._keys)
            self._sorted = self._keys[self._at]
        found = np.full(len(keys), UNPLACED, dtype=np.uint16)
        if len(self._sorted):
            at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
            there = self._sorted[at] == keys
            found[there] = np.minimum(self._at[at[there]], UNPLACED - 1)
        return found


class CurrentRanking:
    """The ranking that an engine evicts by, the times of earlier ones, and recent score terms."""

    def __init__(self) -> None:
        self._made: deque[tuple[float, int]] = deque(maxlen=_RANKINGS)  # when, and its epoch
        self._order = self._termed = self._kept = _Order(np.empty(0, dtype=np.uint64))
        self._terms = NO_TERMS
        self._termed_at = -np.inf
        self.layers = IS_PROTECTED  # bool ``[256]``: the source layers that the ranking protects

    @property
    def is_lru(self) -> bool:
        """Whether the engine keeps its own order, without a ranking or with an empty one."""
        return not len(self._order)

    def wants_terms(self, now: float) -> bool:
        """Return whether the known score terms are too old."""
        return now - self._termed_at >= _TERMS_EVERY_S

    def adopt(
        self, ranking: EvictionRanking, layers: Iterable[SourceLayer], terms: TermsAtRanking | None
    ) -> None:
        self._order, self._kept = _Order(ranking.order), _Order(ranking.protected)
        self.layers = layer_mask(frozenset(layers))
        self._made.append((ranking.ts, ranking.epoch))
        if terms is not None:
            self._termed, self._terms, self._termed_at = self._order, terms, ranking.ts

    def unprotected(self, keys: Keys, place: Places, used: npt.NDArray[np.float64]) -> Mask:
        """Return which of these protected blocks the ranking knew but did not protect, since layers
        are protected only up to a share. ``used`` is when each block was last used.
        """
        made = self._made[-1][0] if self._made else -np.inf
        known: Mask = (place != UNPLACED) | (used <= made)
        kept: Mask = self._kept.places(keys) != UNPLACED
        return known & ~kept

    def places_and_terms(self, blocks: BlockTable, rows: Rows) -> tuple[Places, TermsAtRanking]:
        """Return each block's place in the ranking, uint16, ``UNPLACED`` if it is not in it; and
        the blocks' latest score terms, NaN for blocks that are not in it.
        """
        if self.is_lru and not self._terms.names:  # nobody asks for their keys
            return np.full(len(rows), UNPLACED, dtype=np.uint16), _no_terms(len(rows))
        keys = blocks.wire_keys(rows)
        place = self._order.places(keys)
        return place, self._terms_of(keys, place)

    def _terms_of(self, keys: Keys, place: Places) -> TermsAtRanking:
        if not self._terms.names:
            return _no_terms(len(place))
        if self._termed is not self._order:
            earlier = self._termed.places(keys)
            place = np.where(place == UNPLACED, place, earlier)
        return self._terms.at(place)

    def at(self, then: float) -> int | None:
        """Return the epoch of the ranking in force at time ``then``; None without one."""
        place = bisect_right(self._made, then, key=lambda each: each[0])
        return self._made[place - 1][1] if place else None


def _no_terms(count: int) -> TermsAtRanking:
    return TermsAtRanking((), np.empty((count, 0), dtype=np.float16))


_RULES: Final = bytes(  # the rules by which most blocks leave, in the order of ``core.departed``
    (
        DepartureRule.LRU,
        DepartureRule.POLICY,
        DepartureRule.SUPERSEDED,
        DepartureRule.SESSION_OVER,
        DepartureRule.UNRANKED,
    )
)


class Departures:
    """Evictions by engine, each with the rule that decided it; changed under the graph's lock."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._origin = Origin()
        # When copies came and went; it grows only for engines with colder tiers.
        self.copies = CopyLog()
        self._current: dict[int, CurrentRanking] = {}
        self._left: dict[int, str] = {}  # columns whose engine is gone, and which it was
        self.evictions: dict[int, EvictionLog] = {}  # eviction logs by residency column

    # Engines ------------------------------------------------------------------------------------

    def pool_blocks(self, engine: str) -> int:
        """Return the size of an engine's pool in blocks; 0: unknown."""
        return self._tables.pool_blocks.get(self._tables.engines.get(engine, NO_ROW), 0)

    def reports(self, engine: str) -> EngineReports:
        """Return an engine's latest reports about itself; empty for an unknown engine."""
        return self._tables.reports_of(engine)

    def evictions_of(self, engine: str) -> EvictionLog | None:
        return self.evictions.get(self._tables.engines.get(engine, NO_ROW))

    def group(self, engine: str, place: int) -> CacheGroup | None:
        """Return one of an engine's KV cache groups; None: unknown."""
        hello = self.reports(engine).hello
        groups = () if hello is None else hello.groups
        return groups[place] if place < len(groups) else None

    # Rankings and evictions ---------------------------------------------------------------------

    def ranked(
        self,
        engine: int,
        ranking: EvictionRanking,
        layers: Iterable[SourceLayer],  # layers that are protected in it
        # score terms of the blocks it evicts first; None: those of an earlier ranking still hold
        terms: TermsAtRanking | None,
    ) -> None:
        """Note an engine's new ranking; an empty one leaves the engine its own order."""
        self._current.setdefault(engine, CurrentRanking()).adopt(ranking, layers, terms)

    def wants_terms(self, engine: int, now: float) -> bool:
        """Return whether a ranking made now should include score terms of its first blocks."""
        current = self._current.get(engine)
        return current is None or current.wants_terms(now)

    def ranking_at(self, engine: int, then: float) -> int | None:
        """Return the epoch of the ranking in force at time ``then``; None without one."""
        current = self._current.get(engine)
        return None if current is None else current.at(then)

    def evicted(self, engine: int, rows: Rows, now: float) -> None:
        if not len(rows):
            return
        blocks, sessions = self._tables.blocks, self._tables.sessions
        current = self._current.get(engine)
        if current is None:
            current = self._current[engine] = CurrentRanking()
        place, terms = current.places_and_terms(blocks, rows)
        rule, used = np.empty(len(rows), dtype=np.uint8), np.empty(len(rows))
        if core.departed(
            blocks, sessions, SessionState.ENDED, current.layers, rows, place, _RULES,
            current.is_lru, rule, used,
        ):  # fmt: skip
            self._say_protected(rows, place, current, rule, used)
        left = EvictedBlocks(engine, rows, place, rule, used)
        self._log(engine).add(self._tables, left, terms, now)

    def _say_protected(
        self, rows: Rows, place: Places, current: CurrentRanking, rule: Bytes,
        used: npt.NDArray[np.float64],
    ) -> None:  # fmt: skip
        blocks, sessions = self._tables.blocks, self._tables.sessions
        owner, shared = blocks.session[rows], blocks.flagged(rows, BlockFlag.SHARED)
        is_over = (owner != NO_ROW) & (sessions.state[owner] == SessionState.ENDED) & ~shared
        protected = current.layers[blocks.layer[rows]] & (blocks.stated[rows] != 0) & ~is_over
        unprotected = current.unprotected(blocks.wire_keys(rows), place, used)
        rule[protected] = DepartureRule.PROTECTED_LAYER
        rule[protected & unprotected] = DepartureRule.PROTECTED_SHARE

    def emptied(self, engine: int, part: slice, way: int) -> None:
        """Mark all of the pool's blocks in this part of the table as gone, with ``way``, a
        ``RowMark``.

        Must be called while they still count as resident. No log is created for an engine that is
        gone.
        """
        there = self._tables.blocks.has(engine, part, Tier.HOT)
        is_gone = self._tables.name_of(engine) is None and engine not in self.evictions
        if there.any() and not is_gone:
            self._log(engine).marks[part][there] = way

    def left_unreported(self, engine: int, part: slice, gone: Rows) -> None:
        """Mark blocks of this part of the table as gone from the pool for an unknown reason."""
        # Ends of requests may be lost as well.
        self._log(engine).marks[part] &= ~np.uint8(RowMark.COMPUTING)
        self._mark(engine, gone, RowMark.UNHEARD)

    def _mark(self, engine: int, rows: Rows, way: int) -> None:
        if len(rows):
            self._log(engine).marks[rows] = way

    # Blocks that are being computed ---------------------------------------------------------------

    def stop_computing(self, engine: int, rows: Rows, others: Iterable[Rows]) -> None:
        """Note that a request no longer computes these blocks. ``others`` are the blocks that the
        engine's other requests compute.
        """
        marks = self._log(engine).marks
        found = core.unmark(marks, self._tables.blocks, engine, rows, RowMark.COMPUTING)
        if not found:
            return  # it was computed to its end, as nearly always
        open_ends = np.frombuffer(found, dtype=np.int32)
        for computed in others:
            marks[np.intersect1d(open_ends, computed)] |= np.uint8(RowMark.COMPUTING)

    def stop_computing_all(self, engine: int) -> None:
        if engine in self.evictions:
            log = self.evictions[engine]
            log.marks[: self._tables.blocks.size] &= ~np.uint8(RowMark.COMPUTING)

    # Copies -------------------------------------------------------------------------------------

    def prefetched(self, engine: int, rows: Rows) -> None:
        self._log(engine).marks[rows] |= np.uint8(RowMark.PREFETCHED)

    def copied(self, engine: int, rows: Rows) -> None:
        """Note that blocks have a copy: why an earlier one was lost no longer matters."""
        self._log(engine).marks[rows] &= ~np.uint8(RowMark.CAUSE)

    def copies_lost(self, engine: int, rows: Rows, cause: int) -> None:
        known = Cause(cause) if cause in Cause.__members__.values() else Cause.UNKNOWN
        self._log(engine).lose_copies(rows, known)

    # Rows and engines that go ---------------------------------------------------------------------

    def forget_rows(self, rows: Rows) -> None:
        blocks = self._tables.blocks
        for log in self.evictions.values():
            log.reserve(blocks.size, len(blocks.alive))
            log.marks[rows] = 0

    def forget(self, engine: int) -> None:
        """Note that an engine is gone; if it returns with the same id, its log continues."""
        log = self.evictions.get(engine)
        if log is not None:
            self._left[engine] = log.owner
        self._current.pop(engine, None)

    def arrived(self, engine: int) -> None:
        """Bind an engine to its column: a returning engine keeps its log, a different one starts
        anew. Until an engine takes the column, reports for it belong to the old one.
        """
        name = self._tables.name_of(engine) if engine in self._left else None
        if name is not None and self._left.pop(engine) != name:
            del self.evictions[engine]

    def tidying(self) -> Iterator[None]:
        """Make room before it is needed, in slices."""
        for log in list(self.evictions.values()):
            yield from log.growing(len(self._tables.blocks.alive))

    def _log(self, engine: int) -> EvictionLog:
        if self._left:
            self.arrived(engine)
        log = self.evictions.get(engine)
        if log is None:
            name = self._tables.name_of(engine) or ""
            log = self.evictions[engine] = EvictionLog(self._origin, name)
        blocks = self._tables.blocks
        log.reserve(blocks.size, len(blocks.alive))
        return log
