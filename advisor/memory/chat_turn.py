"""``ChatTurn``: a chat's request under way, and the prompt that an engine gets for it."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec
import orjson

from ..fleet.turns.callers import Headers, keys_of
from .chats.breadcrumbs import with_line
from .chats.chat_blocks import Block, Message
from .chats.chat_session import ChatSession


class OneByOne:
    """Has requests that continue one chat wait for the one before them: nobody else has answers."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def next(self, key: str) -> Callable[[], None]:
        """Wait for those that came before; returns what lets the next one go on. The end of the
        caller's task does so, too."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        await lock.acquire()
        held = [lock]

        def over(*_: object) -> None:
            while held:
                held.pop().release()

        task = asyncio.current_task()
        assert task is not None, "it is awaited"
        task.add_done_callback(over)
        return over


class ChatTurn(NamedTuple):
    """A chat's request under way.

    Attributes:
        chat: Or the version of it that the request belongs to.
        before: It as it was, without another version: to go back to where there is no answer.
        number: Of the chat's requests.
        model: As the client calls it.
        over: To be called when its answer is remembered, or there will be none.
        counted: Tokens of the blocks in the prompt; None: the engine got what was meant.
        back: Names of blocks that came back.
    """

    chat: ChatSession
    before: bytes
    number: int
    model: object
    over: Callable[[], None]
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
            if field != "other":
                setattr(self.chat, field, getattr(was, field))
        return not was.blocks

    def said(self) -> bytes:
        """What a client reads of its chat's memory, as it was when the answer began."""
        chat = self.chat
        said = {"resident": len(chat.resident), "away": len(chat.away), "tokens": chat.tokens,
                "recalled": self.back}  # fmt: skip
        return json.dumps(said).encode()


def prompt_of(
    blocks: Iterable[Block], line: str = "", names: bool = False
) -> tuple[list[Message], list[object]]:
    """The messages of blocks, and what is said of them: what their client says first, since engines
    take no more than so many hints.

    Args:
        line: Stands before what the last message says; empty: none does.
        names: Whether blocks that may leave one day are named, too.
    """
    messages, said, named = list[Message](), list[object](), list[object]()
    for block in blocks:
        # The system's never leave; a name would protect them in the engine, whoever else has them.
        name = {"identity": block.identity} if names and block.source != "system" else {}
        for message in block.messages:
            if block.tags:
                said.append({"index": len(messages), **block.tags, **name})
            elif name:
                named.append({"index": len(messages), **name})
            messages.append(message)
    return with_line(messages, line), said + named


def caller_of(headers: Headers) -> str:
    """Digest of the keys that a request came with."""
    return hashlib.blake2b(b"\0".join(keys_of(headers)), digest_size=8).hexdigest()


def caller_salt(headers: Headers, salt: object, key: bytes | None) -> str:
    """A cache's salt that no other API key gets, whatever salt it names.

    What comes back for a caller was computed behind whatever somebody said before it, which an
    answer then depends on.

    Args:
        salt: The client's own.
        key: Of the hash; None: callers are not told apart.

    Returns:
        32 hexadecimal digits; empty: the request has no API key, or ``key`` is None.
    """
    keys = keys_of(headers)
    if key is None or not keys:
        return ""
    said = b"\0".join([*keys, orjson.dumps(salt)])
    return hashlib.blake2b(said, digest_size=16, key=key[:64]).hexdigest()


def salt_of(salt: object) -> str:
    """Digest of a cache's salt; empty if there is none."""
    return hashlib.blake2b(orjson.dumps(salt), digest_size=8).hexdigest() if salt else ""
