"""Clients that send half a body or read nothing cost `kvgraph memory` little."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import pytest
from chat_scenes import LARGE, model, user
from kvgraph.advisor.fleet import relay
from kvgraph.advisor.process.process import HeadDeadline
from kvgraph_bench.memory.chat_engine import ChatEngine, Remembering, remembering

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"


async def begun(
    memory: Remembering, size: int, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = memory.client.base_url
    reader, writer = await asyncio.open_connection(at.host, at.port, limit=1024)
    with contextlib.suppress(ConnectionError):
        writer.write(HEAD % size + body)
        await writer.drain()
    return reader, writer


async def test_bodies_that_never_end_are_bounded_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MOST_BODIES", 4 << 20)
    monkeypatch.setattr(relay, "BODY_S", 4.0)
    async with remembering(LARGE) as memory:
        asked = [await begun(memory, 60 << 20, b"[" * (5 << 18)) for _ in range(6)]
        heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in asked]
        async with asyncio.timeout(60):
            while sum(head.done() for head in heads) < 4:  # there is room for two
                await asyncio.sleep(0.01)
            assert (await memory.chat([user("small")])).status_code == 200
            answers = await asyncio.gather(*heads)
        assert sum(b" 503 " in answer for answer in answers) == 4
        assert sum(b" 408 " in answer for answer in answers) == 2, "they did not come in time"
        for _, writer in asked:
            writer.close()
        assert memory.proxy.counts.refused == 6


async def test_who_stops_reading_is_cut_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadDeadline, "read_s", 0.5)
    engine = ChatEngine()
    long = " ".join(["x" * 100_000] * 200)
    engine.says = lambda body: model(long if body.get("stream") else "well")
    async with remembering(LARGE, engine) as memory:
        body = json.dumps({"model": "m", "messages": [user("a")], "stream": True}).encode()
        _, writer = await begun(memory, len(body), body)
        transport: Any = writer.transport
        transport.pause_reading()
        until = time.monotonic() + 60
        while not memory.proxy.counts.left and time.monotonic() < until:
            await asyncio.sleep(0.01)
        cut = memory.proxy.counts.left
        other = await memory.chat([user("b")], session="other")
        writer.close()
        assert cut == 1
        assert other.status_code == 200
