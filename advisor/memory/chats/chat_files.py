"""``ChatFiles``: chats in a directory, within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from .chat_session import ChatSession

_SUFFIX: Final = ".chat"
_UNFINISHED: Final = ".new"  # of a file that is being written
_VERSION: Final = 2  # of a file's form

_log = logging.getLogger(__name__)


class _Kept(msgspec.Struct):
    version: int
    chat: ChatSession


class _File(NamedTuple):
    owner: str
    size: int


class ChatFiles:
    """Writes each chat to a file of its own; the chats that were used longest ago go first.

    Which files there are is read once, at the start: nobody else writes to the directory.

    Args:
        directory: Is made if there is none.
        most: Bytes of all files.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self._directory, self._most = directory, most
        self._files: OrderedDict[str, _File] = OrderedDict()  # by digests of chats' keys
        self._bytes = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in directory.glob(f"*{_UNFINISHED}"):
            path.unlink(missing_ok=True)
        found: list[tuple[int, str, int]] = []
        for path in directory.glob(f"*-*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                about = path.stat()
                found.append((about.st_mtime_ns, path.stem, about.st_size))
        for _, stem, size in sorted(found):
            owner, _, digest = stem.partition("-")
            self._note(digest, _File(owner, size))

    def read(self, key: str) -> ChatSession | None:
        """The chat that goes by a key; None if there is none that can be read."""
        digest = _digest(key)
        file = self._files.get(digest)
        chat = self._read(digest, file) if file is not None else None
        return chat if chat is not None and chat.key == key else None

    def of_owner(self, name: str, caller: str) -> list[ChatSession]:
        """Chats of a caller under a name."""
        owner = _owner(name, caller)
        found = [self._read(digest, file) for digest, file in list(self._files.items())
                 if file.owner == owner]  # fmt: skip
        return [chat for chat in found if chat is not None]

    async def write(self, chat: ChatSession) -> int:
        """Keep a chat, of which a failure is logged; how many bytes it takes."""
        digest, owner = _digest(chat.key), _owner(chat.name, chat.caller)
        data = msgspec.msgpack.encode(_Kept(_VERSION, chat))
        try:
            await asyncio.to_thread(_replace, self._path(digest, owner), data)
        except OSError as error:
            _log.warning("a chat was not written: %s", error.strerror)
            return len(data)
        self._note(digest, _File(owner, len(data)))
        while self._bytes > self._most and len(self._files) > 1:
            self._remove(next(iter(self._files)))
        return len(data)

    def forget(self, key: str) -> None:
        """Remove a chat's file, if it has one."""
        self._remove(_digest(key))

    def _note(self, digest: str, file: _File) -> None:
        """Take a chat's file over as the one written last; an earlier one of it goes."""
        before = self._files.get(digest)
        if before is not None and before.owner != file.owner:
            self._remove(digest)
        elif before is not None:
            self._bytes -= self._files.pop(digest).size
        self._files[digest] = file
        self._bytes += file.size

    def _remove(self, digest: str) -> None:
        file = self._files.pop(digest, None)
        if file is not None:
            self._bytes -= file.size
            with contextlib.suppress(OSError):
                self._path(digest, file.owner).unlink()

    def _path(self, digest: str, owner: str) -> Path:
        return self._directory / f"{owner}-{digest}{_SUFFIX}"

    def _read(self, digest: str, file: _File) -> ChatSession | None:
        path = self._path(digest, file.owner)
        try:
            kept = msgspec.msgpack.decode(path.read_bytes(), type=_Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            _log.warning("%s is no chat that can be read, and is begun anew", path.name)
            return None
        return kept.chat if kept.version == _VERSION else None


def _replace(path: Path, data: bytes) -> None:
    """Write a file as a whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_UNFINISHED, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _owner(name: str, caller: str) -> str:
    """By which a caller's files are found that go by one name."""
    return hashlib.blake2b(f"{caller}\0{name}".encode(), digest_size=8).hexdigest()
