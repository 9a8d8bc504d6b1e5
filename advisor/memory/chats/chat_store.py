"""``ChatStore``: the chats that are remembered, within memory and, if there is one, a directory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from .chat_blocks import Block
from .chat_files import ChatFiles
from .chat_session import ChatSession
from .memory_settings import StoreSettings

_OF_MESSAGE: Final = 600
"""Bytes of memory that a message takes beside its text; chosen: what short messages were measured
to take, as Python has them."""


class ChatStore:
    """Remembers chats, the ones that were used last; each has a lock for its changes.

    Args:
        settings: Budgets, and where chats survive.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._most = settings.ram_bytes
        self._chats: OrderedDict[str, ChatSession] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        # A turn that is under way goes on with its chat, also where that left memory meanwhile.
        self._in_use: WeakValueDictionary[str, ChatSession] = WeakValueDictionary()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._files: ChatFiles | None = None
        if settings.directory is not None:
            self._files = ChatFiles(settings.directory, settings.disk_bytes)
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._chats)

    @property
    def unwritten(self) -> int:
        """Chats whose newest state should be in the directory, and could not be written."""
        return len(self._files.unwritten) if self._files is not None else 0

    def lock(self, key: str) -> asyncio.Lock:
        """Whoever changes a chat holds it."""
        return self._locks.setdefault(key, asyncio.Lock())

    def get(self, new: ChatSession) -> ChatSession:
        """The chat that goes by the key of ``new``: remembered, read from its file, or ``new``."""
        key = new.key
        chat = self._chats.pop(key, None) or self._in_use.get(key)
        if chat is None:
            chat = self._files.read(key) if self._files is not None else None
        chat = new if chat is None else chat
        # An earlier version may have kept it under less than what says whose it is.
        for each in chat.versions:
            each.name, each.caller, each.salt, each.named = (
                new.name,
                new.caller,
                new.salt,
                new.named,
            )
        self._load(chat)
        self.put(chat)
        if key not in self._sizes:
            self._measure(chat, _encoded(chat))
        return chat

    def put(self, chat: ChatSession) -> None:
        """Let a version be the chat of its key."""
        self._chats[chat.key] = self._in_use[chat.key] = chat

    def chats(self) -> list[ChatSession]:
        """All that are in memory, the one used last at the end."""
        return list(self._chats.values())

    def of_caller(self, caller: str, salt: str, name: str) -> list[ChatSession]:
        """Chats that a caller may read under a name; one for each model."""
        kept = self._files.of_owner(name, caller) if self._files is not None else []
        found = {chat.key: chat for chat in (*kept, *self._in_use.values())}  # the latter are newer
        asked = (caller, salt, name)
        return [chat for chat in found.values() if (chat.caller, chat.salt, chat.name) == asked]

    def holds(self, chat: ChatSession) -> bool:
        """Whether a chat, or a version of it, was not forgotten, nor begun anew since."""
        whole = self._in_use.get(chat.key)
        return whole is not None and any(each is chat for each in whole.versions)

    async def keep(self, version: ChatSession) -> None:
        """Note that a version of a chat changed, unless it was forgotten; forgets what is beyond
        the budgets."""
        if not self.holds(version):
            return
        chat = self._in_use[version.key]
        self._load(chat)
        self._chats[chat.key] = chat
        if self._files is not None and chat.named:
            size = await self._files.write(chat)
            if not self.holds(chat):  # forgotten while it was written
                return self._files.forget(chat.key)
        else:
            size = _encoded(chat)
        self._measure(chat, size)
        self._within_memory(chat, version)

    def forget_new(self, version: ChatSession) -> None:
        """Forget a version of which nothing was said, and the chat if that is all of it."""
        if not self.holds(version):
            return
        chat = self._in_use[version.key]
        if chat is version:
            self.forget(chat.key)
        else:
            chat.other = None

    def forget_aside(self, caller: str, name: str) -> bool:
        """Remove what could not be read of a caller's chats under a name; whether there was any."""
        return self._files is not None and self._files.forget_aside(name, caller) > 0

    def forget(self, key: str) -> None:
        """Forget a chat, its file too."""
        self._in_use.pop(key, None)
        self._drop(key)
        if self._files is not None:
            self._files.forget(key)

    def _load(self, chat: ChatSession) -> None:
        """Read the text that was given up, for want of room, from the chat's file."""
        without = [block for block in _blocks(chat) if not block.messages]
        kept = self._files.read(chat.key) if without and self._files is not None else None
        if kept is not None:
            texts = {tuple(block.digests): block.messages for block in _blocks(kept)
                     if block.messages}  # fmt: skip
            for block in without:
                block.messages = texts.get(tuple(block.digests), [])

    def _within_memory(self, used: ChatSession, version: ChatSession) -> None:
        """Give up the chats used longest ago, whole; those with files are read again from there,
        and go first."""
        unwritten = self._files.unwritten if self._files is not None else set[str]()
        for key, chat in sorted(self._chats.items(), key=lambda each: each[0] in unwritten):
            if self._bytes <= self._most:
                return
            if chat is not used and not self.lock(key).locked():
                self._drop(key)
                self.forgotten += self._files is None or not chat.named or key in unwritten
                unwritten.discard(key)
        if self._sizes[used.key] > self._most and version is used and used.other is not None:
            used.other = None
            self._measure(used, _encoded(used))
        beyond = self._sizes[used.key] - self._most
        away = [block for each in used.versions for block in each.away]
        for block in away if beyond > 0 else ():
            size = _encoded(block.messages) + _beside([block])
            block.messages = []  # its digests stay: its client may repeat it
            self._sizes[used.key] -= size
            self._bytes -= size
            beyond -= size
            if beyond <= 0:
                return

    def _measure(self, chat: ChatSession, encoded: int) -> None:
        size = encoded + _beside(_blocks(chat))
        self._bytes += size - self._sizes.get(chat.key, 0)
        self._sizes[chat.key] = size

    def _drop(self, key: str) -> None:
        self._chats.pop(key, None)
        self._bytes -= self._sizes.pop(key, 0)


def _blocks(chat: ChatSession) -> list[Block]:
    """Blocks of all versions of a chat."""
    return [block for each in chat.versions for block in each.blocks]


def _encoded(what: object) -> int:
    return len(msgspec.msgpack.encode(what))


def _beside(blocks: Iterable[Block]) -> int:
    """What the messages of blocks take beside their text."""
    return _OF_MESSAGE * sum(len(block.messages) for block in blocks)
