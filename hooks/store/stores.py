"""``SharedStore``: the protocol of shared stores; ``DirectoryStore`` and ``MooncakeStore``."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from ...kernels.disk import strangers_problem
from ...kernels.errors import StorageError
from ..settings import MOONCAKE, StoreSettings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class SharedStore(Protocol):
    """Bytes by key, kept outside this process. Any thread may call it, and any call may hang.

    A value may disappear or be damaged at any time. All methods except ``close`` raise OSError if
    the store does not work.
    """

    def holds(self, keys: Sequence[str]) -> list[bool]: ...

    def get(self, key: str, parts: Sequence[WriteableBuffer]) -> bool:
        """Fill ``parts`` one after the other; returns False if no value of that size exists."""

    def put(self, key: str, parts: Sequence[ReadableBuffer]) -> None:
        """Store ``parts`` as one value, or keep what is there. Raises OSError if full."""

    def remove(self, key: str) -> None:
        """Remove a value, unless the store refuses to at present."""

    def close(self) -> None:
        """Close this client; values stay in the store."""


def open_store(settings: StoreSettings, adds: bool = True) -> SharedStore:
    """Open the store that ``settings`` name. ``adds``: whether this client may add its own memory
    to a Mooncake store. Raises StorageError, which says why it cannot be used.
    """
    if settings.is_mooncake:
        return MooncakeStore(settings.place, settings.capacity_bytes if adds else 0)
    return DirectoryStore(settings.place, settings.capacity_bytes)


_PARTS: Final = 16  # folders by the first digit of a block's hash, swept one at a time; chosen
_SWEPT_TO: Final = 0.9  # share of a part's room that is left filled by a sweep; chosen
_SWEEP_AFTER: Final = 32  # 1/32 of a part's room is written between two sweeps; chosen
_LEFT_BEHIND_S: Final = 60.0  # an unfinished file older than the newest by this is dead; chosen
_SHARED, _EXECUTE = 0o770, 0o111  # file mode bits
# Errors that concern one value, not the store: the path holds something that is not a value.
_OF_ONE_VALUE: Final = frozenset(
    {errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.ENXIO}
)
# A link may lead out of the store; a pipe in place of a value would block.
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_UNFINISHED: Final = ".tmp"
_SUFFIX: Final = ".kv"


class DirectoryStore:
    """One file per value; writers remove the least recently used files.

    A value appears whole or not at all: it is written under another name and renamed. Engines share
    the directory without communicating. Until a sweep, each worker may exceed the room by 1/32.
    Other files in the directory are left alone. Raises StorageError if the directory cannot be
    created or written, or is not safe from other users.
    """

    def __init__(self, path: str, capacity: int) -> None:
        self._path, self._capacity = Path(path), capacity
        # Whoever starts sweeps first: workers that write little and end would never do it.
        self._written = [capacity // _PARTS // _SWEEP_AFTER] * _PARTS
        self._sweeping = threading.Lock()
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            there = self._path.stat()
            mode = there.st_mode
            self._mode = stat.S_IMODE(mode) & _SHARED  # a group's members share what is in it
        except OSError as error:
            raise StorageError(f"shared store {path}: {error.strerror or error}") from error
        if mode & stat.S_IWOTH:
            raise StorageError(f"shared store {path}: every user can write to it (chmod o-w)")
        if problem := strangers_problem(there):
            raise StorageError(f"shared store {path}: {problem}")
        if not os.access(self._path, os.W_OK | os.X_OK):
            raise StorageError(f"shared store {path}: it cannot be written")

    def holds(self, keys: Sequence[str]) -> list[bool]:
        self._path.stat()  # a directory that went away must not read as an empty store
        return [_is_there(self._file(key)) for key in keys]

    def get(self, key: str, parts: Sequence[WriteableBuffer]) -> bool:
        try:
            file = os.open(self._file(key), _READ)
        except OSError as error:
            if error.errno not in _OF_ONE_VALUE:
                raise
            if error.errno == errno.ELOOP:  # a link; what may not be read may be another's value
                self._drop(key)
            return False
        try:
            there, wanted = os.fstat(file), sum(memoryview(part).nbytes for part in parts)
            if there.st_size != wanted or os.preadv(file, list(parts), 0) != wanted:
                self._drop(key)  # else no engine would write it anew
                return False
            with contextlib.suppress(OSError):  # who may read may not be who wrote
                os.utime(file)
            return True
        finally:
            os.close(file)

    def put(self, key: str, parts: Sequence[ReadableBuffer]) -> None:
        target = self._file(key)
        size = sum(memoryview(part).nbytes for part in parts)
        part = _part_of(key)
        if size > self._capacity // _PARTS:
            raise OSError(errno.EFBIG, "a value is larger than a sixteenth of the store")
        self._written[part] += size
        if self._written[part] > self._capacity // _PARTS // _SWEEP_AFTER and self._sweep(part):
            self._written[part] = 0
        self._make(target.parent)
        # Engines of several containers may have one pid.
        unfinished = target.with_suffix(f".{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            _write(unfinished, parts, size, self._mode & ~_EXECUTE)
            unfinished.rename(target)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def remove(self, key: str) -> None:
        self._file(key).unlink(missing_ok=True)

    def close(self) -> None: ...

    def _drop(self, key: str) -> None:
        """Remove what stands in a value's place and is none; a folder stays."""
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def _make(self, folder: Path) -> None:
        if folder.exists():
            return
        at = self._path
        for name in folder.relative_to(at).parts:
            at /= name
            with contextlib.suppress(FileExistsError):
                at.mkdir(mode=0o700)
                at.chmod(self._mode)

    def _file(self, key: str) -> Path:
        name, _, block = key.rpartition("/")
        return self._path / f"{_part_of(key):x}" / name / f"{block}{_SUFFIX}"

    def _sweep(self, part: int) -> bool:
        """Make room in one part of the store; False if another worker sweeps it now."""
        if not self._sweeping.acquire(blocking=False):
            return False
        try:
            folder = self._path / f"{part:x}"
            now = _time_there(folder)
            # Of a clock that went back: used at any time, it would be the last to go.
            ahead = now + _LEFT_BEHIND_S
            files = sorted(
                (used_at if used_at <= ahead else 0.0, size, path)
                for used_at, size, path in _files_in(folder)
            )
            values = [each for each in files if not each[2].endswith(_UNFINISHED)]
            excess = sum(size for _, size, _ in values) - self._capacity // _PARTS
            if excess > 0:
                excess += round((1 - _SWEPT_TO) * self._capacity / _PARTS)
            old = now - _LEFT_BEHIND_S
            for used_at, size, path in files:
                unfinished = path.endswith(_UNFINISHED)
                goes = used_at < old if unfinished else excess > 0
                if goes:
                    with contextlib.suppress(OSError):  # another engine sweeps too
                        os.unlink(path)
                    excess -= 0 if unfinished else size
            return True
        finally:
            self._sweeping.release()


