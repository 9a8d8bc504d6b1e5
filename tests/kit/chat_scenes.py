"""Scenes of a client and the memory before a stand-in for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvgraph.advisor.memory.settings import MemorySettings
from kvgraph_bench.memory.chat_engine import Remembering, remembering

Scene = Callable[[Remembering], Awaitable[None]]


def play(scene: Scene, settings: MemorySettings, **more: Any) -> None:
    """Play a scene to its end; ``more`` as ``remembering`` takes it."""

    async def run() -> None:
        async with remembering(settings, **more) as memory:
            await scene(memory)

    asyncio.run(run())


def user(text: str) -> dict[str, Any]:
    """A message of the client's."""
    return {"role": "user", "content": text}
