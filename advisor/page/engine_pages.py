"""Engines as the page shows them."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from ...dashboards.answers.engine_views import Engines, EngineView
from ...dashboards.source import EngineStatus, SidecarStatus
from ...graph.logs.history import History
from .now_view import ranked_by


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
    return EngineView(
        id=engine.id,
        name=engine.name,
        model=engine.model,
        version=engine.version,
        kind=engine.kind,
        state=engine.state,
        summary=_summary(engine),
        ranked_by=ranked_by(engine),
        ranking_age_s=engine.ranking_age_s,
        gaps=engine.gaps,
        resyncs=engine.resyncs,
        dropped=None if applied is None else applied.dropped,
        hit_share=history.hit_share(engine.id),
        prefetch_useful=round(tiers.prefetch_useful / used, 4) if tiers and used else None,
        status=_plain(engine),
    )


def _summary(engine: EngineStatus) -> str:
    if engine.kind != "hook":
        return f"It is watched through its own KV events and takes no advice; {engine.state}."
    if engine.state != "synced":
        return f"It is {engine.state}: no advice goes out until its blocks are known again."
    if engine.ranking_age_s is None:
        return "It is linked; its first ranking is being made."
    ruler = "the policy ranks" if ranked_by(engine) == "policy" else "LRU ranks"
    pressure = engine.graph.pressure if engine.graph is not None else None
    load = f", {pressure.running} requests run and {pressure.waiting} wait" if pressure else ""
    return f"It is linked; {ruler}, {engine.ranking_age_s:.1f} s ago at last{load}."


def _plain(value: Any) -> Any:
    """The same, as JSON holds it."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(each) for name, each in msgspec.structs.asdict(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
        return {name: _plain(each) for name, each in named}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return list(value) if isinstance(value, tuple) else value
