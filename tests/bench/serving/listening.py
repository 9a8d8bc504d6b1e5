"""An ASGI application that listens, until the end of a block; and ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any, Literal

import uvicorn
from kvgraph.advisor.process.process import HeadDeadline


def free_port() -> int:
    """A port of loopback at which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def listening(app: Any, lifespan: Literal["on", "off"]) -> AsyncIterator[str]:
    """Serve ``app`` on a free port of loopback; its address."""
    config = uvicorn.Config(
        app, port=0, http=HeadDeadline, ws="none", lifespan=lifespan, log_config=None,
        access_log=False, h11_max_incomplete_event_size=64 << 10, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving
