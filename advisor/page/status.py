"""What the HTTP surface serves: the sidecar's health, status and totals, and the page's paths."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from ... import __version__
from ...dashboards.answer import as_json, parse_key
from ...dashboards.source import BusyError, EngineStatus, LogTotals, SidecarStatus
from ...graph.errors import GraphError
from ...graph.logs.history import LOST_WAYS, TOKEN_COLUMNS, History, LoggedTables
from ...graph.logs.reasons import REASON_NAMES
from ...graph.stats import GraphStats
from ..assembly import Sidecar
from ..shadows.runner import ShadowRunner
from ..sockets.subscriber import Peer
from ..words.times import UnixTime
from ..words.waits import fit_and_live
from . import (
    caches,
    engines,
    events,
    evictions,
    graph,
    intents,
    misses,
    now,
    ranking,
    sampled,
    sessions,
    shadows,
    what_if,
)
from .graph import KeyParam
from .page import NameParam, NameQuery, Page, QueryGate, RecentAnswers
from .ranking import ranked_by


def log_totals(tables: LoggedTables, shadows: ShadowRunner) -> LogTotals:
    """Return the logs' totals since the start; does not read the graph."""
    history, totals = tables.history, tables.history.totals
    count = len(REASON_NAMES)
    return LogTotals(
        tokens=_tokens(history),
        reasons={name: (totals[at], totals[count + at]) for at, name in enumerate(REASON_NAMES)},
        lost=dict(zip(LOST_WAYS, history.lost.tolist(), strict=True)),
        rules=_rules(tables),
        shadows=_shadows(shadows),
        log_bytes=history.nbytes,
    )


def _tokens(history: History) -> dict[str, int]:
    given = dict(zip(TOKEN_COLUMNS, history.given, strict=True))
    found = {name: given[name] for name in ("pool", "loaded", "prefetched")}
    return {**found, "computed": given["asked"] - sum(found.values())}


def _rules(tables: LoggedTables) -> dict[tuple[str, str], tuple[int, int]]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for engine, column in list(tables.engines.items()):
        log = tables.history.evictions.get(column)
        if log is not None:
            found |= {(engine, rule): counts for rule, counts in log.by_rule().items()}
    return found


def _shadows(runner: ShadowRunner) -> dict[tuple[str, str], tuple[int, int]]:
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    with runner.lock:
        for engine, each in runner.sets.items():
            counts[engine, "ours"] = each.asked, each.ours
            counts |= {(engine, p.name): (each.asked_of(p), p.found) for p in each.pools}
    return {name: (asked, found) for name, (asked, found) in counts.items() if asked}


STALLED_AFTER_S = 5.0  # chosen
FRESH_S = 0.25  # an older status is computed again; chosen


