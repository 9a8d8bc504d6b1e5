"""Applies an engine's events to the tables. Runs of stored and removed blocks are applied together,
and so are runs of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import numpy as np

from ..logs.evictions import RowMark
from ..logs.history import LoggedTables
from ..types import NO_ROW, Tier, as_keys
from ..wire.events import (
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
from .blocks import Churn, ChurnRecorder, CopyRecorder
from .chains import ChainLinker
from .similarity import CoAttendance, SemanticLinker
from .slices import CHURN, SINGLE, SLICE_KEYS, TURNS, GhostKeeper, Run, event_runs
from .turns import HeldBook, Turn, TurnRecorder

_EMA_SHARE: Final = 0.2  # weight of the newest sample in a block's mean confidence; chosen
_OF_A_POOL: Final = (BlocksCleared, BlocksResident, EngineHello)


class Ingest:
    """Applies engines' events; ``under_lru`` says of a residency column whether LRU ranks there."""

    def __init__(self, tables: LoggedTables, under_lru: Callable[[int], bool]) -> None:
        self._tables = tables
        self.counters: Counter[str] = Counter()
        self._chains = ChainLinker(tables, self.counters)
        self.held = HeldBook()
        self._turns = TurnRecorder(tables, self._chains, self.held, self.counters)
        self._copies = CopyRecorder(tables, self.counters, under_lru)
        self._churn = ChurnRecorder(tables, self._chains, self._copies, self.counters)
        self._co_attendance = CoAttendance(tables, self.counters)
        self.semantic = SemanticLinker(tables, self.counters)
        self._ghosts = GhostKeeper(
            tables,
            (self._co_attendance.forget, self._turns.forget),
            (self.semantic.forget, tables.history.forget_rows),
        )

    def slices(self, engine: int, events: Sequence[AnyEvent], now: float) -> Iterator[None]:
        """Apply one engine's events in order, in slices; meaningless events are counted."""
        keys, before = 0, SINGLE
        for run in event_runs(events):
            if _is_later_step(before, run):
                self._tables.history.open_cases.step_over(engine)
            before = run.kind
            if run.kind is CHURN:
                yield from self._churn.apply(engine, cast(list[Churn], run.events), now)
            elif run.kind is TURNS:
                yield from self._turns.apply(engine, cast(list[Turn], run.events), now)
            elif isinstance(event := run.events[0], BlocksResident):
                yield from self._churn.listing(engine, event, now)
            elif isinstance(event, BlocksCleared):
                yield from self._emptying(engine, now)
            elif isinstance(event, EngineHello):
                yield from self._connected(engine, event, now)
            else:
                self._apply_one(engine, event, now)
            keys += run.keys
            if keys >= SLICE_KEYS:
                keys = 0
                yield
                yield from self._tidying()
        self._message_over(engine, events, before, now)
        yield from self._ghosts.releasing()
        yield from self._co_attendance.fading(now)
        yield from self._tidying()
        yield from self._tables.edges.tidying()

    def _tidying(self) -> Iterator[None]:
        yield from self._tables.blocks.tidying()
        yield from self._tables.history.tidying()

    def _message_over(
        self, engine: int, events: Sequence[AnyEvent], last: tuple[type, ...], now: float
    ) -> None:
        """Handle the end of a message whose last run is of kind ``last``."""
        history = self._tables.history
        history.await_no_overdue(engine, now)
        if last is CHURN:
            history.open_cases.step_over(engine)
        elif history.open_cases.awaits(engine) and any(type(each) in TURNS for each in events):
            history.open_cases.message_over(engine)

    def signalled(self, signal: SessionSignal, now: float) -> bool:
        """Apply a caller's statement about a session; returns False if the session is unknown."""
        return self._turns.signalled(signal, now)

    def forgetting(self, engine: int, now: float) -> Iterator[None]:
        """Forget an engine that is gone, in slices; its column is reused after the last one."""
        self._tables.leaving.add(engine)
        self._tables.models.pop(engine, None)
        self._tables.pool_blocks.pop(engine, None)
        self._tables.listing.discard(engine)
        self.held.forget(engine)
        self._tables.reports.pop(engine, None)
        yield from self._letting_go(engine, now)
        self._tables.leaving.discard(engine)

    def _letting_go(self, engine: int, now: float) -> Iterator[None]:
        """Mark an engine's blocks and requests as gone, in slices."""
        self._tables.left(engine)
        self._tables.sessions.interrupt(engine)
        self._turns.forget_engine(engine)
        yield from self._tables.history.forgetting(engine)
        for part in self._tables.blocks.parts():
            yield
            self._tables.history.emptied(engine, part, RowMark.UNHEARD)
            self._copies.forget(engine, now, part)
            self._tables.blocks.unmark_all(engine, part)

    def _apply_one(self, engine: int, event: AnyEvent, now: float) -> None:
        match event:
            case SessionSignal():
                self._turns.signalled(event, now)
            case BlocksAttended():
                self._co_attendance.attended(engine, event, now)
            case ConfidenceSampled():
                self._confidence(engine, event)
            case BlocksEmbedded():
                self.semantic.embedded(engine, event, now)
            case BlocksSpilled():
                self._copies.spilled(engine, event, now)
            case BlocksLoaded():
                self._copies.loaded(engine, event, now)
            case CopiesDropped():
                self._copies.dropped(engine, event, now)
            case Pressure():
                self._tables.reports[engine].pressure = event
            case TierReport():
                self._tables.reports[engine].tiers = event
            case AdviceApplied():
                self._tables.reports[engine].note_applied(event, now)
            case AdmissionReport():
                self._tables.reports[engine].admission = event
            case RequestHeld():
                self.held.held(engine, event, now)
            case RequestReleased():
                self.held.released(engine, event)
            case (
                BlocksStored()
                | BlocksRemoved()
                | BlocksResident()
                | BlocksCleared()
                | EngineHello()
                | RequestStarted()
                | RequestFinished()
            ):
                raise AssertionError("these are applied in runs, or in slices")

    def _emptying(self, engine: int, now: float) -> Iterator[None]:
        """Mark all blocks of a pool as gone, in slices."""
        self._tables.emptied(engine, now)
        blocks = self._tables.blocks
        held = blocks.holding(engine).rows
        for part in blocks.parts() if len(held) else ():
            first, end = np.searchsorted(held, (part.start, part.stop))
            if first == end:
                continue
            self._tables.history.emptied(engine, part, RowMark.RESET)
            blocks.unmark(engine, part, Tier.HOT)
            yield

    def _connected(self, engine: int, event: EngineHello, now: float) -> Iterator[None]:
        """Apply an engine's hello; if its model changed, it holds none of the old blocks."""
        self._tables.sessions.interrupt(engine)  # ends that were lost leave none running for ever
        if event.model != self._tables.models.get(engine, ""):
            yield from self._letting_go(engine, now)
            self._tables.models[engine] = event.model
        yield from self._tables.history.greeting(engine, now)
        self._tables.reports[engine].hello = event
        self.held.forget(engine)
        self._tables.pool_blocks[engine] = event.num_blocks
        self._tables.regret.clear(engine, now)

    def _confidence(self, engine: int, event: ConfidenceSampled) -> None:
        if len(event.hashes) % 8:
            self.counters["events_refused"] += 1
            return
        blocks = self._tables.blocks
        rows = blocks.find(as_keys(event.hashes), self._tables.salt(engine))
        rows = rows[rows != NO_ROW]
        confidence = blocks.for_writing("confidence")
        before, newest = confidence[rows], np.float32(event.confidence)
        share = np.where(before < 1, np.float32(_EMA_SHARE), np.float32(1))  # the first is the mean
        confidence[rows] = before + share * (newest - before)
        session = self._turns.answered(engine, event)
        if session != NO_ROW:
            self._tables.sessions.sure(session, event.confidence)


def _is_later_step(before: tuple[type, ...], run: Run) -> bool:
    # A step's requests are reported first, then its blocks; events about a whole pool come between
    # steps.
    after_blocks = before is CHURN and run.kind is not CHURN
    return after_blocks or type(run.events[0]) in _OF_A_POOL
