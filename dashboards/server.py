"""Serves the application from a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from .gate.timeouts import TimeoutProtocol


class HttpServer:
    """Listens at once, serves after ``start``; see ``timeouts`` for its deadlines.

    Args:
        port: 0 picks a free one; see ``url``.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=128)
        named = f"[{host}]" if ":" in host else host
        self.url = f"http://{named}:{self._socket.getsockname()[1]}"
        self._server = _QuietServer(
            uvicorn.Config(
                app,
                log_level="error",
                access_log=False,
                lifespan="off",
                loop="asyncio",
                http=TimeoutProtocol,
                ws="none",
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
                server_header=False,
                date_header=False,
                log_config=None,
            )
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="kvgraph-http", daemon=True
        )

    @property
    def is_serving(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def connections(self) -> int:
        """Clients that are connected now."""
        return len(self._server.server_state.connections)

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being answered (a second at most) and stop listening."""
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._socket.close()


class _QuietServer(uvicorn.Server):
    """Sleeps until it is stopped; uvicorn's own loop looks ten times per second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()

    def stop(self) -> None:
        """End ``main_loop``; may come from any thread, and before it began."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        if not self.should_exit:
            await self._ended.wait()
