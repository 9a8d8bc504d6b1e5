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
    """All of ``/v1``.

    Args:
        guard: A dependency that refuses whoever may not read names.
        edits: One that refuses whoever may not change anything.
    """
    all_of_v1 = APIRouter(prefix="/v1", dependencies=[Depends(guard)])
    for router in (
        now.router(page),
        misses.router(page),
        evictions.router(page),
        ranking.router(page),
        graph.router(page),
        sessions.router(page),
        engines.router(page),
        shadows.router(page),
        sampled.router(page),
        caches.router(page, edits),
        what_if.router(page, edits),
        intents.router(page, edits),
        events.router(page),
    ):
        all_of_v1.include_router(router)
    return all_of_v1
