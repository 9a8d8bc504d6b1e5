"""The sidecar's paths: those below ``/v1``, whose views are files here, and the ``explain``
paths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response

from ...dashboards.answer import as_json, parse_key
from ...graph.errors import GraphError
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
from .page import NameParam, NameQuery, Page


def page_router(page: Page, guard: Callable[..., None], edits: Callable[..., None]) -> APIRouter:
    """Return all of ``/v1``; the dependencies refuse clients that may not read names or make
    changes.
    """
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
