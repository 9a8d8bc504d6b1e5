"""Applies an engine's events to the tables.

Runs of stored and removed blocks are applied together as vectors (a batch under pressure
alternates between the two, one block at a time); where a run stores and removes the same block
it is halved until no part does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from ..messages.events import (
    AdmissionReport,
    AdviceApplied,
    AnyEvent,
    BlocksAttended,
    BlocksCleared,
    BlocksEmbedded,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    ConfidenceSampled,
    CopiesDropped,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestHeld,
    RequestReleased,
    RequestStarted,
    SessionSignal,
    TierReport,
)
from ..tables.tables import Tables
from ..types import LAYER_NAMES, NO_ROW, PROTECTED_LAYERS, Keys, Rows, Tier, as_keys
from .chains import ChainLinker
from .co_attend import CoAttendance
from .held_requests import HeldBook
from .semantic import SemanticLinker
from .tier_copies import CopyRecorder
from .turns import Turn, TurnRecorder

_EMA_SHARE: Final = 0.2  # weight of the newest sample in means of attention and confidence; chosen
_Churn = BlocksStored | BlocksRemoved


class Ingest:
    """Applies events; the one writer of the tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.counters: Counter[str] = Counter()
        self._chains = ChainLinker(tables)
        self._turns = TurnRecorder(tables, self._chains, self.counters)
        self._copies = CopyRecorder(tables, self.counters)
        self._co_attendance = CoAttendance(tables)
        self.semantic = SemanticLinker(tables)
        self.pressure: dict[int, Pressure] = {}
        self.hello: dict[int, EngineHello] = {}
        self.applied: dict[int, AdviceApplied] = {}
        self.tier_reports: dict[int, TierReport] = {}
        self.admission_reports: dict[int, AdmissionReport] = {}
        self.held = HeldBook()
        self._reclaim_above = tables.limits.max_ghosts

    def apply(self, engine: int, events: Sequence[AnyEvent], now: float) -> None:
        """Apply one engine's events in their order. Events with no meaning are counted."""
        for kind, run in groupby(events, _kind):
            if kind is _CHURN:
                self._apply_churn(engine, cast(list[_Churn], list(run)), now)
            elif kind is _TURN:
                self._turns.apply(engine, cast(list[Turn], list(run)), now)
            else:
                for event in run:
                    self._apply_one(engine, event, now)
        self._reclaim()

    def forget_engine(self, engine: int) -> None:
        """Forget an engine that is gone, and every copy that it held."""
        self._let_go(engine)
        self._tables.models.pop(engine, None)
        self._tables.pool_blocks.pop(engine, None)
        self.held.forget(engine)
        facts = (self.pressure, self.hello, self.applied, self.tier_reports, self.admission_reports)
        for each in facts:
            each.pop(engine, None)

    def _let_go(self, engine: int) -> None:
        """Note that an engine holds nothing any more, and runs nothing."""
        self._tables.left(engine)
        self._copies.forget(engine)
        self._tables.blocks.tiers[engine] = 0
        self._tables.sessions.interrupt(engine)

    def _apply_one(self, engine: int, event: AnyEvent, now: float) -> None:
        match event:
            case SessionSignal():
                self._turns.signalled(event, now)
            case BlocksCleared():
                self._tables.emptied(engine, now)
                self._tables.blocks.unmark(engine, np.s_[:], Tier.HOT)
            case BlocksResident():
                self._resident(engine, event, now)
            case BlocksAttended():
                self._attended(engine, event, now)
            case ConfidenceSampled():
                self._confidence(engine, event)
            case BlocksEmbedded():
                self._embedded(engine, event, now)
            case BlocksSpilled():
                self._copies.spilled(engine, event, now)
            case BlocksLoaded():
                self._copies.loaded(engine, event, now)
            case CopiesDropped():
                self._copies.dropped(engine, event)
            case Pressure():
                self.pressure[engine] = event
            case EngineHello():
                self._greeted(engine, event)
                self._tables.regret.clear(engine, now)
            case TierReport():
                self.tier_reports[engine] = event
            case AdviceApplied():
                self.applied[engine] = event
            case AdmissionReport():
                self.admission_reports[engine] = event
            case RequestHeld():
                self.held.held(engine, event, now)
            case RequestReleased():
                self.held.released(engine, event)
            case BlocksStored() | BlocksRemoved() | RequestStarted() | RequestFinished():
                raise AssertionError("these are applied in runs")

    def _greeted(self, engine: int, event: EngineHello) -> None:
        """Take an engine's hello; if it runs another model than before, it holds none of the old
        blocks."""
        self._tables.sessions.interrupt(engine)  # ends that were lost leave none running for ever
        if event.model != self._tables.models.get(engine, ""):
            self._let_go(engine)
            self._tables.models[engine] = event.model
        self.hello[engine] = event
        self.held.forget(engine)
        self._tables.pool_blocks[engine] = event.num_blocks

    def _apply_churn(self, engine: int, churn: list[_Churn], now: float) -> None:
        churn = [event for event in churn if self._is_whole(event.hashes)]
        stored = [event for event in churn if isinstance(event, BlocksStored)]
        removed = [event for event in churn if isinstance(event, BlocksRemoved)]
        if stored and removed and _overlap(stored, removed):
            # One event alone never overlaps itself, so this ends.
            middle = len(churn) // 2
            self._apply_churn(engine, churn[:middle], now)
            self._apply_churn(engine, churn[middle:], now)
            return
        if stored:
            self._store(engine, stored, now)
        if removed:
            self._remove(engine, removed, now)

    def _store(self, engine: int, stored: list[BlocksStored], now: float) -> None:
        blocks = self._tables.blocks
        stored = [event for event in stored if event.hashes]
        if not stored:
            return
        keys = _joined(stored)
        counts = np.array([len(event.hashes) // 8 for event in stored])
        salt = self._tables.salt(engine)
        rows, new = blocks.ensure(keys, now, salt)
        self._chains.extend(rows, new, self._rows_before(stored, now, salt), counts)
        blocks.mark(engine, rows, Tier.HOT)
        blocks.tokens[rows] = np.repeat([event.block_size for event in stored], counts)
        self._claim(stored, rows, counts, now)
        self._tables.stored[engine] += len(rows)
        self.counters["blocks_stored"] += len(rows)
        self.counters["blocks_protected"] += int(_IS_PROTECTED[blocks.layer[rows]].sum())

    def _rows_before(self, stored: list[BlocksStored], now: float, salt: np.uint64) -> Rows:
        """The row before each run's first block; an unknown block becomes a ghost."""
        before = np.full(len(stored), NO_ROW, dtype=np.int32)
        known = [i for i, event in enumerate(stored) if event.parent is not None]
        if known:
            keys = np.array([stored[i].parent for i in known], dtype=np.uint64)
            before[known] = self._tables.blocks.ensure(keys, now, salt)[0]
        return before

    def _claim(
        self, stored: list[BlocksStored], rows: Rows, counts: npt.NDArray[np.int64], now: float
    ) -> None:
        """Assign blocks that no session walked yet to the session that stored them."""
        if not any(event.session for event in stored):
            return
        owners = [
            self._turns.session(event.session, NO_ROW, now) if event.session else NO_ROW
            for event in stored
        ]
        session = self._tables.blocks.session
        claims = np.repeat(np.array(owners, dtype=np.int32), counts)
        free = (session[rows] == NO_ROW) & (claims != NO_ROW)
        # Backwards, so that of two in one run the first to store a block has it.
        session[rows[free][::-1]] = claims[free][::-1]

    def _remove(self, engine: int, removed: list[BlocksRemoved], now: float) -> None:
        blocks = self._tables.blocks
        rows = np.unique(_known(blocks.find(_joined(removed), self._tables.salt(engine))))
        rows = rows[blocks.has(engine, rows, Tier.HOT)]
        blocks.unmark(engine, rows, Tier.HOT)
        self._tables.history.evicted(engine, rows, now)
        if engine in self.tier_reports:
            self._copies.count_evicted(engine, rows, now)
        by_layer = np.bincount(blocks.layer[rows], minlength=len(LAYER_NAMES)).tolist()
        for layer, count in enumerate(by_layer):
            self.counters[f"evicted_{LAYER_NAMES[layer]}"] += count
        self.counters["protected_evicted"] += sum(by_layer[layer] for layer in PROTECTED_LAYERS)
        self.counters["blocks_removed"] += len(rows)

    def _resident(self, engine: int, event: BlocksResident, now: float) -> None:
        if not self._is_whole(event.hashes):
            return
        blocks = self._tables.blocks
        self._copies.forget(engine)  # they are announced again right after this
        rows, _ = blocks.ensure(as_keys(event.hashes), now, self._tables.salt(engine))
        self._tables.history.unheard(engine, rows)
        blocks.unmark(engine, np.s_[:], Tier.HOT)
        blocks.mark(engine, rows, Tier.HOT)

    def _attended(self, engine: int, event: BlocksAttended, now: float) -> None:
        mass = np.frombuffer(event.mass, dtype="<f4") if len(event.mass) % 4 == 0 else _NONE
        keys = self._keys(event.hashes)
        if len(mass) != len(keys) or not np.isfinite(mass).all():
            self._refuse()
            return
        blocks = self._tables.blocks
        found = blocks.find(keys, self._tables.salt(engine))
        rows, first = np.unique(found, return_index=True)
        mass, rows = mass[first][rows != NO_ROW], rows[rows != NO_ROW]
        blocks.last_attended[rows] = now
        blocks.attention[rows] += _EMA_SHARE * (mass - blocks.attention[rows])
        self._co_attendance.observe(rows, mass, now)

    def _confidence(self, engine: int, event: ConfidenceSampled) -> None:
        blocks = self._tables.blocks
        rows = _known(blocks.find(self._keys(event.hashes), self._tables.salt(engine)))
        change = np.float32(event.confidence) - blocks.confidence[rows]
        blocks.confidence[rows] += np.float32(_EMA_SHARE) * change

    def _embedded(self, engine: int, event: BlocksEmbedded, now: float) -> None:
        keys = self._keys(event.hashes)
        fits = self.semantic.accepts(event.dim)
        if len(event.vectors) != 2 * event.dim * len(keys) or not fits or not len(keys):
            self._refuse()
            return
        vectors = np.frombuffer(event.vectors, dtype="<f2").reshape(len(keys), event.dim)
        with np.errstate(invalid="ignore"):  # signalling NaNs: they are sorted out below
            vectors = vectors.astype(np.float32)
        found = self._tables.blocks.find(keys, self._tables.salt(engine))
        rows, first = np.unique(found, return_index=True)
        usable = (rows != NO_ROW) & np.isfinite(vectors[first]).all(1)
        usable[usable] = vectors[first[usable]].any(1)
        if usable.any():
            self.semantic.embed(rows[usable], vectors[first[usable]], now)

    def _reclaim(self) -> None:
        """Release the longest unused ghosts once there are too many."""
        blocks, limit = self._tables.blocks, self._tables.limits.max_ghosts
        if len(blocks) <= self._reclaim_above:
            return
        ghosts = blocks.pick(blocks.alive[: blocks.size] & ~blocks.held())
        excess = len(ghosts) - limit * 3 // 4
        if len(ghosts) > limit:
            oldest = np.argsort(ghosts.last_used(), kind="stable")[:excess]
            self._release(np.sort(ghosts.rows[oldest]))
        self._reclaim_above = max(limit, len(blocks) + limit // 4)

    def _release(self, rows: Rows) -> None:
        self._tables.edges.remove_at(rows)
        self._co_attendance.forget(rows)
        self.semantic.forget(rows)
        self._turns.forget(rows)
        self._tables.history.forget_rows(rows)
        self._tables.links.release(rows)
        self._tables.blocks.release(rows)

    def _keys(self, hashes: bytes) -> Keys:
        return as_keys(hashes) if self._is_whole(hashes) else as_keys(b"")

    def _is_whole(self, hashes: bytes) -> bool:
        if len(hashes) % 8 == 0:
            return True
        self._refuse()
        return False

    def _refuse(self) -> None:
        self.counters["events_refused"] += 1


_CHURN: Final = (BlocksStored, BlocksRemoved)
_TURN: Final = (RequestStarted, RequestFinished)
_IS_PROTECTED: Final = np.isin(np.arange(256), [int(layer) for layer in PROTECTED_LAYERS])
_NONE: Final = np.empty(0, dtype="<f4")


def _kind(event: AnyEvent) -> tuple[type, ...]:
    """The kind of events that may be applied together with this one."""
    return next((kind for kind in (_CHURN, _TURN) if isinstance(event, kind)), ())


def _joined(events: Sequence[_Churn]) -> Keys:
    return as_keys(b"".join([event.hashes for event in events]))


def _overlap(stored: Sequence[_Churn], removed: Sequence[_Churn]) -> bool:
    return bool(np.isin(_joined(removed), _joined(stored)).any())


def _known(rows: Rows) -> Rows:
    known: Rows = rows[rows != NO_ROW]
    return known