def _is_there(value: Path) -> bool:
    try:
        return value.exists()
    except PermissionError:  # another user's folder
        return False


def _time_there(folder: Path) -> float:
    """Return the time by the file system's clock, since it alone is that of all machines."""
    try:
        os.utime(folder)
        return folder.stat().st_mtime
    except OSError:  # no folder yet, or another user's
        return time.time()


def _files_in(part: Path) -> Iterator[tuple[float, int, str]]:
    if part.is_symlink():
        return
    for folder, _, names in os.walk(part):
        for name in names:
            if not name.endswith((_SUFFIX, _UNFINISHED)):
                continue
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                there = os.lstat(path)
                if stat.S_ISREG(there.st_mode):
                    yield there.st_mtime, there.st_size, path


def _part_of(key: str) -> int:
    return int(key.rpartition("/")[2][0], 16)


def _write(path: Path, parts: Sequence[ReadableBuffer], size: int, mode: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, mode)
        if os.writev(file, list(parts)) != size:
            raise OSError("short write")
    finally:
        os.close(file)


_BUFFER_BYTES: Final = 128 << 20  # buffer for this client's values; chosen
_CONNECT_S: Final = 2.0  # to connect to the master, at the engine's start; chosen
_HANDSHAKE: Final = "P2PHANDSHAKE"  # clients find each other through the master alone
_INSTALL: Final = (
    "pip install 'kvgraph[mooncake]', and Debian's libibverbs1 (no RDMA hardware is needed)"
)


class MooncakeStore:
    """A client of a Mooncake master, over TCP; contributes ``adds`` bytes of this process's memory.

    A value is in the memory of one client, and lost with it: for some ten seconds after that client
    was killed, its values are listed but cannot be read. While the master is down, every call
    blocks for some four seconds. The client listens on all interfaces, without a password. Raises
    StorageError if Mooncake is not installed, or there is no such master.
    """

    def __init__(self, place: str, adds: int) -> None:
        host, _, port = place.removeprefix(MOONCAKE).rpartition(":")
        if not host or not port.isdecimal():
            raise StorageError(f"shared store {place}: allowed: {MOONCAKE}HOST:PORT")
        self._client = _new_client(place)
        try:
            own = _own_address(host, int(port))
        except OSError as error:
            raise StorageError(f"shared store {place}: {error.strerror or error}") from error
        master = f"{host}:{port}"
        code = self._client.setup(own, _HANDSHAKE, adds, _BUFFER_BYTES, "tcp", "", master)
        if code:
            raise StorageError(f"shared store {place}: no master takes us (code {code})")

    def holds(self, keys: Sequence[str]) -> list[bool]:
        there: list[int] = self._client.batch_is_exist(list(keys))
        if any(code < 0 for code in there):
            raise OSError("the master does not answer")
        return [bool(code) for code in there]

    def get(self, key: str, parts: Sequence[WriteableBuffer]) -> bool:
        value = self._client.get_buffer(key)
        views = [memoryview(part).cast("B") for part in parts]
        if value is None or value.size() != sum(len(view) for view in views):
            return False
        source, at = memoryview(value).cast("B"), 0
        for view in views:
            view[:] = source[at : at + len(view)]
            at += len(view)
        return True

    def put(self, key: str, parts: Sequence[ReadableBuffer]) -> None:
        """Store a value; an existing one stays as it is."""
        if code := self._client.put_parts(key, *parts):
            raise OSError(f"the store did not take a value (code {code})")

    def remove(self, key: str) -> None:
        """Remove a value, unless it was read in the last ten seconds, while its lease holds it."""
        self._client.remove(key)

    def close(self) -> None:
        self._client.close()


def _new_client(place: str) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StorageError(f"shared store {place}: {error}: {_INSTALL}") from error
    return MooncakeDistributedStore()


def _own_address(host: str, port: int) -> str:
    """This machine's address towards the master."""
    # Raises if there is no answer, where Mooncake would retry for ever.
    with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
        return str(connection.getsockname()[0])
