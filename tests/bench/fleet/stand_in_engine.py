"""Stand-ins for engines behind a proxy: HTTP servers that fail on command."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from kvgraph.advisor.fleet.app import route_app
from kvgraph.advisor.fleet.proxy import FleetProxy
from kvgraph.advisor.fleet.relay import BodyRoom
from kvgraph.advisor.fleet.residency import ResidencyView
from kvgraph.advisor.fleet.upstream import FIRST_BYTE_S, EngineAddress

from ..serving.listening import listening


class StandInEngine:
    """Answers completions with a few chunks, and is well unless told otherwise.

    Attributes:
        got: Bodies of requests, as they came.
        healthy: What it says of itself.
        looks: Questions after its health that it answered.
        silent: Whether it leaves questions after its health unanswered.
        drops: Whether it closes connections instead of answering requests.
        hangs: Whether it begins no answer until this is cleared.
        pieces: Chunks of an answer; ``hold`` is waited for before the last one.
        cut: Whether it closes the connection before the last chunk.
        metrics: What it answers at ``/metrics``.
        raw: What it answers at these paths instead, to the byte.
        left: Requests whose client went away before the end.
    """

    def __init__(self, model: str = "m") -> None:
        self.model = model
        self.got: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.healthy, self.silent, self.drops, self.cut = True, False, False, False
        self.looks = 0
        self.hold: asyncio.Event | None = None
        self.hangs: asyncio.Event | None = None
        self.pieces = ["one ", "two ", "three"]
        self.metrics = ""
        self.raw: dict[str, bytes] = {}
        self.left = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; where it listened before, if it did."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """As ``kill -9``: nothing listens, and all connections are reset."""
        assert self._server is not None
        self._server.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await self._answer(reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        path = head.split(" ")[1]
        if path in self.raw:
            self.headers.append(head)
            writer.write(self.raw[path])
            return await writer.drain()
        if path == "/health" and self.silent:
            await asyncio.Event().wait()
        if path == "/health":
            self.looks += 1
            return await _whole(writer, 200 if self.healthy else 503, "")
        if path == "/metrics":
            return await _whole(writer, 200, self.metrics)
        if path == "/v1/models":
            return await _whole(writer, 200, json.dumps({"data": [{"id": self.model}]}))
        self.headers.append(head)
        self.got.append(json.loads(body))
        await self._stream(reader, writer)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.drops:
            raise ConnectionError
        gone = asyncio.ensure_future(reader.read(1))
        try:
            if self.hangs is not None:
                await self._unless(gone, self.hangs)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
                         b"content-type: text/event-stream\r\n\r\n")  # fmt: skip
            for piece in self.pieces[:-1]:
                await _chunk(writer, piece)
            if self.hold is not None:
                await self._unless(gone, self.hold)
            if self.cut:
                raise ConnectionError
            await _chunk(writer, self.pieces[-1])
            await _chunk(writer, "")
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await gone

    async def _unless(self, gone: asyncio.Future[bytes], event: asyncio.Event) -> None:
        waiting = asyncio.ensure_future(event.wait())
        either: set[asyncio.Future[Any]] = {waiting, gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if gone.done():
            self.left += 1
            raise ConnectionError


async def _whole(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())
    await writer.drain()


class Routed:
    """Stand-ins behind a proxy that listens, and a client of it."""

    def __init__(
        self, engines: list[StandInEngine], proxy: FleetProxy, url: str, room: BodyRoom
    ) -> None:
        self.engines, self.proxy, self.url, self.room = engines, proxy, url, room
        self.client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)

    async def complete(self, prompt: str = "hello", **more: Any) -> httpx.Response:
        headers = more.pop("headers", None)
        body = {"model": "m", "prompt": prompt, **more}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def until(self, *up: bool) -> None:
        """Wait until the proxy believes this of its engines."""
        async with asyncio.timeout(15):
            while self.proxy.board.up.tolist() != list(up):
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def routed(
    engines: list[StandInEngine],
    residency: ResidencyView | None = None,
    first_byte_s: float = FIRST_BYTE_S,
) -> AsyncIterator[Routed]:
    """A proxy before engines that listen, until the end of the block."""
    for engine in engines:
        if not engine.port:
            await engine.start()
    proxy = FleetProxy(
        [EngineAddress(engine.url) for engine in engines], residency, first_byte_s=first_byte_s
    )
    app: Any = route_app(proxy)
    try:
        async with listening(app, "on") as url:
            found = Routed(engines, proxy, url, app.default.room)
            try:
                yield found
            finally:
                await found.client.aclose()
    finally:
        for engine in engines:
            engine.kill()
