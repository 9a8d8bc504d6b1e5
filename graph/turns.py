"""Turns: what requests tell of their sessions, and of the blocks that they walk."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from .chains import ChainLinker
from .events import RequestFinished, RequestStarted, Segment, SessionSignal
from .tables import Tables
from .types import (
    DEFAULT_IMPORTANCE,
    NEVER,
    NO_ROW,
    BlockFlag,
    EdgeType,
    Keys,
    Rows,
    SourceLayer,
    as_keys,
)

_MAX_INFERRED: Final = 65_536


class TurnRecorder:
    """Applies request starts, request ends and session signals."""

    def __init__(self, tables: Tables, chains: ChainLinker, counters: Counter[str]) -> None:
        self._tables = tables
        self._chains = chains
        self._counters = counters
        self._inferred: dict[str, int] = {}  # running request → the session guessed for it

    def started(self, engine: int, event: RequestStarted, now: float) -> None:
        """A request was scheduled: count its hits, tag its blocks, begin its session's turn."""
        rows = self._chain(event.hashes, event.block_size, now)
        if rows is None:
            return
        self._count_hits(event, rows, now)
        self._chains.walk(rows, now)
        self._tag(event, rows, now)
        session = self._session_of(event, rows, now)
        self._supersede(session, rows)
        self._own(session, rows, event.tenant)
        self._tables.sessions.begin_turn(session, engine, now, event.prompt_tokens)
        self._mark_tip(session, rows)

    def finished(self, event: RequestFinished, now: float) -> None:
        """A request ended: its new blocks are generated text, its session is what it says."""
        inferred = self._inferred.pop(event.request_id, NO_ROW)
        rows = self._chain(event.hashes, None, now)
        if rows is None:
            return
        blocks = self._tables.blocks
        size = int(blocks.tokens[rows[0]]) if len(rows) else 0
        written = rows[event.prompt_tokens // size :] if size else rows
        blocks.tokens[written] = size
        untagged = written[blocks.walkers[written] == 0]
        self._set_layer(untagged, SourceLayer.GENERATION, None)
        tenant = self._tenant(event.tenant)
        session = self.session(event.session, tenant, now) if event.session else inferred
        if session == NO_ROW:
            return
        self._own(session, rows, event.tenant)
        self._mark_tip(session, rows)
        tip = int(rows[-1]) if len(rows) else NO_ROW
        self._tables.sessions.end_turn(session, tip, now, event.prompt_tokens, event.total_tokens)
        self._signal(
            session, event.session_ended, event.waiting_for_tool, event.expected_return_s, now
        )

    def signalled(self, event: SessionSignal, now: float) -> None:
        """A caller says what a session is doing."""
        session = self.session(event.session, self._tenant(event.tenant), now)
        self._signal(session, event.ended, event.waiting_for_tool, event.expected_return_s, now)

    def session(self, name: str, tenant: int, now: float) -> int:
        """The row of a named session, created if unknown."""
        row, reused = self._tables.sessions.ensure(name, tenant, now)
        if reused:
            blocks = self._tables.blocks
            for column in (blocks.session, blocks.tip_of):
                column[: blocks.size][column[: blocks.size] == row] = NO_ROW
        return row

    def forget(self, rows: Rows) -> None:
        """These block rows are about to be reused."""
        tip = self._tables.sessions.tip
        tip[np.isin(tip, rows)] = NO_ROW

    def _chain(self, hashes: bytes, block_size: int | None, now: float) -> Rows | None:
        """The rows of a whole chain, linked; None (and counted) if it cannot be one."""
        keys: Keys = as_keys(hashes[: len(hashes) // 8 * 8])
        if len(hashes) % 8 or len(np.unique(keys)) != len(keys):
            self._counters["events_refused"] += 1
            return None
        blocks = self._tables.blocks
        rows, new = blocks.ensure(keys, now)
        self._chains.lay(rows, new, now)
        blocks.last_attended[rows] = now
        if block_size is not None:
            blocks.tokens[rows] = block_size
        return rows

    def _count_hits(self, event: RequestStarted, rows: Rows, now: float) -> None:
        hit = rows[: event.cached_tokens // event.block_size]
        self._tables.blocks.hit_count[hit] += 1
        self._tables.blocks.last_hit[hit] = now
        self._counters["requests"] += 1
        self._counters["prompt_tokens"] += event.prompt_tokens
        self._counters["cached_tokens"] += event.cached_tokens

    def _tag(self, event: RequestStarted, rows: Rows, now: float) -> None:
        """Layers from segments, the most precious last, so that it wins a block that two share."""
        size = event.block_size
        for segment in sorted(event.segments, key=lambda each: -each.layer):
            first, last = segment.start // size, -(-segment.end // size)
            covered = rows[first:last] if segment.end > segment.start else rows[:0]
            self._set_layer(covered, SourceLayer(segment.layer), segment.importance)
            if segment.name is not None:
                blocks = self._tables.blocks
                blocks.identity[covered] = self._tables.segment_names.intern(segment.name)
                blocks.chunk[covered] = np.minimum(np.arange(len(covered)), 65_535)
            if segment.memory_id is not None:
                self._refer_to_memory(covered, segment, now)

    def _refer_to_memory(self, rows: Rows, segment: Segment, now: float) -> None:
        memory = self._tables.memories.intern(segment.memory_id or "")
        if memory == NO_ROW or not len(rows):
            return
        targets = np.full(len(rows), memory, dtype=np.int32)
        weights = self._tables.blocks.importance[rows].astype(np.float32)
        self._tables.edges.upsert(EdgeType.MEMORY_REF, rows, targets, weights, now)

    def _set_layer(self, rows: Rows, layer: SourceLayer, importance: float | None) -> None:
        blocks = self._tables.blocks
        blocks.layer[rows] = int(layer)
        blocks.importance[rows] = DEFAULT_IMPORTANCE[layer] if importance is None else importance

    def _session_of(self, event: RequestStarted, rows: Rows, now: float) -> int:
        """The session a request names, or the one whose last turn it extends, or a new one.

        Where sessions share a block (a system prompt), it is the end of nobody's turn.
        """
        tenant = self._tenant(event.tenant)
        if event.session:
            return self.session(event.session, tenant, now)
        blocks = self._tables.blocks
        tips = blocks.tip_of[rows[:-1]]
        extended = tips[(tips != NO_ROW) & ((blocks.flags[rows[:-1]] & int(BlockFlag.SHARED)) == 0)]
        session = int(extended[-1]) if len(extended) else NO_ROW
        if session == NO_ROW or self._tables.sessions.tenant[session] != tenant:
            session = self.session(f"~{event.request_id}", tenant, now)
        self._inferred[event.request_id] = session
        if len(self._inferred) > _MAX_INFERRED:  # requests whose end we never heard of
            del self._inferred[next(iter(self._inferred))]
        return session

    def _supersede(self, session: int, rows: Rows) -> None:
        """Blocks of the session's last turn that this turn left behind lose its protection.

        Not while another request of the session runs: then the two are siblings.
        """
        blocks, sessions = self._tables.blocks, self._tables.sessions
        blocks.flags[rows] &= ~np.uint8(BlockFlag.SUPERSEDED)
        if sessions.running[session] > 0:
            return
        left = self._chains.ancestors(int(sessions.tip[session]), rows)
        exclusive = (blocks.session[left] == session) & (
            (blocks.flags[left] & int(BlockFlag.SHARED)) == 0
        )
        blocks.flags[left[exclusive]] |= np.uint8(BlockFlag.SUPERSEDED)
        self._counters["blocks_superseded"] += int(exclusive.sum())

    def _own(self, session: int, rows: Rows, tenant: str | None) -> None:
        blocks = self._tables.blocks
        others = (blocks.session[rows] != NO_ROW) & (blocks.session[rows] != session)
        blocks.flags[rows[others]] |= np.uint8(BlockFlag.SHARED)
        blocks.session[rows] = session
        if tenant:
            blocks.tenant[rows] = self._tenant(tenant)

    def _mark_tip(self, session: int, rows: Rows) -> None:
        if not len(rows):
            return
        blocks, tip = self._tables.blocks, self._tables.sessions.tip
        blocks.tip_of[rows[-1]] = session
        tip[session] = rows[-1]

    def _signal(
        self, session: int, ended: bool, waiting: bool, expected_return_s: float | None, now: float
    ) -> None:
        if ended:
            self._tables.sessions.end(session)
        elif waiting:
            due = NEVER if expected_return_s is None else now + expected_return_s
            self._tables.sessions.wait(session, due)

    def _tenant(self, name: str | None) -> int:
        return self._tables.tenants.intern(name) if name else NO_ROW
