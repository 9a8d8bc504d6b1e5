"""``TokenCounter``: how many tokens blocks take, by the engine's own tokenizer where it has one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import orjson

from ..fleet.proxy.upstream import BrokenAnswerError, NothingAnsweredError, Upstream
from ..fleet.turns.callers import Body, Call
from ..fleet.turns.prompt_chains import CHARACTERS_PER_TOKEN
from .chats.chat_blocks import Block, text_of

_WRAPPING: Final = 8  # tokens of a message's borders, where nobody counts; chosen
_AT_ONCE: Final = 8  # questions; chosen
_OK: Final = 200


class TokenCounter:
    """Asks ``/tokenize``, as vLLM has it; without one, four characters are a token.

    Args:
        upstream: The engine.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def count(self, model: object, blocks: Sequence[Block]) -> None:
        """Count the blocks that are not counted yet."""
        new = [block for block in blocks if not block.tokens]
        await asyncio.gather(*(self._count(model, block) for block in new))

    async def _count(self, model: object, block: Block) -> None:
        asked = {"model": model, "messages": block.messages, "add_generation_prompt": False}
        async with self._slots:
            counted = await self._ask(orjson.dumps(asked))
        block.tokens = counted or about(block)

    async def _ask(self, body: bytes) -> int:
        headers = [(b"content-type", b"application/json")]
        try:
            reply = await self._upstream.begin(Call("POST", "/tokenize", headers, Body(body)))
            answer = b"".join([chunk async for chunk in reply.chunks()])
            read: Any = orjson.loads(answer) if reply.status == _OK else {}
        except (NothingAnsweredError, BrokenAnswerError, orjson.JSONDecodeError):
            return 0
        count = read.get("count") if isinstance(read, dict) else None
        return count if isinstance(count, int) else 0


def about(block: Block) -> int:
    """What a block takes by the rule of thumb."""
    characters = len(text_of(block.messages))
    return -(-characters // CHARACTERS_PER_TOKEN) + _WRAPPING * len(block.messages)
