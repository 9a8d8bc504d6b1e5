"""Engines as the page shows them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from ...dashboards.answers.engine_views import Engines, EngineView
from ...dashboards.source import EngineStatus, SidecarStatus
from ...graph.logs.history import History
from ...graph.messages.events import Pressure
from ...graph.ranking.formulas import LruPolicy
from ..reasons.guard_words import beside_lru_lately, ranker
from .logged.rooms import admission_view
from .needs_attention import history_lost


def engines_view(status: SidecarStatus | None, history: History, at: float) -> Engines:
    """All engines; none without a sidecar around the graph."""
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
    status = _plain(engine)
    return EngineView(
        id=engine.id,
        name=engine.name,
        model=engine.model,
        version=engine.version,
        kind=engine.kind,
        state=engine.state,
        summary=_summary(engine),
        ranked_by=engine.ranked_by,
        guard=_guard(engine),
        ranking_age_s=engine.ranking_age_s,
        gaps=engine.gaps,
        resyncs=engine.resyncs,
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
    return said if pressure is None else f"{said} {_load(pressure)}"


def _load(pressure: Pressure) -> str:
    running, waiting = pressure.running, pressure.waiting
    run = "1 request runs" if running == 1 else f"{running:,} requests run"
    return f"{run}, {waiting:,} {'waits' if waiting == 1 else 'wait'}."


def _guard(engine: EngineStatus) -> str:
    """How the policy does beside LRU there; where nothing is compared, why not."""
    if engine.kind != "hook":
        return "takes no advice"
    if engine.ruling is not None:
        return beside_lru_lately(engine.ruling.ahead)
    return "guard is off" if engine.ranked_by != LruPolicy.name else "nothing to compare yet"


def _plain(value: Any) -> Any:
    """The same, as JSON holds it."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(each) for name, each in msgspec.structs.asdict(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {name: _plain(each) for name, each in named}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
