"""Applies an engine's events to the tables.

Runs of stored and removed blocks are applied together, and so are runs of requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final, cast

import numpy as np

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
from ..types import NO_ROW, Rows, Tier, as_keys
from .chains import ChainLinker
from .churn import Churn, ChurnRecorder
from .co_attend import CoAttendance
from .held_requests import HeldBook
from .semantic import SemanticLinker
from .tier_copies import CopyRecorder
from .turns import Turn, TurnRecorder

_EMA_SHARE: Final = 0.2  # of the newest sample in the mean of confidences; chosen


class Ingest:
    """Applies events; the one writer of the tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.counters: Counter[str] = Counter()
        self._chains = ChainLinker(tables)
        self._turns = TurnRecorder(tables, self._chains, self.counters)
        self._copies = CopyRecorder(tables, self.counters)
        self._churn = ChurnRecorder(tables, self._chains, self._copies, self.counters)
        self._co_attendance = CoAttendance(tables, self.counters)
        self.semantic = SemanticLinker(tables, self.counters)
        self.held = HeldBook()
        self._reclaim_above = tables.limits.max_ghosts

    def apply(self, engine: int, events: Sequence[AnyEvent], now: float) -> None:
        """Apply one engine's events in their order. Events with no meaning are counted."""
        for kind, run in groupby(events, _kind):
            if kind is _CHURN:
                self._churn.apply(engine, cast(list[Churn], list(run)), now)
            elif kind is _TURN:
                self._turns.apply(engine, cast(list[Turn], list(run)), now)
            else:
                for event in run:
                    self._apply_one(engine, event, now)
        self._reclaim()

    def signalled(self, said: SessionSignal, now: float) -> bool:
        """Apply what somebody says of a session; False if it is unknown."""
        return self._turns.signalled(said, now)

    def forget_engine(self, engine: int) -> None:
        """Forget an engine that is gone, and every copy that it held."""
        self._let_go(engine)
        self._tables.models.pop(engine, None)
        self._tables.pool_blocks.pop(engine, None)
        self.held.forget(engine)
        self._tables.words.pop(engine, None)

    def _let_go(self, engine: int) -> None:
        """Note that an engine holds nothing any more, and runs nothing."""
        self._tables.left(engine)
        self._copies.forget(engine)
        self._tables.blocks.tiers[engine] = 0
        self._tables.sessions.interrupt(engine)
        self._turns.forget_engine(engine)

    def _apply_one(self, engine: int, event: AnyEvent, now: float) -> None:
        match event:
            case SessionSignal():
                self._turns.signalled(event, now)
            case BlocksCleared():
                self._tables.emptied(engine, now)
                self._tables.blocks.unmark(engine, np.s_[:], Tier.HOT)
            case BlocksResident():
                self._churn.resident(engine, event, now)
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
                self._copies.dropped(engine, event)
            case Pressure():
                self._tables.words[engine].pressure = event
            case EngineHello():
                self._greeted(engine, event)
                self._tables.regret.clear(engine, now)
            case TierReport():
                self._tables.words[engine].tiers = event
            case AdviceApplied():
                self._tables.words[engine].applied = event
            case AdmissionReport():
                self._tables.words[engine].admission = event
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
        self._tables.words[engine].hello = event
        self.held.forget(engine)
        self._tables.pool_blocks[engine] = event.num_blocks

    def _confidence(self, engine: int, event: ConfidenceSampled) -> None:
        if len(event.hashes) % 8:
            self.counters["events_refused"] += 1
            return
        blocks = self._tables.blocks
        rows = blocks.find(as_keys(event.hashes), self._tables.salt(engine))
        rows = rows[rows != NO_ROW]
        confidence = blocks.for_writing("confidence")
        change = np.float32(event.confidence) - confidence[rows]
        confidence[rows] += np.float32(_EMA_SHARE) * change

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


_CHURN: Final = (BlocksStored, BlocksRemoved)
_TURN: Final = (RequestStarted, RequestFinished)
_RUNS: Final = dict.fromkeys(_CHURN, _CHURN) | dict.fromkeys(_TURN, _TURN)


def _kind(event: AnyEvent) -> tuple[type, ...] | None:
    """The kind of events that may be applied together with this one; None: none."""
    return _RUNS.get(type(event))
