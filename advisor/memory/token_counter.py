"""``TokenCounter``: how many tokens blocks take, by the engine's own tokenizer where it has one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from ..fleet.proxy.upstream import BrokenAnswerError, NothingAnsweredError, Upstream
from ..fleet.turns.callers import Body, Call
from ..fleet.turns.prompt_chains import CHARACTERS_PER_TOKEN
from .chats.breadcrumbs import with_line
from .chats.chat_blocks import MOST_TOKENS, THOUGHTS, Block

_WRAPPING: Final = 8  # tokens of a message's borders, where nobody counts; chosen
_AT_ONCE: Final = 8  # questions; chosen
_MOST_S: Final = 5.0  # of one count; chosen: a client waits for it, and an engine may hang
_WITHOUT_S: Final = 60.0  # until one that had none, or hung, is asked again; chosen: it may change
_OK, _NO_SUCH_PATH = 200, 404


class TokenCounter:
    """Asks ``/tokenize``, as vLLM has it; without one, four characters are a token.

    Args:
        upstream: The engine.
        most_s: Seconds of one count; what is not counted by then is estimated.
    """

    def __init__(self, upstream: Upstream, most_s: float = _MOST_S) -> None:
        self._upstream, self._most_s = upstream, most_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._asks_from = 0.0

    async def count(self, model: object, blocks: Sequence[Block]) -> None:
        """Count the blocks that are not counted yet."""
        new = [block for block in blocks if not block.tokens and block.messages]
        try:
            async with asyncio.timeout(self._most_s):
                await asyncio.gather(*(self._count(model, block) for block in new))
        except TimeoutError:
            self._asks_from = time.monotonic() + _WITHOUT_S
        for block in new:
            block.tokens = block.tokens or about(block)

    async def more(self, model: object, block: Block, line: str) -> int:
        """How many tokens a line adds to a counted block, before what its last message says."""
        if not line:
            return 0
        messages = with_line(block.messages, line)
        longer = Block(block.name, block.source, messages, block.digests, block.turn, None)
        await self.count(model, [longer])
        return max(0, longer.tokens - block.tokens)

    async def _count(self, model: object, block: Block) -> None:
        async with self._slots:
            if time.monotonic() >= self._asks_from:
                asked = {"model": model, "messages": block.messages, "add_generation_prompt": False}
                block.tokens = await self._ask(orjson.dumps(asked))

    async def _ask(self, body: bytes) -> int:
        headers = [(b"content-type", b"application/json")]
        try:
            reply = await self._upstream.begin(Call("POST", "/tokenize", headers, Body(body)))
            answer = b"".join([chunk async for chunk in reply.chunks()])
            if reply.status == _NO_SUCH_PATH:
                self._asks_from = time.monotonic() + _WITHOUT_S
            read: Any = orjson.loads(answer) if reply.status == _OK else {}
        except (NothingAnsweredError, BrokenAnswerError, orjson.JSONDecodeError):
            return 0
        count = read.get("count") if isinstance(read, dict) else None
        return count if isinstance(count, int) and 0 < count < MOST_TOKENS else 0


def about(block: Block) -> int:
    """What a block takes by the rule of thumb."""
    characters = len(block.text)
    for message in block.messages:
        characters += sum(len(str(message.get(field) or "")) for field in THOUGHTS)
    return -(-characters // CHARACTERS_PER_TOKEN) + _WRAPPING * len(block.messages)
