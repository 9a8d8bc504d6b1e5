"""Applies starts and ends of requests to sessions, and to the blocks that they walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from ..compiled import core
from ..logs.history import LoggedTables
from ..logs.requests import Hold
from ..ranking.copies import COPIES
from ..tables.blocks import Mask
from ..tables.hash_index import KnownBlocks, KnownChains
from ..tables.walks import Walk
from ..types import (
    DEFAULT_IMPORTANCE,
    NEVER,
    NO_ROW,
    Authority,
    Keys,
    Rows,
    SourceLayer,
    Tier,
    as_keys,
)
from ..wire.events import (
    CUT_AT_A_LENGTH,
    ConfidenceSampled,
    RequestFinished,
    RequestHeld,
    RequestReleased,
    RequestStarted,
    SessionSignal,
)
from .chains import ChainLinker
from .segments import LayerBook, SegmentTagger
from .sessions import RequestSessions

_MOST: Final = 16_384  # held requests remembered per engine; chosen
_MOST_LET_GO: Final = 1_024  # of these, requests released and not yet started; chosen


@dataclass(frozen=True, slots=True)
class HeldRequest:
    request: RequestHeld  # the engine's report of the request
    since: float  # when the sidecar received it, in monotonic seconds


class HeldBook:
    """Held requests by engine, in order of arrival."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, HeldRequest]] = {}
        self._let_go: dict[int, dict[str, Hold]] = {}

    def held(self, engine: int, event: RequestHeld, now: float) -> None:
        of_engine = self._held.setdefault(engine, {})
        if len(of_engine) < _MOST:
            of_engine[event.request_id] = HeldRequest(event, now)

    def released(self, engine: int, event: RequestReleased) -> None:
        held = self._held.get(engine, {}).pop(event.request_id, None)
        if event.reason == "gone":
            return
        fitting, live = (held.request.fitting, held.request.live) if held else (0, 0)
        of_engine = self._let_go.setdefault(engine, {})
        of_engine[event.request_id] = Hold(event.waited_s, event.reason, fitting, live)
        if len(of_engine) > _MOST_LET_GO:
            del of_engine[next(iter(of_engine))]

    def begun(self, engine: int, request_id: str) -> Hold | None:
        """Remove and return how a starting request was held; None if it was not."""
        return self._let_go[engine].pop(request_id, None) if engine in self._let_go else None

    def all(self) -> list[HeldRequest]:
        """Return all held requests, engine by engine, each in order of arrival."""
        return [held for waiting in self._held.values() for held in waiting.values()]

    def since(self, session: str, tenant: str | None) -> dict[int, float]:
        """Return engine → since when a request of this session waits there; None: any tenant's."""
        found: dict[int, float] = {}
        for engine, waiting in self._held.items():
            for held in waiting.values():
                if held.request.session == session and tenant in (None, held.request.tenant):
                    found[engine] = min(held.since, found.get(engine, held.since))
        return found

    def forget(self, engine: int) -> None:
        self._held.pop(engine, None)
        self._let_go.pop(engine, None)


Turn = RequestStarted | RequestFinished
_SEGMENTS: Final = 128  # told by requests applied in one slice: about a millisecond; chosen
_GENERATED: Final = int(SourceLayer.GENERATION)
_GENERATED_WORTH: Final = float(DEFAULT_IMPORTANCE[SourceLayer.GENERATION])


