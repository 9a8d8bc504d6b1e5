"""Determines why a prompt's first missing block is missing; the first reason that applies counts.

In this order: another layer group lacks its part of a resident block; a copy was not loaded; the
tables say that the pool has it; another request is computing it; the shared store has it; it left
this pool (evicted, perhaps with its copy lost since; reset; unknown); the shared store lost it;
another engine has it; and for a block never requested before, where the prompt diverges from a
known one. If callers use salts, such a block may be known under another salt (``apart``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isnan
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from ..compiled import core
from ..types import HELD, NO_ROW, Rows, Tier, as_keys
from .evictions import EvictionLog, RowMark
from .reasons import STORE_CAUSES, Cause, DepartureRule, Detail, Reason
from .requests import Miss

if TYPE_CHECKING:
    from ..tables.tables import Tables
    from ..wire.events import RequestStarted

Facts = tuple[int, int, int, float]
"""The tiers in which an engine has a block, the tiers in which any other engine has it, how many
requests walked it, and when it was created.
"""
_COPIES: Final = int(Tier.WARM | Tier.COLD)
_HOT: Final = int(Tier.HOT)
_POOL: Final = int(Tier.POOL)


def missed(
    tables: Tables, evictions: Mapping[int, EvictionLog], engine: int, event: RequestStarted,
    session: int, rows: Rows, index: int, mark: int, facts: Facts | None, now: float,
) -> Miss:  # fmt: skip
    """Return why a request's block ``index`` was not found, if it could have been; see
    ``judge``.
    """
    is_last = index >= min(len(rows), max(0, event.prompt_tokens - 1) // event.block_size)
    if is_last or not event.reads_cache:
        key = _wire_key(tables, rows.item(index)) if index < len(rows) else 0
        detail = Detail.PARTIAL if is_last else Detail.READS_NONE
        return Miss(index, key, Reason.NOT_CACHEABLE, detail)
    if event.lacking is not None:  # the engine itself found the block
        key = _wire_key(tables, rows.item(index))
        return Miss(index, key, Reason.OTHER_GROUP, event.lacking)
    assert facts is not None  # of a block that there is
    miss = judge(tables, evictions, engine, session, rows, index, mark, facts, now)
    parts = miss.reason is Reason.DIVERGED and event.same_tokens < event.block_size
    return replace(miss, same=event.same_tokens) if parts and event.same_tokens else miss


def judge(
    tables: Tables, evictions: Mapping[int, EvictionLog], engine: int, session: int, rows: Rows,
    index: int, mark: int, facts: Facts, now: float,
) -> Miss:  # fmt: skip
    """Return why block ``index`` of a chain was not found.

    Args:
        evictions: Eviction logs by residency column, including the engine's.
        session: Row of the request's session, as it was before the request.
        rows: int32, the whole prompt's block rows.
        mark: The block's marks, before this request marked it as computed.
        facts: Facts about the block, see ``Facts``.
        now: When the request was scheduled; rows created at this time are new.
    """
    row, log = rows.item(index), evictions[engine]
    key = _wire_key(tables, row)
    tiers, theirs, walkers, created = facts
    held = tiers & HELD
    if held & _COPIES:
        return Miss(index, key, Reason.LOAD_SLOWER)
    if held and walkers > 1:
        return Miss(index, key, Reason.UNKNOWN, Detail.IN_POOL)
    if held:
        # An engine's listing arrived before its reports of the blocks computed until then.
        return _unseen(tables, session, rows, index, key, now)
    if mark & RowMark.COMPUTING:
        return Miss(index, key, Reason.NOT_CACHEABLE, Detail.UNDER_WAY)
    if (tiers | theirs) & _POOL and _reads_store(tables, engine):
        return Miss(index, key, Reason.IN_STORE)
    elsewhere = holder(tables, engine, row) if theirs & _HOT else None
    if mark & RowMark.MASK != RowMark.HERE:
        return _gone(tables, log, row, index, key, elsewhere)
    if (lost := _lost(mark)) in STORE_CAUSES:
        return Miss(index, key, Reason.COPY_LOST, lost, engine=elsewhere)
    if elsewhere is not None:
        return Miss(index, key, Reason.OTHER_ENGINE, engine=elsewhere)
    if created < now or walkers > 1:  # it was known apart from this request, which walked it
        if len(evictions) > 1 and _was_elsewhere(evictions, engine, row):
            return Miss(index, key, Reason.OTHER_ENGINE, Detail.ELSEWHERE)
        return Miss(index, key, Reason.UNKNOWN, Detail.UNCOMPUTED)
    return _unseen(tables, session, rows, index, key, now)


def _wire_key(tables: Tables, row: int) -> int:
    return tables.blocks.keys.item(row) ^ tables.blocks.salt.item(row)


def _reads_store(tables: Tables, engine: int) -> bool:
    said = tables.reports[engine].tiers
    return said is not None and said.reads_store


def _lost(mark: int) -> Cause | None:
    """Why a block's copy is gone; None if it is not, or there was none."""
    cause = (mark & RowMark.CAUSE) >> RowMark.CAUSE_SHIFT
    return Cause(cause - 1) if cause else None


