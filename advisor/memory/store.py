"""``ChatStore``: keeps chats in memory and, optionally, in a directory, within byte budgets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from ...graph.errors import ConfigError
from ...graph.wire.frames import BAD_PAYLOAD
from ..fleet.callers import BadRequestError
from .chat import Block, ChatSession
from .settings import ChatStoreSettings

# A file has a line that names its format, a digest of the rest, and the chat. A damaged or foreign
# file is renamed, and its chat starts anew.

_SUFFIX: Final = ".chat"
_UNFINISHED: Final = ".new"  # ending of a file that is being written
_ASIDE: Final = ".unreadable"  # ending of a file that holds no chat
_OURS: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})\.chat")
_BEGUN: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.[a-z0-9_]{8}\.new")
_HEAD: Final = b"kvgraph chat 3\n"
_DIGEST: Final = 32  # bytes
_BODY: Final = len(_HEAD) + _DIGEST  # offset of the chat

_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})  # and say nothing of a file

_log = logging.getLogger(__name__)


class UnreadError(BadRequestError):
    """A chat's file cannot be read for want of open files or memory, as in a crowd."""

    def __init__(self) -> None:
        super().__init__("too many files are open to read this chat; try again soon", 503)


class _File(NamedTuple):
    owner: str
    size: int


class ChatFiles:
    """Writes each chat to its own file; the least recently used are removed first.

    The directory is scanned once, at the start, because no other process of ours writes to it.
    Other files are left alone. Raises ConfigError.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self._directory, self._most = directory, most
        self._files: OrderedDict[str, _File] = OrderedDict()  # by digests of chats' keys
        self._bytes = 0
        self.unwritten: set[str] = set()  # keys of chats whose newest state could not be written
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(
                f"--store {directory}: {error.strerror}; allowed: a directory that "
                "can be made or written to"
            ) from None
        except OSError as error:  # a full disk, perhaps: it may have room later
            _log.warning("%s cannot be made: %s", directory, error.strerror)
        _check_owner(directory)
        found: list[tuple[int, str, str, int]] = []
        for name, about, head in _regular_files(directory):
            path = directory / name
            if _BEGUN.fullmatch(name):
                # A write may have ended before the head was there.
                if _HEAD.startswith(head):
                    with contextlib.suppress(OSError):
                        path.unlink()
            elif ours := _OURS.fullmatch(name):
                if head == _HEAD:
                    found.append((about.st_mtime_ns, ours[2], ours[1], about.st_size))
                else:
                    _set_aside(path)
        for _, digest, owner, size in sorted(found):
            self._note(digest, _File(owner, size))

    def read(self, key: str) -> ChatSession | None:
        """Return the chat of a key; None if there is none that can be read. Raises UnreadError."""
        digest = _digest(key)
        file = self._files.get(digest)
        return self._read(digest, file) if file is not None else None

    def of_owner(self, name: str, caller: str) -> list[ChatSession]:
        owner = _owner(name, caller)
        found = [
            self._read(digest, file)
            for digest, file in list(self._files.items())
            if file.owner == owner
        ]
        return [chat for chat in found if chat is not None]

    async def write(self, chat: ChatSession) -> int:
        """Write a chat; return its size in bytes. The first failure is logged."""
        digest, owner = _digest(chat.key), _owner(chat.name, chat.caller)
        data = msgspec.msgpack.encode(chat)
        signed = _HEAD + _sum(data) + data
        try:
            await asyncio.to_thread(_replace, self._path(digest, owner), signed)
        except OSError as error:
            if not self.unwritten:
                _log.warning(
                    "chats cannot be written to %s, and are kept in memory alone: %s",
                    self._directory,
                    error.strerror,
                )
            self.unwritten.add(chat.key)
            return len(data)
        if chat.key in self.unwritten:
            self.unwritten.discard(chat.key)
            _log.info("chats are written again")
        self._note(digest, _File(owner, _BODY + len(data)))
        while self._bytes > self._most and len(self._files) > 1:
            self._remove(next(iter(self._files)))
        return len(data)

    def forget(self, key: str) -> None:
        self.unwritten.discard(key)
        self._remove(_digest(key))

    def forget_aside(self, name: str, caller: str) -> int:
        """Remove the unreadable files of a caller's chats of this name; return how many."""
        removed = 0
        for path in self._directory.glob(f"{_owner(name, caller)}-*{_SUFFIX}{_ASIDE}"):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        return removed

    def _note(self, digest: str, file: _File) -> None:
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
        except (OSError, *BAD_PAYLOAD, MemoryError) as error:
            if isinstance(error, OSError) and error.errno in _SCARCE:
                raise UnreadError from None
            chat = None
        if chat is not None and _digest(chat.key) == digest:
            return chat
        self._files.pop(digest, None)
        self._bytes -= file.size
        _set_aside(path)
        return None


def _check_owner(directory: Path) -> None:
    """Refuse a directory in which another user may put chats that say what users never said."""
    try:
        there = directory.stat()
    except OSError:
        return
    if there.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"--store {directory}: it belongs to user {there.st_uid}, who can put anything there; "
            f"allowed: root and this process's user {os.geteuid()}"
        )
    if there.st_mode & stat.S_IWOTH:
        raise ConfigError(f"--store {directory}: every user can write to it (chmod o-w)")


def _regular_files(directory: Path) -> Iterator[tuple[str, os.stat_result, bytes]]:
    """Yield names of files that may be ours, their status, and their first bytes."""
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


