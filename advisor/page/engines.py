"""``/v1/engines``: health, gaps, drops, versions, occupancy, traffic of tiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import orjson
from fastapi import APIRouter
from fastapi.responses import Response

from ...dashboards.answer import Answer, Part, as_json
from ...dashboards.source import EngineStatus
from ...graph.logs.history import History
from ...graph.logs.requests import RequestLog
from ...graph.ranking.formulas import LruPolicy
from ...graph.wire.events import HOLD_ENDS, AdmissionReport, Pressure
from ..words.waits import UNTIL, admission_facts, room_sentence
from ..words.words import beside_lru_lately, ranker
from .attention import history_lost
from .page import Page, answered


class RoomView(Part):
    """Requests that one engine holds until there is room for their context, now and recently.

    Attributes:
        waiting: Number of requests held now.
        oldest_s: How long the first of them has been held, in seconds.
        fitting: Number of sessions that fit; None before any advice.
        live: Number of live sessions; None before any advice.
        begun: Requests of the last ten minutes, as far as logged, that had been held.
        longest_s: Longest time for which one of these was held, in seconds.
        sentence: The same in words; also whether a limit was lifted because it saved nothing.
    """

    engine: str
    waiting: int
    oldest_s: float
    fitting: int | None
    live: int | None
    begun: int
    longest_s: float
    sentence: str


class HoldEnd(Part):
    """Requests that were held until there was room, by the reason of their release.

    Attributes:
        reason: One of ``room``, ``bound``, ``idle``, ``open``, ``silence``, ``gone``, ``patience``.
        until: The reason in words.
    """

    reason: str
    until: str
    requests: int


class AdmissionView(Part):
    """The requests that an engine holds until there is room, and has held since its start.

    Attributes:
        facts: Names of facts and their texts, in the order in which to show them.
        ends: Only reasons that occurred.
    """

    facts: dict[str, str]
    ends: list[HoldEnd]


class EngineView(Part):
    """One engine; ``status`` is its entry in ``/status``, with the keys described there.

    Attributes:
        state: ``synced``, ``resyncing``, ``waiting``, ``replaying``, ``partial``, ``degraded``.
        summary: One sentence: what the engine is doing, and any problem.
        ranked_by: The policy's name, or ``lru`` if the engine keeps its own order.
        guard: How the policy compares with LRU, in a few words; or that nothing compares them.
        dropped: Events that never reached the sidecar; None if the engine never reported it.
        hit_share: Share of prompt tokens found, since the sidecar's start; None before any.
        prefetch_useful: Share of prefetched blocks that a request then found; None before any.
        admission: The requests that it holds until there is room; None if it never held any.
    """

    id: str
    name: str
    model: str
    version: str
    kind: str
    state: str
    summary: str
    ranked_by: str
    guard: str
    ranking_age_s: float | None
    gaps: int
    resyncs: int
    dropped: int | None
    hit_share: float | None
    prefetch_useful: float | None
    admission: AdmissionView | None
    status: dict[str, Any]


class Engines(Answer):
    """All engines, and the sidecar that follows them; ``counters`` are those of ``/status``."""

    version: str
    uptime_s: float
    endpoint: str
    engines: list[EngineView]
    counters: dict[str, dict[str, int]]


def add_routes(paths: APIRouter, page: Page) -> None:
    @paths.get("/engines", response_model=Engines)
    def engines() -> Response:
        return answered(engines_of(page))


# Requests held until there is room for their context: now, lately, and since the engine started.

_LATELY_S: Final = 600.0  # the second window of Now


def rooms(log: RequestLog, engines: Iterable[EngineStatus], now: float) -> list[RoomView]:
    """Return views of engines that hold a request, did recently, or may hold none because it saved
    nothing.
    """
    return [room for each in engines if (room := _room(log, each, now)) is not None]


def _room(log: RequestLog, engine: EngineStatus, now: float) -> RoomView | None:
    report, held = _report(engine), log.held(engine.id, now - _LATELY_S)
    waiting = report.waiting if report is not None else 0
    room = engine.room
    lifted = room is not None and room.lifted_pools > 0
    if not waiting and not len(held) and not lifted:
        return None
    oldest_s = report.oldest_s if report is not None and waiting else 0.0
    fitting = room.fitting_sessions if room is not None else None
    live = room.live_sessions if room is not None else None
    longest_s = float(held.max(initial=0.0))
    return RoomView(
        engine=engine.id,
        waiting=waiting,
        oldest_s=round(oldest_s, 3),
        fitting=fitting,
        live=live,
        begun=len(held),
        longest_s=round(longest_s, 3),
        sentence=room_sentence(
            (waiting, oldest_s), (fitting, live), (len(held), longest_s), lifted=lifted
        ),
    )


def admission_view(engine: EngineStatus, status: dict[str, Any]) -> AdmissionView | None:
    """Return what an engine holds and held since its start; None if it never held a request."""
    report = _report(engine)
    if report is None or not report.held:
        return None
    ends = zip(HOLD_ENDS, report.released, strict=False)
    facts = admission_facts(status)
    facts.pop("wait no longer", None)  # ``ends`` says that, in words
    return AdmissionView(
        facts=facts,
        ends=[HoldEnd(reason=end, until=UNTIL[end], requests=n) for end, n in ends if n],
    )


def _report(engine: EngineStatus) -> AdmissionReport | None:
    return engine.graph.admission if engine.graph is not None else None


def engines_of(page: Page) -> Engines:
    status, history, at = page.status(), page.graph.tables.history, page.unix.now()
    if status is None:
        return Engines(at=at, version="", uptime_s=0.0, endpoint="", engines=[], counters={})
    return Engines(
        at=at,
        version=status.version,
        uptime_s=status.uptime_s,
        endpoint=status.endpoint,
        engines=[_engine(each, history) for each in status.engines],
        counters={group: dict(counts) for group, counts in status.counters.items()},
    )


def _engine(engine: EngineStatus, history: History) -> EngineView:
    known, tiers = engine.graph, engine.tiers
    used = tiers.prefetch_useful + tiers.prefetch_wasted if tiers is not None else 0
    applied = known.applied if known is not None else None
    status: dict[str, Any] = orjson.loads(as_json(engine).body)  # as `/status` has it
    return EngineView(
        **{name: said for name, said in status.items() if name in EngineView.model_fields},
        summary=_summary(engine),
        guard=_guard(engine),
        dropped=None if applied is None else applied.dropped,
        hit_share=history.hit_share(engine.id),
        prefetch_useful=round(tiers.prefetch_useful / used, 4) if tiers and used else None,
        admission=admission_view(engine, status),
        status=status,
    )


def _summary(engine: EngineStatus) -> str:
    if engine.kind != "hook":
        its = f"Watched only, through its own KV events; it is {engine.state}."
        return history_lost(engine) or its
    if engine.state != "synced":
        return f"It is {engine.state}: no advice goes out until its blocks are known again."
    if engine.ranking_age_s is None:
        return "Connected. Its first ranking is being made."
    said = (
        f"Connected. {ranker(engine.ranked_by)} ranks its blocks; the last ranking is "
        f"{engine.ranking_age_s:.1f} s old."
    )
    pressure = engine.graph.pressure if engine.graph is not None else None
    return said if pressure is None else f"{said} {_requests_sentence(pressure)}"


def _requests_sentence(pressure: Pressure) -> str:
    running, waiting = pressure.running, pressure.waiting
    run = "1 request runs" if running == 1 else f"{running:,} requests run"
    return f"{run}, {waiting:,} {'waits' if waiting == 1 else 'wait'}."


def _guard(engine: EngineStatus) -> str:
    """How the policy does against LRU on this engine, or why nothing is compared."""
    if engine.kind != "hook":
        return "takes no advice"
    if engine.ruling is not None:
        return beside_lru_lately(engine.ruling.ahead)
    return "guard is off" if engine.ranked_by != LruPolicy.name else "nothing to compare yet"