class Status:
    """``dashboards.source.StatusSource`` of a running sidecar; thread-safe."""

    def __init__(self, parts: Sidecar, max_stale_s: float, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._graph = parts.graph
        self._planner = parts.planner
        self._max_stale_s = max_stale_s  # from which age a ranking is a fault
        self._clock = clock
        self._started = clock()
        self._questions = QueryGate(parts.graph.lock, clock)
        self.page = Page(
            parts.graph,
            self._questions,
            RecentAnswers(parts.graph.clock),
            status=self.status,
            latest=lambda: parts.planner.latest,
            admissions=lambda: parts.planner.admissions,
            shadows=parts.shadows,
            watch=parts.watch,
            intended=lambda: parts.planner.applied(intended=True),
            unix=UnixTime(parts.graph.clock),
        )
        self._status: tuple[float, SidecarStatus] | None = None  # when it was true, and what
        self.http = ""  # the HTTP surface's URL, once it is known

    def is_healthy(self) -> bool:
        now = self._clock()
        fresh = all(now - each.ts <= self._max_stale_s for each in self._planner.latest.values())
        return fresh and now - self._parts.intake.last_turn < STALLED_AFTER_S

    def not_ready(self) -> str | None:
        if not self.is_healthy():
            return "the sidecar's loop is stalled, or its rankings are old"
        latest = self._planner.latest
        waiting = [each for each in self._parts.subscriber.peers if not each.synced]
        unranked = [each for each in self._parts.subscriber.peers if each.engine not in latest]
        if waiting or unranked:
            return f"{len(waiting)} engines to list their blocks, {len(unranked)} to be ranked"
        return None

    def totals(self) -> LogTotals:
        return log_totals(self._graph.tables, self._parts.shadows)

    def status(self) -> SidecarStatus:
        """Return the state of everything, now or a moment ago, since many clients may ask."""
        known = self._status
        if known is not None and self._clock() - known[0] < FRESH_S:
            return known[1]
        try:
            with self._questions.turn():
                at, stats = self._clock(), self._graph.stats()
        except BusyError:
            if known is None:
                raise
            return known[1]
        status = self._current(stats)
        self._status = (at, status)
        return status

    def _current(self, stats: GraphStats) -> SidecarStatus:
        return SidecarStatus(
            version=__version__,
            pid=os.getpid(),
            uptime_s=round(self._clock() - self._started, 3),
            endpoint=self._parts.front.endpoint,
            http=self.http,
            engines=(
                *(self._engine(peer, stats) for peer in self._parts.subscriber.peers),
                *self._watched_engines(stats),
            ),
            graph=stats,
            counters=self._counters(stats),
            snapshot=self._parts.snapshots.status(),
            config={"error": self._parts.watch.last_error},
            lost={name: round(ago, 1) for name, ago in self._parts.subscriber.lost().items()},
        )

    def _engine(self, peer: Peer, stats: GraphStats) -> EngineStatus:
        ranking, now = self._planner.latest.get(peer.engine), self._clock()
        return EngineStatus(
            id=peer.engine,
            name=peer.hello.engine,
            model=peer.hello.model,
            version=peer.hello.version,
            kind="hook",
            state="synced" if peer.synced else "resyncing",
            silent_s=round(now - peer.last_seen, 3),
            gaps=peer.sequence.gaps,
            resyncs=peer.resyncs,
            ranking_epoch=ranking.epoch if ranking else None,
            ranking_age_s=round(now - ranking.ts, 3) if ranking else None,
            ranked=len(ranking.order) if ranking else 0,
            ranked_protected=len(ranking.protected) if ranking else 0,
            graph=(known := stats.engines.get(peer.engine)),
            tiers=known.tiers if known else None,
            ruling=self._graph.ruling(peer.engine),
            room=self._planner.admissions.get(peer.engine),
            ranked_by=ranked_by(self._graph, peer.engine),
            hashing=peer.hashing.told,
        )

    def _watched_engines(self, stats: GraphStats) -> Iterable[EngineStatus]:
        now = self._clock()
        for source in self._parts.sources:
            seen = source.last_seen
            yield EngineStatus(
                id=source.engine,
                name=source.config.endpoint,
                model=source.config.model,
                version="",
                kind="kv_events",
                state=source.state.value,
                silent_s=None if seen is None else round(now - seen, 3),
                gaps=source.sequence.gaps,
                resyncs=source.replays,
                graph=stats.engines.get(source.engine),
                left_out=source.counters["kv_left_out"],
                last_left_out=source.last_left_out,
            )

    def _counters(self, stats: GraphStats) -> dict[str, Mapping[str, int]]:
        ingest = self._parts.subscriber.counters + self._parts.intake.counters
        for source in self._parts.sources:
            ingest.update(source.counters)
        return {
            "ingest": ingest,
            "graph": stats.counters,
            "planner": dict(self._planner.counters),
            "advice": dict(self._parts.publisher.counters),
            "snapshot": dict(self._parts.snapshots.counters),
            "config": dict(self._parts.watch.counters),
            "tracing": dict(self._parts.tracing.counters),
            "http": {"questions_refused": self._questions.refused},
        }


def page_router(page: Page, guard: Callable[..., None], edits: Callable[..., None]) -> APIRouter:
    """Return all of ``/v1``; the dependencies refuse clients without a right to read or edit."""
    paths = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
    for view in (now, misses, evictions, ranking, graph, sessions, engines, shadows, sampled):
        view.add_routes(paths, page)
    for editable in (caches, what_if, intents):
        editable.add_routes(paths, page, edits)
    events.add_routes(paths, page)
    return paths


def explaining_router(page: Page) -> APIRouter:
    """Return the routes outside ``/v1``; an unknown block, session or memory raises GraphError."""
    paths = APIRouter()

    def told(read: Callable[[], Any]) -> Response:
        with page.questions.turn():
            found = read()
        return as_json(found)

    @paths.get("/blocks/{key}/explain")
    def explain_block(key: KeyParam) -> Response:
        block = parse_key(key)
        return told(lambda: page.graph.explain(block, page.latest()))

    @paths.get("/waiting")
    def waiting() -> Response:
        return told(page.graph.waiting)

    @paths.get("/sessions/{name:anything}/explain")
    def explain_session(name: NameParam, tenant: NameQuery = None) -> Response:
        return told(lambda: _session(page, name, tenant))

    @paths.get("/memories/{name:anything}/explain")
    def explain_memory(name: NameParam) -> Response:
        return told(lambda: page.graph.explain_memory(name))

    return paths


def _session(page: Page, name: str, tenant: str | None) -> dict[str, Any]:
    held = [_why_held(page, *each) for each in page.graph.held(name, tenant).items()]
    try:
        facts = page.graph.explain_session(name, tenant)
    except GraphError:
        if not held:
            raise
        # Of a new session no more is known while its first request is held.
        facts = {"session": name, "tenant": tenant, "state": "held"}
    return {**facts, "why": held} if held else facts


def _why_held(page: Page, engine: str, seconds: float) -> str:
    room = page.admissions().get(engine)
    why = fit_and_live(room.fitting_sessions, room.live_sessions) if room else "for room"
    return f"held {seconds:.0f} s: {why}"
