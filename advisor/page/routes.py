"""The paths below ``/v1``: each view of the page is a file here, with its models and its router."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends

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
from .page import Page


def page_router(page: Page, guard: Callable[..., None], edits: Callable[..., None]) -> APIRouter:
    """All of ``/v1``; the dependencies refuse whoever may not read names, or change anything."""
    paths = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
    for view in (now, misses, evictions, ranking, graph, sessions, engines, shadows, sampled):
        view.add_routes(paths, page)
    for editable in (caches, what_if, intents):
        editable.add_routes(paths, page, edits)
    events.add_routes(paths, page)
    return paths
