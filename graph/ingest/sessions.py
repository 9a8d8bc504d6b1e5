"""Finds the session of a request, and assigns the blocks that the request walks to it."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from ..tables.blocks import BlockTable
from ..tables.sessions import INFERRED
from ..tables.tables import Tables
from ..types import NO_ROW, BlockFlag, Rows, SessionState
from ..wire.events import ConfidenceSampled, RequestFinished, RequestStarted

# Infers a request's session from its blocks if no caller names it.

SHARED: Final = -2  # owner of a block that several sessions walked

# All chosen, based on sessions of recorded agents.
_NEAR_FULL: Final = 0.75  # share of the longest prompt from which histories are compacted
_SETTLED: Final = 5  # turns after which a session has a history to compact
_TAIL: Final = 1  # blocks at a prompt's end that may differ in the next turn, as in Mooncake's
_SUMMARY: Final = 0.05  # least share of the history that a summary has; others start with less


def continued(owners: Rows, first_reach: Rows, reach: Rows, turns: Rows) -> int:
    """Return the session that a prompt continues; ``NO_ROW`` if it starts a new one.

    It continues the session that is the only one to have walked its deepest known block (a system
    prompt shared by many has no owner), if it keeps more than half of that session's last prompt,
    or is a summary of it (see ``_compacts``). If it shares only part of that session's first
    prompt, it starts a new session, as with two chats that have one system prompt. A last block
    that differs proves nothing.

    Args:
        owners: int32 ``[n]``: which session walked each block, from the start of its chain;
            ``NO_ROW`` for none, ``SHARED`` for several.
        first_reach: int32 ``[sessions]``: full blocks of each session's first prompt.
        reach: int32 ``[sessions]``: full blocks of each session's last prompt.
        turns: int32 ``[sessions]``: turns of each session.
    """
    session, known = deepest(owners)
    if session < 0:
        return NO_ROW
    before = int(reach[session])
    goes_on = known >= before - _TAIL or known > first_reach[session]
    if 2 * known > before and goes_on:
        return session
    settled = turns[session] >= _SETTLED
    compacts = settled and _compacts(known, len(owners), before, int(reach.max()))
    return session if compacts else NO_ROW


def deepest(owners: Rows) -> tuple[int, int]:
    """Return the deepest known block's owner, and the number of known blocks; see ``continued``."""
    unseen = np.flatnonzero(owners == NO_ROW)
    known = int(unseen[0]) if len(unseen) else len(owners)
    return int(owners[known - 1]) if known else NO_ROW, known


def _compacts(known: int, blocks: int, before: int, longest: int) -> bool:
    """Whether a prompt that keeps ``known`` of ``blocks`` blocks is a summary of a nearly full
    history.

    A prompt that merely shares a session's system prompt is too short to be one. ``before`` is the
    history's length, ``longest`` that of any session's longest prompt.
    """
    summarised = before >= _NEAR_FULL * longest and 2 * blocks <= before
    return summarised and blocks - known >= _SUMMARY * before


def owners(blocks: BlockTable, rows: Rows) -> Rows:
    """Return the only session that walked each row, int32 ``[len(rows)]``; see ``continued``."""
    shared = blocks.flagged(rows, BlockFlag.SHARED)
    return np.where(shared, np.int32(SHARED), blocks.session[rows])


_MAX_INFERRED: Final = 65_536  # running requests without a name that are remembered; chosen