def _was_elsewhere(evictions: Mapping[int, EvictionLog], engine: int, row: int) -> bool:
    """Whether the block once left another engine's pool."""
    return any(
        column != engine and row < len(log.marks) and int(log.marks[row]) & RowMark.MASK
        for column, log in evictions.items()
    )


def _gone(
    tables: Tables, log: EvictionLog, row: int, index: int, key: int, elsewhere: str | None
) -> Miss:
    """The reason for a block that left this pool."""
    way = int(log.marks[row]) & RowMark.MASK
    if way == RowMark.RESET:
        return Miss(index, key, Reason.RESET, engine=elsewhere)
    if way == RowMark.UNHEARD:
        return Miss(index, key, Reason.UNKNOWN, Detail.UNHEARD, engine=elsewhere)
    return _evicted(tables, log, row, index, key, elsewhere)


def holder(tables: Tables, engine: int, row: int) -> str | None:
    """Return another engine whose pool has the block; None without one."""
    tiers = tables.blocks.tiers
    others = ((name, column) for name, column in tables.engines.items() if column != engine)
    return next((name for name, column in others if tiers.item(column, row) & _HOT), None)


def _evicted(
    tables: Tables, log: EvictionLog, row: int, index: int, key: int, elsewhere: str | None
) -> Miss:
    found = int(log.find(np.array([row]), tables.blocks.keys[[row]])[0])
    owner = named(tables, int(tables.blocks.session[row]))
    left = log.at(found) if found >= log.first else float("nan")
    if (lost := _lost(int(log.marks[row]))) is not None:
        return Miss(index, key, Reason.COPY_LOST, lost, found, left, owner, elsewhere)
    if found < log.first:
        return Miss(
            index, key, Reason.EVICTED, DepartureRule.FORGOTTEN, found, left, owner, elsewhere
        )
    rule, short = log.eviction(found).rule, log.next - found
    return Miss(index, key, Reason.EVICTED, rule, found, left, owner, elsewhere, short)


def _unseen(tables: Tables, session: int, rows: Rows, index: int, key: int, now: float) -> Miss:
    """The reason for a block that was never computed here: new, or diverged from a known prompt."""
    other = _sibling(tables, session, rows, index, now)
    if other is None:
        return Miss(index, key, Reason.NEVER_SEEN)
    detail = Detail.OWN_HISTORY if other == session and session != NO_ROW else Detail.NONE
    return Miss(index, key, Reason.DIVERGED, detail, session=named(tables, other))


def _sibling(tables: Tables, session: int, rows: Rows, index: int, now: float) -> int | None:
    """The session whose prompt diverges at this block: its own, or the latest one there."""
    blocks, sessions = tables.blocks, tables.sessions
    if index == 0:
        return session if session != NO_ROW and sessions.turns.item(session) > 0 else None
    # Of this very moment may be the blocks of requests that started after this one, too: only those
    # that were known before, or that a request walked, tell.
    row, parent = rows.item(index), rows.item(index - 1)
    return core.sibling(blocks, blocks.size, row, parent, session, now)


def apart(tables: Tables, miss: Miss, key: int) -> Miss:
    """Return the miss of a prompt whose content is in another salt's block, with graph key
    ``key``.
    """
    row = int(tables.blocks.find(as_keys([key]))[0])
    if row == NO_ROW:
        return Miss(miss.index, miss.key, Reason.OTHER_SALT, Detail.APART)
    owner, holds = named(tables, int(tables.blocks.session[row])), holder(tables, NO_ROW, row)
    detail = Detail.APART if holds is None else Detail.NONE
    return Miss(miss.index, miss.key, Reason.OTHER_SALT, detail, session=owner, engine=holds)


