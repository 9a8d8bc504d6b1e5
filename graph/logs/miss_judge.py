"""Judges why a prompt's first missing block is missing, by the first reason that holds.

Another kind of layers that lacks its part of what is there; a copy that was not loaded; a pool that
has it by the books; a request that is computing it; the shared store that has it; how the block
left this pool (by an eviction, whose copy may be lost since; by a reset; unknown); the shared store
that lost it; another engine that has it; and for a block that no request asked for before, where
the prompt differs from a known one. Where callers use salts, such a block may be known under
another one (``by_content``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ..types import HELD, NO_ROW, Rows, Tier, as_keys
from .evictions.eviction_log import EvictionLog, Way
from .reasons import STORE_CAUSES, Cause, DepartureRule, Detail, Reason
from .request_facts import Miss

if TYPE_CHECKING:
    from ..messages.events import RequestStarted
    from ..tables.tables import Tables

_COPIES: Final = int(Tier.WARM | Tier.COLD)
_HOT: Final = int(Tier.HOT)


def missed(
    tables: Tables, log: EvictionLog, engine: int, event: RequestStarted, session: int, rows: Rows,
    index: int, now: float,
) -> Miss:  # fmt: skip
    """Why a request's block ``index`` was not found, if it could be; as ``judge``."""
    is_last = index >= min(len(rows), max(0, event.prompt_tokens - 1) // event.block_size)
    if is_last or not event.reads_cache:
        key = int(tables.blocks.wire_keys(rows[index])) if index < len(rows) else 0
        detail = Detail.PARTIAL if is_last else Detail.READS_NONE
        return Miss(index, key, Reason.NOT_CACHEABLE, detail)
    if event.lacking is not None:  # the engine saw the block as it looked
        key = int(tables.blocks.wire_keys(rows[index]))
        return Miss(index, key, Reason.OTHER_GROUP, event.lacking)
    miss = judge(tables, log, engine, session, rows, index, now)
    parts = miss.reason is Reason.DIVERGED and event.same_tokens < event.block_size
    return replace(miss, same=event.same_tokens) if parts and event.same_tokens else miss


def judge(
    tables: Tables, log: EvictionLog, engine: int, session: int, rows: Rows, index: int, now: float
) -> Miss:
    """Why block ``index`` of a chain was not found.

    Args:
        log: The engine's evictions.
        session: Row of the request's session, as it was before the request.
        rows: int32, the whole prompt's; ``index`` is one of them.
        now: When the request was scheduled: rows of this very moment are new.
    """
    blocks, row = tables.blocks, int(rows[index])
    key = int(blocks.wire_keys(row))
    held, mark = int(blocks.tiers[engine, row]) & HELD, int(log.marks[row])
    if held & _COPIES:
        return Miss(index, key, Reason.LOAD_SLOWER)
    if held and blocks.walkers[row] > 1:
        return Miss(index, key, Reason.UNKNOWN, Detail.IN_POOL)
    if held:
        # An engine's list of its pool came before the news of what it had computed until then.
        return _unseen(tables, session, rows, index, key, now)
    if mark & Way.COMING:
        return Miss(index, key, Reason.NOT_CACHEABLE, Detail.UNDER_WAY)
    if _in_store(tables, engine, row):
        return Miss(index, key, Reason.IN_STORE)
    elsewhere = holder(tables, engine, row)
    if mark & Way.MASK != Way.HERE:
        return _gone(tables, log, row, index, key, elsewhere)
    if (lost := _lost(mark)) in STORE_CAUSES:
        return Miss(index, key, Reason.COPY_LOST, lost, engine=elsewhere)
    if elsewhere is not None:
        return Miss(index, key, Reason.OTHER_ENGINE, engine=elsewhere)
    if _was_elsewhere(tables, engine, row):
        return Miss(index, key, Reason.OTHER_ENGINE, Detail.ELSEWHERE)
    if _was_known(tables, row, now):
        return Miss(index, key, Reason.UNKNOWN, Detail.UNCOMPUTED)
    return _unseen(tables, session, rows, index, key, now)


def _in_store(tables: Tables, engine: int, row: int) -> bool:
    """Whether any engine knows a block to be in the store, which this engine reads."""
    said = tables.words[engine].tiers
    if said is None or not said.reads_store:
        return False
    return bool((tables.blocks.tiers[:, row] & int(Tier.POOL)).any())


def _lost(mark: int) -> Cause | None:
    """Why a block's copy is gone; None if it is not, or there was none."""
    cause = (mark & Way.CAUSE) >> Way.CAUSE_SHIFT
    return Cause(cause - 1) if cause else None


def _was_known(tables: Tables, row: int, now: float) -> bool:
    """Whether anybody but the request itself, which walked it already, told of a block."""
    blocks = tables.blocks
    return bool(blocks.created[row] < now or blocks.walkers[row] > 1)


def _was_elsewhere(tables: Tables, engine: int, row: int) -> bool:
    """Whether a block left another engine's pool."""
    logs = tables.history.evictions.items()
    return any(
        column != engine and row < len(log.marks) and int(log.marks[row]) & Way.MASK
        for column, log in logs
    )


def _gone(
    tables: Tables, log: EvictionLog, row: int, index: int, key: int, elsewhere: str | None
) -> Miss:
    """It was in this pool: how it left is marked at its row."""
    way = int(log.marks[row]) & Way.MASK
    if way == Way.RESET:
        return Miss(index, key, Reason.RESET, engine=elsewhere)
    if way == Way.UNHEARD:
        return Miss(index, key, Reason.UNKNOWN, Detail.UNHEARD, engine=elsewhere)
    return _evicted(tables, log, row, index, key, elsewhere)


def holder(tables: Tables, engine: int, row: int) -> str | None:
    """Another engine that has a block in its pool."""
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
    """The reason for a block that was not computed here: whether the prompt began like another, and
    then differed."""
    other = _sibling(tables, session, rows, index, now)
    if other is None:
        return Miss(index, key, Reason.NEVER_SEEN)
    detail = Detail.OWN_HISTORY if other == session and session != NO_ROW else Detail.NONE
    return Miss(index, key, Reason.DIVERGED, detail, session=named(tables, other))


def _sibling(tables: Tables, session: int, rows: Rows, index: int, now: float) -> int | None:
    """The session whose prompt differs at this block: its own, or the last one there."""
    blocks, sessions = tables.blocks, tables.sessions
    if index == 0:
        return session if session != NO_ROW and sessions.turns[session] > 0 else None
    parent = int(rows[index - 1])
    if not _was_known(tables, parent, now):
        return None  # what it follows is new as well
    if blocks.children[parent] <= (blocks.parent[rows[index]] == parent):
        return None  # nothing else follows it
    others = np.flatnonzero(blocks.parent[: blocks.size] == parent)
    # Of this very moment may be the blocks of requests that started after this one, too.
    known = (blocks.created[others] < now) | (blocks.walkers[others] > 0)
    others = others[(others != rows[index]) & known]
    if not len(others):
        return None
    theirs = blocks.session[others]
    if session != NO_ROW and (theirs == session).any():
        return session
    return int(theirs[np.argmax(blocks.last_attended[others])])


def by_content(tables: Tables, engine: int, event: RequestStarted, rows: Rows, miss: Miss) -> Miss:
    """The same miss, or why it is the salt's doing; notes what the request says, where it is told.

    Args:
        rows: int32, the whole prompt's.
    """
    if not event.contents or len(event.contents) != 8 * len(rows):
        return miss
    told, index = as_keys(event.contents) ^ tables.salt(engine), tables.history.contents
    if miss.reason in (Reason.NEVER_SEEN, Reason.DIVERGED):
        key = index.elsewhere(told[miss.index], event.salt)
        miss = miss if key is None else _apart(tables, miss, key)
    index.add(told, tables.blocks.keys[rows], event.salt)
    return miss


def _apart(tables: Tables, miss: Miss, key: int) -> Miss:
    """A miss of what another salt's block says as well: ``key`` is the graph's, of that block."""
    row = int(tables.blocks.find(as_keys([key]))[0])
    if row == NO_ROW:
        return Miss(miss.index, miss.key, Reason.OTHER_SALT, Detail.APART)
    owner, holds = named(tables, int(tables.blocks.session[row])), holder(tables, NO_ROW, row)
    detail = Detail.APART if holds is None else Detail.NONE
    return Miss(miss.index, miss.key, Reason.OTHER_SALT, detail, session=owner, engine=holds)


def named(tables: Tables, session: int) -> tuple[str | None, str | None]:
    """A session's name and its tenant's."""
    if session == NO_ROW:
        return None, None
    tenant = tables.tenants.name(int(tables.sessions.tenant[session]))
    return tables.sessions.names[session], tenant
