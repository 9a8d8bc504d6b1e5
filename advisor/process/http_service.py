"""Serves an application that stands before engines."""

from __future__ import annotations

from typing import Final

import uvicorn
from starlette.types import ASGIApp

from ...dashboards.hosts import TrustedHosts
from ...graph.ipc.addresses import LOOPBACK_HOSTS, is_loopback

_MOST_HEADERS: Final = 64 << 10  # bytes of one request's headers; chosen
_STOP_S: Final = 30
"""For requests that run when a service is told to stop; chosen: Kubernetes gives a pod as long."""


async def serve_at(app: ASGIApp, host: str, port: int) -> None:
    """Serve until told to stop, and then finish what runs."""
    # A page of another origin must not reach engines through a browser on this machine.
    guarded = TrustedHosts(app, [*LOOPBACK_HOSTS, host]) if is_loopback(host) else app
    config = uvicorn.Config(
        guarded, host=host, port=port, http="h11", ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, h11_max_incomplete_event_size=_MOST_HEADERS,
        timeout_graceful_shutdown=_STOP_S,
    )  # fmt: skip
    await uvicorn.Server(config).serve()
