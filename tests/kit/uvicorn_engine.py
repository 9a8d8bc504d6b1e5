"""An engine behind a real uvicorn that drops requests by what their prompts say: in this
process, or in one of its own, which some prompts end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import uvicorn

HANGS_UP, HALF, DIES = "hang up", "answer half", "die"
"""Prompts: the connection is closed before the answer, or in the middle; the process ends."""
ANSWER: Final = b"one two three"


class UvicornEngine:
    """An ASGI application that looks like an engine."""

    def __init__(self, *dropped: str) -> None:
        self.asked: Counter[str] = Counter()  # how often each prompt came
        # prompts that are dropped; others are answered
        self.dropped = {HANGS_UP, HALF, DIES, *dropped}
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/models":
            return await _answered(send, b'{"data": [{"id": "m"}]}')
        if scope["path"] in ("/health", "/metrics"):
            return await _answered(send, b"")
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        prompt = json.loads(body)["prompt"] if body else ""
        self.asked[prompt] += 1
        if prompt not in self.dropped:
            return await _answered(send, ANSWER)
        if prompt == DIES:
            os._exit(1)
        if prompt == HALF:
            head = {"type": "http.response.start", "status": 200, "headers": []}
            await send(head)
            await send({"type": "http.response.body", "body": ANSWER[:4], "more_body": True})
        send.__self__.transport.abort()  # no ASGI server lets an application hang up


async def _answered(send: Any, body: bytes) -> None:
    size = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": size})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def listening_engines(*engines: UvicornEngine) -> AsyncIterator[None]:
    """Let engines listen until the end of the block; their ``url`` says where."""
    from kvgraph_bench.serving.listening import listening  # not in the processes: it takes long

    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            engine.url = await stack.enter_async_context(listening(engine, "off"))
        yield


@contextlib.asynccontextmanager
async def engine_processes(number: int) -> AsyncIterator[list[str]]:
    """Addresses of engines in processes of their own, until the end of the block."""
    from kvgraph_bench.serving.listening import free_port

    ports = [free_port() for _ in range(number)]
    words = (sys.executable, __file__)
    started = [await asyncio.create_subprocess_exec(*words, str(port)) for port in ports]
    try:
        for port in ports:
            await _listens(port)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            await each.wait()


async def _listens(port: int) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
            else:
                return writer.close()


if __name__ == "__main__":
    uvicorn.run(UvicornEngine(), port=int(sys.argv[1]), log_level="error")