class RequestSessions:
    """Finds the sessions of requests, and assigns them the blocks of their turns."""

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters
        # Running request, by its engine's column and its id → the session guessed for it.
        self._inferred: dict[tuple[int, str], int] = {}
        self.forks = tables.forks

    def tenant(self, name: str | None) -> int:
        return self._tables.tenants.intern(name) if name else NO_ROW

    def finished(self, engine: int, request_id: str) -> int:
        """Return the session inferred for a request that ends; ``NO_ROW`` if none was."""
        return self._inferred.pop((engine, request_id), NO_ROW)

    def answered(self, engine: int, event: ConfidenceSampled) -> int:
        """Return the session whose answer was sampled; ``NO_ROW`` if unknown."""
        if event.session:
            tenant = self._tables.tenants.find(event.tenant) if event.tenant else NO_ROW
            return self._tables.sessions.find(event.session, tenant)
        return self._inferred.get((engine, event.request_id), NO_ROW)

    def forget(self, engine: int) -> None:
        for request in [request for request in self._inferred if request[0] == engine]:
            del self._inferred[request]

    def of_request(self, engine: int, event: RequestStarted, rows: Rows, now: float) -> int:
        """Return the session that a request names or continues, or else a new one."""
        tenant = self.tenant(event.tenant)
        if event.session:
            return self._tables.sessions.ensure(event.session, tenant, now)
        session = self._continued(rows, tenant)
        if session == NO_ROW:
            name = f"{INFERRED}{self._tables.name_of(engine)}/{event.request_id}"
            parent = self._forked_from(rows, tenant)
            session = self._tables.sessions.ensure(name, tenant, now)
            if parent != NO_ROW:
                self.forks.forked(session, parent)
            self._tables.blocks.session[self._left_behind(rows)] = session
        self._inferred[engine, event.request_id] = session
        if len(self._inferred) > _MAX_INFERRED:  # requests whose end was never reported
            del self._inferred[next(iter(self._inferred))]
        return session

    def _continued(self, rows: Rows, tenant: int) -> int:
        """The session that an unnamed request continues; ``NO_ROW`` for none."""
        # Two live branches are two sessions: a request continues neither a running session nor a
        # branch that its session abandoned.
        sessions = self._tables.sessions
        walked = owners(self._tables.blocks, rows)
        session = continued(walked, sessions.first_reach, sessions.reach, sessions.turns)
        if session == NO_ROW or sessions.tenant[session] != tenant or sessions.running[session]:
            return NO_ROW
        return NO_ROW if len(self._left_behind(rows)) else session

    def _forked_from(self, rows: Rows, tenant: int) -> int:
        """The session whose subagent begins with ``rows``; ``NO_ROW`` for none."""
        # The parent alone walked the deepest known block, and is running or waits for a tool. A
        # request that only shares its system prompt is no fork: a fork keeps at least half of the
        # parent's last prompt, and a block that came after its first prompt.
        blocks, sessions = self._tables.blocks, self._tables.sessions
        parent, known = deepest(owners(blocks, rows))
        if parent < 0 or sessions.tenant[parent] != tenant:
            return NO_ROW
        first_prompt = blocks.created[rows[known - 1]] <= sessions.created[parent]
        if first_prompt or 2 * known < sessions.reach[parent]:
            return NO_ROW
        at_work = sessions.state[parent] in (SessionState.RUNNING, SessionState.WAITING_FOR_TOOL)
        return parent if at_work else NO_ROW

    def _left_behind(self, rows: Rows) -> Rows:
        blocks = self._tables.blocks
        superseded: Rows = rows[blocks.flagged(rows, BlockFlag.SUPERSEDED)]
        return superseded

    def began(
        self, engine: int, session: int, event: RequestStarted, rows: Rows, whole: bool, now: float
    ) -> None:
        """Note that a request of the session walks blocks of its prompt; ``whole``: all of them.
        Blocks of the session's last turn that it abandons become superseded, unless another request
        of the session is running: then the two are siblings.
        """
        left = self._tables.sessions.begin_walk(
            self._tables.blocks, session, rows, engine, now, event.prompt_tokens, whole
        )
        if left:
            self._counters["blocks_superseded"] += left
        if event.tenant:
            self._belong(rows, event.tenant)

    def ended(self, session: int, event: RequestFinished, rows: Rows, now: float) -> None:
        """Note that a request of the session ended, with these blocks."""
        self._tables.sessions.end_walk(
            self._tables.blocks, session, rows, now, event.prompt_tokens, event.total_tokens
        )
        if event.tenant:
            self._belong(rows, event.tenant)

    def _belong(self, rows: Rows, tenant: str) -> None:
        self._tables.blocks.for_writing("tenant")[rows] = self.tenant(tenant)
