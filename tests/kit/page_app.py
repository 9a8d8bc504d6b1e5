"""The sidecar's application, with the page's answers of whatever stands in for a sidecar."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from fastapi import FastAPI
from kvgraph.advisor.page import explain
from kvgraph.advisor.page.routes import page_router
from kvgraph.dashboards import app


def create_app(source: Any, allowed_hosts: Collection[str], token: str) -> FastAPI:
    """What the sidecar serves, where ``source.page`` answers the page's questions."""
    page = getattr(source, "page", None)
    questions, pages = explain.router(page), partial(page_router, page)
    return app.create_app(source, allowed_hosts, token, questions, pages)
