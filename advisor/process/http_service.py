"""Serves an application that stands before engines."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...dashboards.gate.hosts import TrustedHosts
from ...graph.ipc.addresses import LOOPBACK_HOSTS, is_loopback

_MOST_HEADERS: Final = 64 << 10  # bytes of one request's headers; chosen
_STOP_S: Final = 30
"""For requests that run when a service is told to stop; chosen: Kubernetes gives a pod as long."""


class HeadDeadline(H11Protocol):
    """Cuts a connection whose next request does not begin in time.

    uvicorn's own HTTP/1.1 protocol waits for ever for a head of which only a part came.

    Attributes:
        head_s: Seconds for a whole head; chosen: as long as a whole body has.
    """

    head_s: float = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wait_no_more()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Note that an answer was written: the next request may come."""
        super().on_response_complete()
        self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._wait_no_more()
        self._timer = self.loop.call_later(self.head_s, self._cut_if_waiting)

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cut_if_waiting(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


async def serve_at(app: ASGIApp, host: str, port: int) -> None:
    """Serve until told to stop, and then finish what runs."""
    # A page of another origin must not reach engines through a browser on this machine.
    guarded = TrustedHosts(app, [*LOOPBACK_HOSTS, host]) if is_loopback(host) else app
    config = uvicorn.Config(
        guarded, host=host, port=port, http=HeadDeadline, ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, h11_max_incomplete_event_size=_MOST_HEADERS,
        timeout_graceful_shutdown=_STOP_S,
    )  # fmt: skip
    await uvicorn.Server(config).serve()
