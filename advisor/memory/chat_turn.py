"""``ChatTurn``: a chat's request under way, and the prompt that an engine gets for it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import orjson

from ..fleet.turns.callers import Headers, keys_of
from .chats.chat_blocks import Block, Message
from .chats.chat_session import ChatSession


class ChatTurn(NamedTuple):
    """A chat's request under way.

    Attributes:
        before: The chat as it was, to go back to where the engine does not answer.
        number: Of the chat's requests.
        model: As the client calls it.
        sent: What the engine gets.
        meant: What the client means: its own messages, or all of the chat if it appends.
        counted: Tokens of the blocks in the prompt; None: the engine got what was meant.
        back: Names of blocks that came back.
    """

    chat: ChatSession
    before: bytes
    number: int
    model: object
    sent: Sequence[Message] = ()
    meant: Sequence[Message] = ()
    counted: int | None = None
    back: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether no other request of the chat came since."""
        return self.chat.requests == self.number

    def undo(self) -> bool:
        """Let the chat be as it was, unless it went on since; whether it is as if never begun."""
        if not self.is_last:
            return False
        was = msgspec.msgpack.decode(self.before, type=ChatSession)
        for field in was.__struct_fields__:
            setattr(self.chat, field, getattr(was, field))
        return not was.blocks

    def said(self) -> bytes:
        """What a client reads of its chat's memory, as it was when the answer began."""
        chat = self.chat
        said = {"resident": len(chat.resident), "away": len(chat.away), "tokens": chat.tokens,
                "recalled": self.back}  # fmt: skip
        return json.dumps(said).encode()


def prompt_of(blocks: Iterable[Block], crumb: str = "") -> tuple[list[Message], list[object]]:
    """The messages of blocks, and what is said of them.

    Args:
        crumb: A line before the last message; empty: none.
    """
    messages, tags = list[Message](), list[object]()
    for block in blocks:
        for message in block.messages:
            if block.tags:
                tags.append({"index": len(messages), **block.tags})
            messages.append(message)
    if crumb and isinstance(said := messages[-1].get("content"), str):
        messages[-1] = messages[-1] | {"content": f"{crumb}\n\n{said}"}
    return messages, tags


def caller_of(headers: Headers) -> str:
    """Digest of the keys that a request came with."""
    return hashlib.blake2b(b"\0".join(keys_of(headers)), digest_size=8).hexdigest()


def salt_of(salt: object) -> str:
    """Digest of a cache's salt; empty if there is none."""
    return hashlib.blake2b(orjson.dumps(salt), digest_size=8).hexdigest() if salt else ""
