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

import msgspec

from .chat_session import ChatSession
from .memory_settings import StoreSettings

_SUFFIX: Final = ".chat"
_VERSION: Final = 1  # of a file's form

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
        self._locks: dict[str, asyncio.Lock] = {}
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
        chat = self._chats.pop(key, None) or self._read(key) or ChatSession(key, name, caller)
        self._chats[key] = chat
        return chat

    def chats(self) -> list[ChatSession]:
        """All that are in memory, the one used last at the end."""
        return list(self._chats.values())

    def of_caller(self, caller: str, name: str) -> list[ChatSession]:
        """Chats that a caller may read under a name; one for each model and salt."""
        return [c for c in self.chats() if (c.caller, c.name) == (caller, name)]

    async def keep(self, chat: ChatSession) -> None:
        """Note that a chat changed; forgets what is beyond the budgets."""
        data = msgspec.msgpack.encode(_File(_VERSION, chat))
        self._sizes[chat.key] = len(data)
        self._within_memory(chat.key)
        if self._settings.directory is not None:
            try:
                await asyncio.to_thread(self._write, chat.key, data)
            except OSError as error:
                _log.warning("a chat was not written: %s", error.strerror)

    def forget(self, key: str) -> None:
        """Forget a chat, its file too."""
        self._drop(key)
        with contextlib.suppress(OSError):
            if (path := self._path(key)) is not None:
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
        if key in self._locks and not self._locks[key].locked():
            del self._locks[key]

    def _path(self, key: str) -> Path | None:
        if self._settings.directory is None:
            return None
        name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return self._settings.directory / f"{name}{_SUFFIX}"

    def _read(self, key: str) -> ChatSession | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
            read = msgspec.msgpack.decode(data, type=_File)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            _log.warning("%s is no chat that can be read, and is begun anew", path.name)
            return None
        if read.version != _VERSION or read.chat.key != key:
            return None
        self._sizes[key] = len(data)
        return read.chat

    def _write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        assert path is not None, "only a store with a directory writes"
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
        files = sorted(path.parent.glob(f"*{_SUFFIX}"), key=lambda each: each.stat().st_mtime_ns)
        sizes = [each.stat().st_size for each in files]
        for old, size in zip(files[:-1], sizes, strict=False):
            if sum(sizes) <= self._settings.disk_bytes:
                return
            old.unlink(missing_ok=True)
            sizes.remove(size)