def _chat_in(data: bytes) -> ChatSession | None:
    """Return the chat in a file's content; None if it is damaged, or of another format."""
    head, digest, data = data[: len(_HEAD)], data[len(_HEAD) : _BODY], data[_BODY:]
    if head != _HEAD or _sum(data) != digest:
        return None
    return msgspec.msgpack.decode(data, type=ChatSession)


def _sum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _set_aside(path: Path) -> None:
    """Rename a file that is no valid chat, and log it."""
    aside = path.with_name(path.name + _ASIDE)
    with contextlib.suppress(OSError):
        os.replace(path, aside)
    _log.warning(
        "%s is no chat that can be read: it is %s now, and its chat begins anew",
        path.name,
        aside.name,
    )


def _replace(path: Path, data: bytes) -> None:
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
    return hashlib.blake2b(f"{caller}\0{name}".encode(), digest_size=8).hexdigest()


_OF_MESSAGE: Final = 600
"""Bytes of memory that a message takes in addition to its text. Chosen: measured on short
messages.
"""


class ChatStore:
    """Keeps the most recently used chats; each has a lock for its changes."""

    def __init__(self, settings: ChatStoreSettings) -> None:
        self._most = settings.ram_bytes
        self._chats: OrderedDict[str, ChatSession] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        # A running turn keeps its chat, even if the chat has left memory meanwhile.
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
        """Number of chats whose newest state could not be written."""
        return len(self._files.unwritten) if self._files is not None else 0

    def lock(self, key: str) -> asyncio.Lock:
        return self._locks.setdefault(key, asyncio.Lock())

    def get(self, new: ChatSession) -> ChatSession:
        """Return the chat with this key, from memory or file, else ``new``. Raises UnreadError."""
        key = new.key
        chat = self._chats.get(key) or self._in_use.get(key)
        if chat is None:
            chat = self._files.read(key) if self._files is not None else None
        chat = new if chat is None else chat
        self._load(chat)  # first: it may raise, and the chat stays
        self._chats.pop(key, None)
        self.put(chat)
        if key not in self._sizes:
            self._measure(chat, _encoded(chat))
        return chat

    def put(self, chat: ChatSession) -> None:
        self._chats[chat.key] = self._in_use[chat.key] = chat

    def chats(self) -> list[ChatSession]:
        """Return all chats in memory, most recently used last."""
        return list(self._chats.values())

    def of_caller(self, caller: str, salt: str, name: str) -> list[ChatSession]:
        """Return the chats of this name that a caller may read, one for each model. Raises
        UnreadError.
        """
        kept = self._files.of_owner(name, caller) if self._files is not None else []
        found = {chat.key: chat for chat in (*kept, *self._in_use.values())}  # the latter are newer
        asked = (caller, salt, name)
        return [chat for chat in found.values() if (chat.caller, chat.salt, chat.name) == asked]

    def holds(self, chat: ChatSession) -> bool:
        """Return whether a chat, or a version of it, is stored: not forgotten, not replaced."""
        whole = self._in_use.get(chat.key)
        return whole is not None and any(each is chat for each in whole.versions)

    async def keep(self, version: ChatSession) -> None:
        """Store a changed version of a chat, unless it was forgotten, and enforce the budgets."""
        if not self.holds(version):
            return
        chat = self._in_use[version.key]
        is_whole = self._is_whole(chat)
        self._chats[chat.key] = chat
        if is_whole and self._files is not None and chat.named:
            size = await self._files.write(chat)
            if not self.holds(chat):  # forgotten while it was written
                return self._files.forget(chat.key)
        else:
            size = _encoded(chat)
        self._measure(chat, size)
        self._within_memory(chat, version)

    def forget_new(self, version: ChatSession) -> None:
        if not self.holds(version):
            return
        chat = self._in_use[version.key]
        if chat is version:
            self.forget(chat.key)
        else:
            chat.without(version)

    def forget_aside(self, caller: str, name: str) -> bool:
        """Remove a caller's unreadable files of this name; return whether there were any."""
        return self._files is not None and self._files.forget_aside(name, caller) > 0

    def forget(self, key: str) -> None:
        self._in_use.pop(key, None)
        self._drop(key)
        if self._files is not None:
            self._files.forget(key)

    def _is_whole(self, chat: ChatSession) -> bool:
        """Load a chat's text before it is written; False if its file has to stay as it is."""
        try:
            self._load(chat)
        except UnreadError:
            if self._files is not None:
                self._files.unwritten.add(chat.key)
            return False
        return True

    def _load(self, chat: ChatSession) -> None:
        """Read text that was dropped for want of room back from the chat's file."""
        without = [block for block in _blocks(chat) if not block.messages]
        kept = self._files.read(chat.key) if without and self._files is not None else None
        if kept is not None:
            texts = {
                tuple(block.digests): block.messages for block in _blocks(kept) if block.messages
            }
            for block in without:
                block.messages = texts.get(tuple(block.digests), [])

    def _within_memory(self, used: ChatSession, version: ChatSession) -> None:
        """Drop the least recently used chats until the rest fits; those with a file go first."""
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
    return [block for each in chat.versions for block in each.blocks]


def _encoded(what: object) -> int:
    return len(msgspec.msgpack.encode(what))


def _beside(blocks: Iterable[Block]) -> int:
    """Return the memory that messages take beside their text, in bytes."""
    return _OF_MESSAGE * sum(len(block.messages) for block in blocks)
