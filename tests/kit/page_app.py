"""The sidecar's application and its status, of whatever stands in for a sidecar."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from fastapi import FastAPI
from kvgraph.advisor.page.status import explaining_router, page_router
from kvgraph.dashboards import app
from kvgraph.dashboards.source import EngineStatus, SidecarStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph


def create_app(source: Any, allowed_hosts: Collection[str], token: str) -> FastAPI:
    """What the sidecar serves, where ``source.page`` answers the page's questions."""
    page = getattr(source, "page", None)
    questions, pages = explaining_router(page), partial(page_router, page)
    return app.create_app(source, allowed_hosts, token, questions, pages)


def engine_status(graph: KVCacheGraph, engine: str = "e", /, **facts: Any) -> EngineStatus:
    """An engine that follows advice, of which the graph has heard."""
    usual = {
        "name": engine, "model": "m", "version": "v", "kind": "hook", "state": "synced",
        "silent_s": 0.1, "gaps": 0, "resyncs": 0, "ranking_epoch": 4, "ranking_age_s": 0.3,
        "ranked": 3, "graph": graph.stats().engines[engine],
    }  # fmt: skip
    return EngineStatus(engine, **{**usual, **facts})


def sidecar_status(graph: KVCacheGraph, *engines: EngineStatus, **facts: Any) -> SidecarStatus:
    counters, where = {"graph": graph.stats().counters}, ("ipc:///x", "http://127.0.0.1:1")
    usual = {"counters": counters, "snapshot": {}, "config": {}}
    return SidecarStatus("0", 1, 1.0, *where, engines, graph.stats(), **{**usual, **facts})
