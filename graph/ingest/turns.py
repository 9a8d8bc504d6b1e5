"""Turns: what requests tell about their sessions, and about the blocks that they walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..messages.events import RequestFinished, RequestStarted, Segment, SessionSignal
from ..ranking.copy_worth import COPIES
from ..sessions.sessions import INFERRED
from ..tables.tables import Tables
from ..tables.walks import Walk
from ..types import (
    NEVER,
    NO_ROW,
    PROTECTED_LAYERS,
    Authority,
    BlockFlag,
    EdgeType,
    Keys,
    Rows,
    SourceLayer,
    as_keys,
)
from .chains import ChainLinker
from .layers import LayerBook
from .lineage import continued, owners

_MAX_INFERRED: Final = 65_536  # running requests without a name, remembered; chosen
_MEMORIES_A_BLOCK: Final = 4  # MEMORY_REF edges per block; more add nothing. Chosen

Turn = RequestStarted | RequestFinished
Counts = npt.NDArray[np.int64]
Positions = npt.NDArray[np.intp]


class TurnRecorder:
    """Applies request starts, request ends and session signals."""

    def __init__(self, tables: Tables, chains: ChainLinker, counters: Counter[str]) -> None:
        self._tables = tables
        self._chains = chains
        self._counters = counters
        self._layers = LayerBook(tables)
        self._inferred: dict[str, int] = {}  # running request → the session guessed for it

    def apply(self, engine: int, turns: Sequence[Turn], now: float) -> None:
        """Apply requests that started and ended, in this order.

        What their chains tell about blocks is written for all of them at once; what they tell about
        sessions, one after the other.
        """
        whole = [turn for turn in turns if len(turn.hashes) % 8 == 0]
        chains, keys, counts, order = _distinct(whole)
        if len(chains) < len(turns):
            self._counters["events_refused"] += len(turns) - len(chains)
        if not chains:
            return
        rows = self._lay(keys, counts, order, now, self._tables.salt(engine))
        for turn, chain in zip(chains, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            if isinstance(turn, RequestStarted):
                self._started(engine, turn, chain, now)
            else:
                self._finished(engine, turn, chain, now)

    def _started(self, engine: int, event: RequestStarted, rows: Rows, now: float) -> None:
        """Apply a request's start: count its hits, tag its blocks, begin its session's turn."""
        self._tables.blocks.tokens[rows] = event.block_size
        self._tables.links.walk(rows)
        self._count_hits(event, rows, now)
        self._walked(engine, event, rows)
        session = self._session_of(event, rows, now)
        self._note_regret(engine, event, rows, session, now)
        self._tables.history.started(engine, event, session, rows, now)
        self._tag(event, rows, session, now)
        self._supersede(session, rows)
        self._own(session, rows, event.tenant)
        self._tables.sessions.begin_turn(session, engine, now, event.prompt_tokens)
        self._tables.sessions.reach[session] = len(rows)
        self._mark_tip(session, rows)

    def _finished(self, engine: int, event: RequestFinished, rows: Rows, now: float) -> None:
        """Apply a request's end: its new blocks are generated text, its session is as it says."""
        self._tables.walks.add(engine, Walk(rows, 0, -1))
        self._tables.history.finished(engine, event, rows, now)
        inferred = self._inferred.pop(event.request_id, NO_ROW)
        blocks = self._tables.blocks
        size = int(blocks.tokens[rows[0]]) if len(rows) else 0
        written = rows[event.prompt_tokens // size :] if size else rows
        blocks.tokens[written] = size
        untagged = written[blocks.walkers[written] == 0]
        self._layers.state(untagged, SourceLayer.GENERATION, None, Authority.INFERRED, NO_ROW)
        tenant = self._tenant(event.tenant)
        session = self.session(event.session, tenant, now) if event.session else inferred
        if session == NO_ROW:
            return
        self._own(session, rows, event.tenant)
        self._mark_tip(session, rows)
        tip = int(rows[-1]) if len(rows) else NO_ROW
        self._tables.sessions.end_turn(session, tip, now, event.prompt_tokens, event.total_tokens)
        self._signal(session, event.session_ended, event, now)

    def signalled(self, event: SessionSignal, now: float) -> None:
        """Apply what a caller says a session is doing; an unknown session is ignored."""
        session = self._tables.sessions.find(event.session, self._tenant(event.tenant))
        if session == NO_ROW:
            self._counters["signals_of_nobody"] += 1
            return
        self._signal(session, event.ended, event, now)

    def session(self, name: str, tenant: int, now: float) -> int:
        """The row of a named session, created if unknown."""
        row, reused = self._tables.sessions.ensure(name, tenant, now)
        if len(reused):
            self._tables.blocks.forget_sessions(reused)
        return row

    def forget(self, rows: Rows) -> None:
        """These block rows are about to be reused."""
        tip = self._tables.sessions.tip
        tip[np.isin(tip, rows)] = NO_ROW

    def _lay(
        self, keys: Keys, counts: Counts, order: Positions, now: float, salt: np.uint64
    ) -> Rows:
        """The rows of whole chains, chain after chain, linked."""
        blocks = self._tables.blocks
        rows, new = np.empty(len(keys), dtype=np.int32), np.empty(len(keys), dtype=np.bool_)
        rows[order], new[order] = blocks.ensure(keys[order], now, salt)
        self._chains.lay(rows, new, counts)
        blocks.last_attended[rows] = now
        return rows

    def _count_hits(self, event: RequestStarted, rows: Rows, now: float) -> None:
        hit = rows[: event.cached_tokens // event.block_size]
        self._tables.blocks.hit_count[hit] += 1
        self._tables.blocks.last_hit[hit] = now
        self._counters["requests"] += 1
        self._counters["prompt_tokens"] += event.prompt_tokens
        self._counters["cached_tokens"] += event.cached_tokens

    def _walked(self, engine: int, event: RequestStarted, rows: Rows) -> None:
        """The rows that a match could cover: an engine computes at least a prompt's last token."""
        reach = min(len(rows), max(0, event.prompt_tokens - 1) // event.block_size)
        found = event.cached_tokens // event.block_size
        self._tables.walks.add(engine, Walk(rows, max(reach, found), found))

    def _note_regret(
        self, engine: int, event: RequestStarted, rows: Rows, session: int, now: float
    ) -> None:
        """Count blocks of a prompt that are computed again, and of which no tier has a copy."""
        blocks = self._tables.blocks
        computed = rows[event.cached_tokens // event.block_size :]
        lost = (blocks.tiers[engine, computed] & COPIES) == 0
        again = int(np.count_nonzero(lost & (blocks.created[computed] < now)))
        heard = float(self._tables.sessions.last_seen[session])
        self._tables.regret.note(engine, len(rows), again, heard)

    def _tag(self, event: RequestStarted, rows: Rows, session: int, now: float) -> None:
        """Layers from segments, the most precious last, so that it wins a block that two share."""
        size = event.block_size
        segments = _affordable(event.segments, len(rows), size)
        if len(segments) < len(event.segments):
            self._counters["segments_left_out"] += len(event.segments) - len(segments)
        for segment in segments:
            first, last = segment.start // size, -(-segment.end // size)
            covered = rows[first:last] if segment.end > segment.start else rows[:0]
            layer, authority = SourceLayer(segment.layer), Authority(segment.authority)
            self._layers.state(covered, layer, segment.importance, authority, session)
            if segment.layer in PROTECTED_LAYERS:
                self._counters["blocks_protected"] += len(covered)
            if segment.name is not None:
                blocks = self._tables.blocks
                blocks.identity[covered] = self._tables.segment_names.intern(segment.name)
                blocks.chunk[covered] = np.minimum(np.arange(len(covered)), 65_535)
            if segment.memory_id is not None:
                self._refer_to_memory(covered, segment, now)

    def _refer_to_memory(self, rows: Rows, segment: Segment, now: float) -> None:
        memory = self._tables.memories.intern(segment.memory_id or "")
        known = self._tables.blocks.sums_of(EdgeType.MEMORY_REF).degree[rows]
        rows = rows[known < _MEMORIES_A_BLOCK]
        if memory == NO_ROW or not len(rows):
            return
        targets = np.full(len(rows), memory, dtype=np.int32)
        weights = self._tables.blocks.importance[rows].astype(np.float32)
        self._tables.edges.upsert(EdgeType.MEMORY_REF, rows, targets, weights, now)

    def _session_of(self, event: RequestStarted, rows: Rows, now: float) -> int:
        """The session a request names, or the one that it continues, or a new one."""
        tenant = self._tenant(event.tenant)
        if event.session:
            return self.session(event.session, tenant, now)
        session = self._continued(rows, tenant)
        if session == NO_ROW:
            session = self.session(f"{INFERRED}{event.request_id}", tenant, now)
            self._take_over(session, rows)
        self._inferred[event.request_id] = session
        if len(self._inferred) > _MAX_INFERRED:  # requests whose end we never heard of
            del self._inferred[next(iter(self._inferred))]
        return session

    def _continued(self, rows: Rows, tenant: int) -> int:
        """The session that a request without a name continues, ``NO_ROW`` for none.

        Two branches that live side by side are two sessions: nothing continues a session that runs,
        or a branch that its session left behind.
        """
        sessions = self._tables.sessions
        session = continued(owners(self._tables.blocks, rows), sessions.reach, sessions.turns)
        if session == NO_ROW or sessions.tenant[session] != tenant or sessions.running[session]:
            return NO_ROW
        return NO_ROW if len(self._left_behind(rows)) else session

    def _take_over(self, session: int, rows: Rows) -> None:
        """Assign what another session left behind of ``rows`` to this one alone."""
        self._tables.blocks.session[self._left_behind(rows)] = session

    def _left_behind(self, rows: Rows) -> Rows:
        blocks = self._tables.blocks
        superseded: Rows = rows[blocks.flagged(rows, BlockFlag.SUPERSEDED)]
        return superseded

    def _supersede(self, session: int, rows: Rows) -> None:
        """Remove the protection of blocks of the session's last turn that this turn left behind.

        Not while another request of the session runs: then the two are siblings.
        """
        blocks, sessions = self._tables.blocks, self._tables.sessions
        blocks.unflag(rows, BlockFlag.SUPERSEDED)
        if sessions.running[session] > 0:
            return
        left = self._chains.ancestors(int(sessions.tip[session]), rows)
        if not len(left) or (len(rows) and blocks.salt[left[0]] != blocks.salt[rows[0]]):
            return  # a session's turns with another model are a chain of their own
        exclusive = (blocks.session[left] == session) & ~blocks.flagged(left, BlockFlag.SHARED)
        blocks.flag(left[exclusive], BlockFlag.SUPERSEDED)
        self._counters["blocks_superseded"] += int(exclusive.sum())

    def _own(self, session: int, rows: Rows, tenant: str | None) -> None:
        blocks = self._tables.blocks
        others = (blocks.session[rows] != NO_ROW) & (blocks.session[rows] != session)
        blocks.flag(rows[others], BlockFlag.SHARED)
        blocks.session[rows] = session
        if tenant:
            blocks.tenant[rows] = self._tenant(tenant)

    def _mark_tip(self, session: int, rows: Rows) -> None:
        if len(rows):
            self._tables.sessions.tip[session] = rows[-1]

    def _signal(
        self, session: int, ended: bool, said: RequestFinished | SessionSignal, now: float
    ) -> None:
        sessions = self._tables.sessions
        if ended:
            sessions.end(session)
        elif said.waiting_for_tool:
            tenant = int(sessions.tenant[session])
            tool = sessions.tools.number(said.tool, tenant) if said.tool else NO_ROW
            pause_s = said.expected_return_s
            if pause_s is None:
                pause_s = sessions.tools.expected_s(tool)
            sessions.wait(session, NEVER if pause_s is None else now + pause_s, tool)
        elif said.waiting_for_tool is not None:
            sessions.rest(session)

    def _tenant(self, name: str | None) -> int:
        return self._tables.tenants.intern(name) if name else NO_ROW


def _affordable(segments: Sequence[Segment], blocks: int, size: int) -> list[Segment]:
    """The segments that a request of so many blocks may have, the least precious first.

    In sum they cover each block twice at most, and share one more block each with a neighbour:
    otherwise a thousand overlapping segments would write every block a thousand times.
    """
    room, kept = 2 * blocks + len(segments), []
    for segment in sorted(segments, key=lambda each: each.layer):
        covered = min(-(-segment.end // size), blocks) - segment.start // size
        if covered <= room:
            room -= max(covered, 0)
            kept.append(segment)
    return sorted(kept, key=lambda each: -each.layer)


def _distinct(turns: Sequence[Turn]) -> tuple[Sequence[Turn], Keys, Counts, Positions]:
    """Turns whose chains hold no key twice; their keys, one chain after the other; how many each
    has; and the order that sorts the keys of each.
    """
    keys = as_keys(b"".join([turn.hashes for turn in turns]))
    counts = np.array([len(turn.hashes) // 8 for turn in turns], dtype=np.int64)
    chain = np.repeat(np.arange(len(turns)), counts)
    order = np.lexsort((keys, chain))
    twice = (np.diff(keys[order]) == 0) & (np.diff(chain) == 0)
    if not twice.any():
        return turns, keys, counts, order
    bad = set(chain[1:][twice].tolist())
    return _distinct([turn for number, turn in enumerate(turns) if number not in bad])
