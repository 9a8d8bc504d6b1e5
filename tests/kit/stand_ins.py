"""What tests ask of a proxy before stand-ins for engines, and have these do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed

TEXT: Final = "one two three"  # what a stand-in answers


def answer_of(status: int, body: bytes = b"", *headers: str) -> bytes:
    """An engine's answer, to the byte."""
    head = "\r\n".join([f"HTTP/1.1 {status} x", *headers, f"content-length: {len(body)}"])
    return head.encode() + b"\r\n\r\n" + body


def answering(answer: bytes, path: str = "/v1/completions") -> StandInEngine:
    """An engine that answers so at a path."""
    engine = StandInEngine()
    engine.raw[path] = answer
    return engine


@contextlib.asynccontextmanager
async def all_up(*engines: StandInEngine, **more: Any) -> AsyncIterator[Routed]:
    """A proxy before these engines, all of which take requests."""
    async with routed([*engines], **more) as fleet:
        await fleet.until(*[True] * len(engines))
        yield fleet


def hang(*engines: StandInEngine) -> asyncio.Event:
    """Let them begin no answer until the event is set."""
    event = asyncio.Event()
    for engine in engines:
        engine.hangs = event
    return event


def hold(*engines: StandInEngine) -> asyncio.Event:
    """Let them end no answer until the event is set."""
    event = asyncio.Event()
    for engine in engines:
        engine.hold = event
    return event


def served(fleet: Routed) -> list[int]:
    """How many requests each engine got."""
    return [len(engine.got) for engine in fleet.engines]


async def status_of(fleet: Routed) -> list[dict[str, Any]]:
    """What the proxy says of its engines."""
    engines: list[dict[str, Any]] = (await fleet.client.get("/fleet")).json()["engines"]
    return engines


async def codes(fleet: Routed, number: int, session: str = "s{}") -> list[int]:
    """The statuses of so many completions, each of a session of its own."""
    asked = [await fleet.complete(session_id=session.format(n)) for n in range(number)]
    return [answer.status_code for answer in asked]
