"""Which session a request belongs to, and what that means for the blocks that it walks."""

from __future__ import annotations

from collections import Counter
from typing import Final

from ..messages.events import ConfidenceSampled, RequestStarted
from ..sessions.sessions import INFERRED
from ..tables.tables import Tables
from ..types import NO_ROW, BlockFlag, Rows, SessionState
from .chains import ChainLinker
from .lineage import continued, deepest, owners

_MAX_INFERRED: Final = 65_536  # running requests without a name, remembered; chosen


class RequestSessions:
    """Finds the sessions of requests, and gives them the blocks of their turns."""

    def __init__(self, tables: Tables, chains: ChainLinker, counters: Counter[str]) -> None:
        self._tables = tables
        self._chains = chains
        self._counters = counters
        # Running request, by its engine's column and its id → the session guessed for it.
        self._inferred: dict[tuple[int, str], int] = {}
        self.forks = tables.forks

    def tenant(self, name: str | None) -> int:
        """The number of a tenant; ``NO_ROW`` for none."""
        return self._tables.tenants.intern(name) if name else NO_ROW

    def finished(self, engine: int, request_id: str) -> int:
        """The session that was inferred for a request that ends; ``NO_ROW`` if none was."""
        return self._inferred.pop((engine, request_id), NO_ROW)

    def answered(self, engine: int, event: ConfidenceSampled) -> int:
        """The session whose answer was sampled; ``NO_ROW`` if it is not known."""
        if event.session:
            tenant = self._tables.tenants.find(event.tenant) if event.tenant else NO_ROW
            return self._tables.sessions.find(event.session, tenant)
        return self._inferred.get((engine, event.request_id), NO_ROW)

    def forget(self, engine: int) -> None:
        """Forget the requests of an engine that runs none of them any more."""
        for request in [request for request in self._inferred if request[0] == engine]:
            del self._inferred[request]

    def of_request(self, engine: int, event: RequestStarted, rows: Rows, now: float) -> int:
        """The session a request names, or the one that it continues, or a new one."""
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
            self._take_over(session, rows)
        self._inferred[engine, event.request_id] = session
        if len(self._inferred) > _MAX_INFERRED:  # requests whose end we never heard of
            del self._inferred[next(iter(self._inferred))]
        return session

    def _continued(self, rows: Rows, tenant: int) -> int:
        """The session that a request without a name continues, ``NO_ROW`` for none.

        Two branches that live side by side are two sessions: nothing continues a session that runs,
        or a branch that its session left behind.
        """
        sessions = self._tables.sessions
        walked = owners(self._tables.blocks, rows)
        session = continued(walked, sessions.first_reach, sessions.reach, sessions.turns)
        if session == NO_ROW or sessions.tenant[session] != tenant or sessions.running[session]:
            return NO_ROW
        return NO_ROW if len(self._left_behind(rows)) else session

    def _forked_from(self, rows: Rows, tenant: int) -> int:
        """The session whose subagent begins with ``rows``; ``NO_ROW`` for none.

        It alone walked the deepest block that was seen before, and is at work or waits for a tool.
        A stranger that shares its system prompt is no fork of it: a fork keeps at least half of its
        last prompt, and a block at least that came after its first prompt.
        """
        blocks, sessions = self._tables.blocks, self._tables.sessions
        parent, known = deepest(owners(blocks, rows))
        if parent < 0 or sessions.tenant[parent] != tenant:
            return NO_ROW
        first_prompt = blocks.created[rows[known - 1]] <= sessions.created[parent]
        if first_prompt or 2 * known < sessions.reach[parent]:
            return NO_ROW
        at_work = sessions.state[parent] in (SessionState.RUNNING, SessionState.WAITING_FOR_TOOL)
        return parent if at_work else NO_ROW

    def _take_over(self, session: int, rows: Rows) -> None:
        """Assign what another session left behind of ``rows`` to this one alone."""
        self._tables.blocks.session[self._left_behind(rows)] = session

    def _left_behind(self, rows: Rows) -> Rows:
        blocks = self._tables.blocks
        superseded: Rows = rows[blocks.flagged(rows, BlockFlag.SUPERSEDED)]
        return superseded

    def supersede(self, session: int, rows: Rows) -> None:
        """Remove the protection of blocks of the session's last turn that this turn left behind.

        Not while another request of the session runs: then the two are siblings.
        """
        blocks, sessions = self._tables.blocks, self._tables.sessions
        blocks.unflag(self._left_behind(rows), BlockFlag.SUPERSEDED)
        if sessions.running[session] > 0:
            return
        left = self._chains.ancestors(int(sessions.tip[session]), rows)
        if not len(left) or (len(rows) and blocks.salt[left[0]] != blocks.salt[rows[0]]):
            return  # a session's turns with another model are a chain of their own
        exclusive = (blocks.session[left] == session) & ~blocks.flagged(left, BlockFlag.SHARED)
        blocks.flag(left[exclusive], BlockFlag.SUPERSEDED)
        self._counters["blocks_superseded"] += int(exclusive.sum())

    def own(self, session: int, rows: Rows, tenant: str | None) -> None:
        blocks = self._tables.blocks
        walked_by = blocks.session[rows]
        others = walked_by != session
        if others.any():
            blocks.flag(rows[others & (walked_by != NO_ROW)], BlockFlag.SHARED)
            blocks.session[rows[others]] = session
        if tenant:
            blocks.tenant[rows] = self.tenant(tenant)