def named(tables: Tables, session: int) -> tuple[str | None, str | None]:
    if session == NO_ROW:
        return None, None
    tenant = tables.tenants.name(tables.sessions.tenant.item(session))
    return tables.sessions.names[session], tenant


_LATEST_S: Final = 2.0
"""A step's evictions are reported within this time after its requests began: ten times the pause
between two messages of an engine. Chosen."""


class OpenCase(NamedTuple):
    row: int  # row of the missing block
    key: int  # its graph key; if the row's key has changed, it is another block
    miss: Miss  # the miss, unless the block turns out to have been evicted
    computed: int  # blocks that the request computes
    # By about how many blocks the pool was too small for all blocks computed again; 0: unknown.
    short: int
    at: float  # when the request began
    since: int  # id of the first eviction reported after that


class OpenCases:
    """Misses to be judged once their step's evictions are reported, by engine and request id.

    An engine reports a step's requests first, then all of the step's evictions in one event. So the
    first evictions after a request belong to its step, unless something else was reported in
    between: a request after stored blocks, or a message with requests only.
    """

    def __init__(
        self,
        tables: Tables,
        evictions: Mapping[int, EvictionLog],  # by residency column
        closed: Callable[[OpenCase], None],  # called for each case that is closed
        judged: Callable[[int, Miss], None],  # called before, if its miss is another, with its id
    ) -> None:
        self._tables, self._evictions = tables, evictions
        self._closed, self._judged = closed, judged
        self._open: dict[int, dict[int, OpenCase]] = {}
        self._carried: dict[int, set[int]] = {}  # from one message to the next

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def awaits(self, engine: int) -> bool:
        return engine in self._open

    def is_open(self, engine: int, miss: Miss, rows: Rows) -> bool:
        """Return whether the missing block is in the pool according to the tables. ``rows`` are the
        block rows of the whole prompt, int32.
        """
        if miss.reason in (Reason.NOT_CACHEABLE, Reason.OTHER_GROUP):
            return False  # that it was there changes nothing
        return self._tables.blocks.tiers.item(engine, rows.item(miss.index)) & HELD == _HOT

    def add(
        self, number: int, engine: int, miss: Miss, row: int, computed: int, short: int, now: float
    ) -> None:
        key, log = self._tables.blocks.keys.item(row), self._evictions.get(engine)
        case = OpenCase(row, key, miss, computed, short, now, 0 if log is None else log.next)
        self._open.setdefault(engine, {})[number] = case

    def drop(self, engine: int, number: int) -> None:
        """Close a request's case, if it has one, with the miss unchanged."""
        cases = self._open.get(engine, {})
        if number in cases:
            self._closed(cases.pop(number))
        if not cases:
            self._open.pop(engine, None)

    def step_reported(self, engine: int, now: float) -> None:
        """Close an engine's cases, since the evictions of their step were reported. A case whose
        block is among these gets a new reason.
        """
        for number, case in self._open.pop(engine, {}).items():
            if (miss := self._left(engine, case, now)) is not None:
                case = case._replace(miss=miss)
                self._judged(number, miss)
            self._closed(case)

    def step_over(self, engine: int) -> None:
        """Close an engine's cases unchanged, because what follows belongs to a later step."""
        for case in self._open.pop(engine, {}).values():
            self._closed(case)

    def message_over(self, engine: int) -> None:
        """Handle the end of a message that reported requests and no later blocks.

        Cases opened before the message are closed unchanged; evictions for newer ones may be at the
        start of the next message.
        """
        for number in self._carried.pop(engine, ()):
            self.drop(engine, number)
        if left := self._open.get(engine):
            self._carried[engine] = set(left)

    def _left(self, engine: int, case: OpenCase, now: float) -> Miss | None:
        """The miss of a case whose block left in its step; None: it did not."""
        log = self._evictions.get(engine)
        is_late = now - case.at > _LATEST_S
        if log is None or is_late or int(self._tables.blocks.keys[case.row]) != case.key:
            return None
        row, key = np.array([case.row], dtype=np.int32), np.array([case.key], dtype=np.uint64)
        if int(log.find(row, key)[0]) < case.since:
            return None
        index = case.miss.index
        rows = np.full(index + 1, case.row, dtype=np.int32)
        mark, facts = log.marks.item(case.row), core.block(self._tables.blocks, engine, case.row)
        miss = judge(self._tables, self._evictions, engine, NO_ROW, rows, index, mark, facts, now)
        left = miss.left if isnan(miss.left) else case.at  # in its step, though reported later
        return replace(miss, left=left).keeping_all(case.short)
