"""``ChatStore``: the chats that are remembered, within memory and, if there is one, a directory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import msgspec

from .chat_session import ChatSession
from .memory_settings import StoreSettings

_SUFFIX: Final = ".chat"
_VERSION: Final = 2  # of a file's form

_log = logging.getLogger(__name__)


class _File(msgspec.Struct):
    version: int
    chat: ChatSession


class ChatStore:
    """Remembers chats, the ones that were used last; each has a lock for its changes.

    Args:
        settings: Budgets, and where chats survive.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._chats: OrderedDict[str, ChatSession] = OrderedDict()
        self._sizes: dict[str, int] = {}
        # A turn that is under way goes on with its chat, also where that left memory meanwhile.
        self._in_use: WeakValueDictionary[str, ChatSession] = WeakValueDictionary()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.forgotten = 0
        if settings.directory is not None:
            settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._chats)

    def lock(self, key: str) -> asyncio.Lock:
        """Whoever changes a chat holds it."""
        return self._locks.setdefault(key, asyncio.Lock())

    def get(self, key: str, name: str, caller: str) -> ChatSession:
        """The chat that goes by ``key``: remembered, read from its file, or new."""
        chat = self._chats.pop(key, None) or self._in_use.get(key)
        if chat is None and (path := self._path(key, name, caller)) is not None:
            chat = self._read(path)
        if chat is None or chat.key != key:
            chat = ChatSession(key, name, caller)
        self._chats[key] = self._in_use[key] = chat
        self._sizes.setdefault(key, len(msgspec.msgpack.encode(chat)))
        return chat

    def chats(self) -> list[ChatSession]:
        """All that are in memory, the one used last at the end."""
        return list(self._chats.values())

    def of_caller(self, caller: str, name: str) -> list[ChatSession]:
        """Chats that a caller may read under a name; one for each model and salt."""
        found = {c.key: c for c in self._in_use.values() if (c.caller, c.name) == (caller, name)}
        for path in self._files(f"{_owner(name, caller)}-*"):
            chat = self._read(path)
            if chat is not None and (chat.caller, chat.name) == (caller, name):
                found.setdefault(chat.key, chat)
        return list(found.values())

    async def keep(self, chat: ChatSession) -> None:
        """Note that a chat changed, unless it was forgotten; forgets what is beyond the budgets."""
        if self._in_use.get(chat.key) is not chat:
            return
        self._chats[chat.key] = chat
        data = msgspec.msgpack.encode(_File(_VERSION, chat))
        self._sizes[chat.key] = len(data)
        self._within_memory(chat.key)
        path = self._path(chat.key, chat.name, chat.caller)
        if path is None:
            return
        try:
            await asyncio.to_thread(self._write, path, data)
        except OSError as error:
            _log.warning("a chat was not written: %s", error.strerror)
        if self._in_use.get(chat.key) is not chat:  # forgotten while it was written
            path.unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Forget a chat, its file too."""
        self._in_use.pop(key, None)
        self._drop(key)
        for path in self._files(f"*-{_digest(key)}"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _within_memory(self, kept: str) -> None:
        """Give up the chats used longest ago, whole; those with files are read again from there."""
        for key in list(self._chats):
            if sum(self._sizes.values()) <= self._settings.ram_bytes:
                return
            if key != kept and not self.lock(key).locked():
                self._drop(key)
                self.forgotten += self._settings.directory is None
        chat = self._chats[kept]
        for block in chat.away if self._sizes[kept] > self._settings.ram_bytes else ():
            self._sizes[kept] -= len(msgspec.msgpack.encode(block.messages))
            block.messages = []  # its digests stay: its client may repeat it
            if self._sizes[kept] <= self._settings.ram_bytes:
                return

    def _drop(self, key: str) -> None:
        self._chats.pop(key, None)
        self._sizes.pop(key, None)

    def _files(self, named: str) -> list[Path]:
        directory = self._settings.directory
        return list(directory.glob(f"{named}{_SUFFIX}")) if directory is not None else []

    def _path(self, key: str, name: str, caller: str) -> Path | None:
        directory = self._settings.directory
        if directory is None:
            return None
        return directory / f"{_owner(name, caller)}-{_digest(key)}{_SUFFIX}"

    def _read(self, path: Path) -> ChatSession | None:
        try:
            data = path.read_bytes()
            read = msgspec.msgpack.decode(data, type=_File)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            _log.warning("%s is no chat that can be read, and is begun anew", path.name)
            return None
        if read.version != _VERSION:
            return None
        return read.chat

    def _write(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
        files = sorted(self._files("*"), key=lambda each: each.stat().st_mtime_ns)
        sizes = [each.stat().st_size for each in files]
        for old, size in zip(files[:-1], sizes, strict=False):
            if sum(sizes) <= self._settings.disk_bytes:
                return
            old.unlink(missing_ok=True)
            sizes.remove(size)


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _owner(name: str, caller: str) -> str:
    """By which a caller's files are found that go by one name."""
    return hashlib.blake2b(f"{caller}\0{name}".encode(), digest_size=8).hexdigest()