class TurnRecorder:
    """Applies request starts, request ends and session signals."""

    def __init__(
        self, tables: LoggedTables, chains: ChainLinker, held: HeldBook, counters: Counter[str]
    ) -> None:
        self._tables = tables
        self._held = held
        self._chains = chains
        self._counters = counters
        self._layers = LayerBook(tables)
        self._segments = SegmentTagger(tables, self._layers, counters)
        self._sessions = RequestSessions(tables, counters)
        self._known = KnownChains()

    def apply(self, engine: int, turns: Sequence[Turn], now: float) -> Iterator[None]:
        """Apply requests that started and ended, in order; in slices where many segments are told.
        Updates of blocks are written for all of them at once, updates of sessions one after the
        other.
        """
        whole = [turn for turn in turns if len(turn.hashes) % 8 == 0]
        if any(turn.skipped for turn in whole):
            whole = [self._with_skipped(engine, turn) for turn in whole]
        chains, names, known = self._found(engine, whole)
        if len(chains) < len(turns):
            self._counters["events_refused"] += len(turns) - len(chains)
        if not chains:
            return
        new = self._tables.blocks.complete(known, now, self._tables.salt(engine))
        self._chains.lay(known.rows, new, known.counts, now)
        self._count([each for each in chains if isinstance(each, RequestStarted)])
        start = told = 0
        try:
            for turn, name, count in zip(chains, names, known.counts, strict=True):
                end = start + count
                chain, keys = known.rows[start:end], known.keys[start:end]
                start = end
                self._known.note(name, chain)
                if isinstance(turn, RequestStarted):
                    yield from self._started(engine, turn, chain, keys, now)
                    told += len(turn.segments)
                else:
                    self._finished(engine, turn, chain, keys, now)
                if told >= _SEGMENTS:
                    told = 0
                    yield
        finally:  # what was told of this engine is not added to another's
            self._tables.history.all_told(engine, now)

    def answered(self, engine: int, event: ConfidenceSampled) -> int:
        return self._sessions.answered(engine, event)

    def _started(
        self, engine: int, event: RequestStarted, rows: Rows, keys: Keys, now: float
    ) -> Iterator[None]:
        """Apply a request's start: count its blocks' hits, tag them, begin its session's turn."""
        hits = 0 if event.warms else event.cached_tokens // event.block_size
        self._tables.links.walk(rows, hits, event.block_size, now)
        self._walked(engine, event, rows)
        session = self._sessions.of_request(engine, event, rows, now)
        hold = self._held.begun(engine, event.request_id)
        if not event.warms:
            self._note_regret(engine, event, rows, session, now)
            self._tables.history.started(engine, event, session, rows, keys, now, hold)
        if event.segments:
            yield from self._segments.tag(engine, event, rows, session, now)
        self._sessions.began(engine, session, event, rows, not _is_tip(event, rows), now)
        self._sessions.forks.works(session, now)

    def _count(self, started: Sequence[RequestStarted]) -> None:
        if spliced := [each.spliced_tokens for each in started if each.spliced_tokens]:
            self._counters["requests_spliced"] += len(spliced)
            self._counters["tokens_spliced"] += sum(spliced)
        if asking := [each for each in started if not each.warms]:
            self._counters["requests"] += len(asking)
            self._counters["prompt_tokens"] += sum([each.prompt_tokens for each in asking])
            self._counters["cached_tokens"] += sum([each.cached_tokens for each in asking])

    def _finished(
        self, engine: int, event: RequestFinished, rows: Rows, keys: Keys, now: float
    ) -> None:
        """Apply a request's end: tag its new blocks as generated, and update its session."""
        if self._tables.walks.watches(engine):
            self._tables.walks.add(engine, Walk(rows, 0, -1))
        self._tables.history.finished(engine, event, rows, keys, now)
        self._tables.changed[engine] += len(rows)
        inferred = self._sessions.finished(engine, event.request_id)
        doubtful = core.written(
            self._tables.blocks, rows, event.prompt_tokens, _GENERATED, _GENERATED_WORTH
        )
        if doubtful:
            raised = np.frombuffer(doubtful, dtype=np.int32)
            self._layers.state(raised, SourceLayer.GENERATION, None, Authority.INFERRED, NO_ROW)
        tenant, session = self._sessions.tenant(event.tenant), inferred
        if event.session:
            session = self._tables.sessions.ensure(event.session, tenant, now)
        if session == NO_ROW:
            return
        self._sessions.ended(session, event, rows, now)
        if event.reason == CUT_AT_A_LENGTH:
            self._tables.sessions.cut_short(session)
        self._signal(session, event.session_ended, event, now)
        self._sessions.forks.works(session, now)

    def signalled(self, event: SessionSignal, now: float) -> bool:
        """Apply a caller's statement about a session; returns False if the session is unknown."""
        session = self._tables.sessions.find(event.session, self._sessions.tenant(event.tenant))
        if session == NO_ROW:
            self._counters["signals_of_nobody"] += 1
            return False
        self._signal(session, event.ended, event, now)
        return True

    def forget_engine(self, engine: int) -> None:
        self._sessions.forget(engine)

    def forget(self, gone: Mask) -> None:
        """Forget the ``gone`` rows, bool ``[blocks.size]``, which are about to be reused."""
        sessions = self._tables.sessions
        tip = sessions.tip[: sessions.size]
        tip[gone[tip] & (tip != NO_ROW)] = NO_ROW

    def _with_skipped(self, engine: int, turn: Turn) -> Turn:
        """Restore a request's whole chain; empty if the skipped blocks are unknown."""
        if not turn.skipped:
            return turn
        blocks, keys = self._tables.blocks, as_keys(turn.hashes)
        row = int(blocks.find(keys[:1], self._tables.salt(engine))[0]) if len(keys) else NO_ROW
        chain = self._chains.from_root(row, turn.skipped + 1)
        if not len(chain):
            self._counters["tips_unknown"] += 1
            return replace(turn, hashes=b"", skipped=0)
        before = blocks.wire_keys(chain[:-1]).astype("<u8").tobytes()
        return replace(turn, hashes=before + turn.hashes, skipped=0)

    def _found(
        self, engine: int, turns: Sequence[Turn]
    ) -> tuple[Sequence[Turn], list[str], KnownBlocks]:
        """Drop turns whose chain has a key twice; returns turns, the name by which each one's chain
        is remembered, and where its blocks are.
        """
        names = [turn.session or turn.request_id for turn in turns]
        chains, salt = [turn.hashes for turn in turns], self._tables.salt(engine)
        known = self._tables.blocks.find_chains(chains, salt, self._known.guess(names))
        if known.bad is None:  # as always
            return turns, names, known
        good = [turn for turn, bad in zip(turns, known.bad, strict=True) if not bad]
        return self._found(engine, good)

    def _walked(self, engine: int, event: RequestStarted, rows: Rows) -> None:
        """Record the walk; a match can never cover a prompt's last token."""
        if not self._tables.walks.watches(engine):
            return
        reach = min(len(rows), max(0, event.prompt_tokens - 1) // event.block_size)
        found = event.cached_tokens // event.block_size
        copied, blocks = 0, self._tables.blocks
        if blocks.had_copies and found < reach:
            beyond = blocks.has(engine, rows[found:reach], Tier.WARM | Tier.COLD)
            copied = len(beyond) if beyond.all() else int(beyond.argmin())
        self._tables.walks.add(engine, Walk(rows, max(reach, found), found, copied))

    def _note_regret(
        self, engine: int, event: RequestStarted, rows: Rows, session: int, now: float
    ) -> None:
        """Count blocks of a session's next turn that are computed again and have no copy."""
        if not event.reads_cache:
            return  # it computes what the pool has
        tables = self._tables
        computed = (event.cached_tokens + event.loading_tokens) // event.block_size
        again = core.again(
            tables.blocks, tables.sessions, engine, session, rows, event.prompt_tokens, computed,
            COPIES, now,
        )  # fmt: skip
        left = max(0, len(rows) - computed)
        tables.regret.note(engine, len(rows), left, again, tables.sessions.last_seen.item(session))

    def _signal(
        self, session: int, ended: bool, signal: RequestFinished | SessionSignal, now: float
    ) -> None:
        sessions = self._tables.sessions
        if ended:
            sessions.end(session)
        elif signal.waiting_for_tool:
            tenant = int(sessions.tenant[session])
            tool = sessions.tools.number(signal.tool, tenant) if signal.tool else NO_ROW
            pause_s = signal.expected_return_s
            if pause_s is None:
                pause_s = sessions.tools.expected_s(tool)
            sessions.wait(session, NEVER if pause_s is None else now + pause_s, tool)
        elif signal.waiting_for_tool is not None:
            sessions.rest(session)


def _is_tip(event: RequestStarted, rows: Rows) -> bool:
    """Whether a start reports only blocks the prefix cache held (see ``SendTips``)."""
    # What the session abandoned shows at the next start that is reported whole.
    size = event.block_size
    return len(rows) < event.prompt_tokens // size and len(rows) <= event.cached_tokens // size
