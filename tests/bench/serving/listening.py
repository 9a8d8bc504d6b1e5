"""An ASGI application that listens, until the end of a block; and ports."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import uvicorn
from kvgraph.advisor.process.process import HeadDeadline

# Below those that systems give to connections: one of these could take the port before its server.
_PORTS: Final = range(10_000, 32_768)
_draw: Final = random.SystemRandom()  # whatever seeds a test sets


def free_port() -> int:
    """A port of loopback at which nobody listens now, drawn, so that two hardly get the same."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := _draw.choice(_PORTS)))
            return port


@contextlib.asynccontextmanager
async def listening(app: Any, lifespan: Literal["on", "off"]) -> AsyncIterator[str]:
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
