"""``ChatFiles``: chats in a directory, within a budget.

A file is a line that names its form, a digest of the rest, and the chat. What cannot be read, for
damage or because somebody else made it, is set aside under another name: its chat begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ....graph.errors import ConfigError
from ....graph.messages.refusals import BAD_PAYLOAD
from .chat_blocks import is_message
from .chat_session import ChatSession

_SUFFIX: Final = ".chat"
_UNFINISHED: Final = ".new"  # of a file that is being written
_ASIDE: Final = ".unreadable"  # behind the name of a file that is no chat
_OURS: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})\.chat")
_BEGUN: Final = re.compile(r"([0-9a-f]{16}-[0-9a-f]{32}\.|tmp)[a-z0-9_]{8}\.new")
_HEAD: Final = b"kvgraph chat 3\n"
_DIGEST: Final = 32  # bytes
_OLD_HEAD: Final = b"\x82\xa7version\x02"  # of files that have no digest yet
_VERSION: Final = 2  # of their form

_log = logging.getLogger(__name__)


class _Kept(msgspec.Struct):
    """The older form."""

    version: int
    chat: ChatSession


class _File(NamedTuple):
    owner: str
    size: int


class ChatFiles:
    """Writes each chat to a file of its own; the chats that were used longest ago go first.

    Which files there are is read once, at the start: no other process of ours writes to the
    directory. Files of others are left alone.

    Args:
        directory: Is made if there is none.
        most: Bytes of all files; those set aside do not count.

    Attributes:
        unwritten: Keys of chats whose newest state could not be written.

    Raises:
        ConfigError: ``directory`` cannot be one.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self._directory, self._most = directory, most
        self._files: OrderedDict[str, _File] = OrderedDict()  # by digests of chats' keys
        self._bytes = 0
        self.unwritten: set[str] = set()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(f"--store {directory}: {error.strerror}; allowed: a directory that "
                              "can be made or written to") from None  # fmt: skip
        except OSError as error:  # a full disk, perhaps: it may have room later
            _log.warning("%s cannot be made: %s", directory, error.strerror)
        found: list[tuple[int, str, str, int]] = []
        for name, about, head in _regular_files(directory):
            path = directory / name
            if _BEGUN.fullmatch(name):
                # A write may have ended before the head was there.
                if _is_ours(head) or _HEAD.startswith(head) or _OLD_HEAD.startswith(head):
                    with contextlib.suppress(OSError):
                        path.unlink()
            elif ours := _OURS.fullmatch(name):
                if _is_ours(head):
                    found.append((about.st_mtime_ns, ours[2], ours[1], about.st_size))
                else:
                    _set_aside(path)
        for _, digest, owner, size in sorted(found):
            self._note(digest, _File(owner, size))

    def read(self, key: str) -> ChatSession | None:
        """The chat that goes by a key; None if there is none that can be read."""
        digest = _digest(key)
        file = self._files.get(digest)
        return self._read(digest, file) if file is not None else None

    def of_owner(self, name: str, caller: str) -> list[ChatSession]:
        """Chats of a caller under a name."""
        owner = _owner(name, caller)
        found = [self._read(digest, file) for digest, file in list(self._files.items())
                 if file.owner == owner]  # fmt: skip
        return [chat for chat in found if chat is not None]

    async def write(self, chat: ChatSession) -> int:
        """Keep a chat, of which the first failure is logged; how many bytes it takes."""
        digest, owner = _digest(chat.key), _owner(chat.name, chat.caller)
        data = msgspec.msgpack.encode(chat)
        try:
            await asyncio.to_thread(_replace, self._path(digest, owner), _signed(data))
        except OSError as error:
            if not self.unwritten:
                _log.warning("chats cannot be written to %s, and are kept in memory alone: %s",
                             self._directory, error.strerror)  # fmt: skip
            self.unwritten.add(chat.key)
            return len(data)
        if chat.key in self.unwritten:
            self.unwritten.discard(chat.key)
            _log.info("chats are written again")
        self._note(digest, _File(owner, len(_HEAD) + _DIGEST + len(data)))
        while self._bytes > self._most and len(self._files) > 1:
            self._remove(next(iter(self._files)))
        return len(data)

    def forget(self, key: str) -> None:
        """Remove a chat's file, if it has one."""
        self.unwritten.discard(key)
        self._remove(_digest(key))

    def forget_aside(self, name: str, caller: str) -> int:
        """Remove what was set aside of a caller's chats under a name; how many files that were."""
        removed = 0
        for path in self._directory.glob(f"{_owner(name, caller)}-*{_SUFFIX}{_ASIDE}"):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

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
            chat = _chat_in(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, *BAD_PAYLOAD, MemoryError):
            chat = None
        if chat is not None and _digest(chat.key) == digest:
            return chat
        self._files.pop(digest, None)
        self._bytes -= file.size
        _set_aside(path)
        return None


def _regular_files(directory: Path) -> Iterator[tuple[str, os.stat_result, bytes]]:
    """Names of files that may be ours, what is known of them, and how they begin."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not (_OURS.fullmatch(entry.name) or _BEGUN.fullmatch(entry.name)):
                continue
            with contextlib.suppress(OSError):
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    with open(entry.path, "rb") as file:
                        head = file.read(len(_HEAD))
                    yield entry.name, about, head


def _is_ours(head: bytes) -> bool:
    return head == _HEAD or head.startswith(_OLD_HEAD)


def _chat_in(data: bytes) -> ChatSession | None:
    """The chat of a file's content; None where it is damaged, or of another form.

    Raises:
        BAD_PAYLOAD: Likewise.
    """
    if data.startswith(_HEAD):
        digest, data = data[len(_HEAD) :][:_DIGEST], data[len(_HEAD) + _DIGEST :]
        if _sum(data) != digest:
            return None
        chat = msgspec.msgpack.decode(data, type=ChatSession)
    else:
        kept = msgspec.msgpack.decode(data, type=_Kept)
        chat = kept.chat
        if kept.version != _VERSION:
            return None
    # The older form has no digest: what is in a message may be anything.
    fits = all(
        len(block.messages) in (0, len(block.digests)) and all(map(is_message, block.messages))
        for each in chat.versions
        for block in each.blocks
    )
    if chat.other is not None:
        chat.other.other = None
    return chat if fits else None


def _signed(data: bytes) -> bytes:
    return _HEAD + _sum(data) + data


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _set_aside(path: Path) -> None:
    """Give a file that is no chat another name, and say so."""
    aside = path.with_name(path.name + _ASIDE)
    with contextlib.suppress(OSError):
        os.replace(path, aside)
    _log.warning("%s is no chat that can be read: it is %s now, and its chat begins anew",
                 path.name, aside.name)  # fmt: skip


def _replace(path: Path, data: bytes) -> None:
    """Write a file as a whole."""
    with contextlib.suppress(FileExistsError):  # a start may have found no room for it
        path.parent.mkdir(mode=0o700, parents=True)
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f"{path.stem}.", suffix=_UNFINISHED, delete=False
    ) as file:
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
