"""A bounded file of records that survives a restart: the tier below the arena.

Every record and every index entry has its own checksum. An entry is erased before its record's
bytes are overwritten and written after them, so that an interrupted write is not found again.
Records are read and written with pread and pwrite: a failing disk under a mapped page would kill
the engine with SIGBUS, while these return an error that costs one record.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import stat
import struct
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from .errors import StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_MAGIC: Final = b"KVGDISK2"
KEY_BYTES: Final = 32  # a whole block hash, so that nothing but the exact content is matched
# A void, not a string: numpy strips a string's trailing zero bytes.
_ENTRY: Final = np.dtype(
    [("key", f"V{KEY_BYTES}"), ("age", "<u8"), ("data", "<u4"), ("check", "<u4")]
)
_DATA_AT: Final = _ENTRY.fields["data"][1]  # type: ignore[index]
_NO_ENTRY: Final = np.zeros((), _ENTRY)
_PAGE: Final = 4096
_DIGEST_BYTES: Final = 16
_MOST_AGE: Final = 1 << 62  # no file gets this old; ages, which no checksum covers, may be damaged


class DiskTier:
    """Records by key; the least recently written or read one is replaced first. A key is
    ``KEY_BYTES`` bytes; every method raises ``StorageError`` for any other.
    """

    def __init__(self, path: Path, record_bytes: int, capacity: int, identity: str) -> None:
        """Open or create the file, with all its space reserved and mode 0600; raises StorageError.

        A file of another ``identity`` (model, layout, whatever else the bytes depend on) or size is
        started afresh.
        """
        self.path, self.record_bytes, self.capacity = path, record_bytes, capacity
        self.damaged = 0  # records that did not match their checksum and were forgotten
        self.failed = 0  # reads and writes that the disk refused
        self._header = self._header_of(hashlib.sha256(identity.encode()).digest()[:_DIGEST_BYTES])
        self._disowned = self._refusing = False
        self._data_start = -(-(_PAGE + capacity * _ENTRY.itemsize) // _PAGE) * _PAGE
        with _explained(f"disk tier {path}"):
            self._file = self._open()
            self._entries = self._load()
        ages = self._entries["age"]
        oldest_first = np.argsort(ages, kind="stable")
        live = oldest_first[ages[oldest_first] > 0].tolist()
        keys = self._entries["key"]
        # A key may stand there twice, after the disk refused to erase it: the newer one counts.
        self._slots = OrderedDict((keys[slot].tobytes(), slot) for slot in live)
        taken = np.zeros(capacity, np.bool_)
        taken[list(self._slots.values())] = True
        self._entries[~taken] = _NO_ENTRY
        self._free = deque(np.flatnonzero(~taken).tolist())
        self._clock = int(ages.max(initial=0))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return self._slot(key) is not None

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._slots)

    def write(self, key: bytes, record: ReadableBuffer) -> bool:
        """Write a copy of ``record``, which has ``record_bytes`` bytes, under ``key``.

        If the file is full, it replaces the record that was read or written longest ago. Returns
        False if the disk fails; the key then has no record.
        """
        slot = self._slot(key)
        if self._refusing:
            return False
        if slot is None:
            slot = self._free.popleft() if self._free else next(iter(self._slots.values()))
        checksum = zlib.crc32(record)  # first: what changes while it is written is not matched
        try:
            self._erase(slot)
            self._pwrite(record, self._data_start + slot * self.record_bytes)
            self._enter(slot, key, checksum)
        except OSError:
            self._free.append(slot)
            self.failed += 1
            return False
        return True

    def read(self, key: bytes, into: WriteableBuffer) -> bool:
        """Read a record; False, with ``into`` undefined, if none is intact."""
        slot = self._slot(key)
        if slot is None:
            return False
        try:
            got = os.preadv(self._file, [into], self._data_start + slot * self.record_bytes)
        except OSError:
            self.failed += 1
            return False
        if got != self.record_bytes or zlib.crc32(into) != int(self._entries["data"][slot]):
            self.damaged += 1
            self.remove(key)
            return False
        self.touch(key)
        return True

    def touch(self, key: bytes) -> None:
        """Mark a record as used now; this is stored with the record's next write."""
        slot = self._slot(key)
        if slot is not None:
            self._slots.move_to_end(key)
            self._clock += 1
            self._entries["age"][slot] = self._clock

    def remove(self, key: bytes) -> None:
        """Forget a record, if there is one."""
        slot = self._slot(key)
        if slot is not None:
            self._free.append(slot)
            try:
                self._erase(slot)
            except OSError:
                self.failed += 1

    def disown(self) -> None:
        """Hide the file's records from later processes; this process continues to use them.

        Called when new bytes no longer follow from the identity. If the disk cannot record that,
        nothing more is written.
        """
        if self._disowned:
            return
        try:
            self._pwrite(self._header_of(os.urandom(_DIGEST_BYTES)), 0)
            os.fdatasync(self._file)
            self._disowned = True
        except OSError:
            self.failed += 1
            self._refusing = True

    def close(self) -> None:
        """Flush and close the file, with its time set for ``remove_unused``."""
        with contextlib.suppress(OSError):
            os.fsync(self._file)
            os.utime(self._file)
        os.close(self._file)

    def _slot(self, key: bytes) -> int | None:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            got = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
            raise StorageError(f"a record's key has {got}; allowed: exactly {KEY_BYTES} bytes")
        return self._slots.get(key)

    def _header_of(self, digest: bytes) -> bytes:
        # Magic, record bytes, capacity, identity, checksum.
        body = struct.pack("<8sQQ16s", _MAGIC, self.record_bytes, self.capacity, digest)
        return body + struct.pack("<I", zlib.crc32(body))

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._refuse(self.path.parent, self.path.parent.stat())
        # A link would lead to a file that is none of ours, and would be emptied.
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._refuse(self.path, os.fstat(file))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(file, len(self._header), 0) != self._header:
                os.ftruncate(file, 0)
            _reserve(file, self._data_start + self.capacity * self.record_bytes)
            os.pwrite(file, self._header, 0)
        except (OSError, StorageError):
            os.close(file)
            raise
        return file

    def _refuse(self, path: Path, there: os.stat_result) -> None:
        if problem := strangers_problem(there):
            raise StorageError(f"disk tier {self.path}: {path}: {problem}")

    def _load(self) -> npt.NDArray[np.void]:
        raw = os.pread(self._file, self.capacity * _ENTRY.itemsize, _PAGE)
        entries = np.frombuffer(raw, dtype=_ENTRY).copy()
        used, view = np.flatnonzero(entries["age"]), memoryview(raw)
        sums = entries["check"][used].tolist()
        broken = [
            slot
            for slot, expected in zip(used.tolist(), sums, strict=True)
            if _entry_checksum(view[slot * _ENTRY.itemsize :]) != expected
        ]
        entries[broken] = _NO_ENTRY
        entries[entries["age"] > _MOST_AGE] = _NO_ENTRY
        return entries

    def _erase(self, slot: int) -> None:
        """Erase a record in memory first, so that it is not found again whatever the disk says."""
        if self._entries["age"][slot]:
            self._slots.pop(self._entries["key"][slot].tobytes(), None)
        self._entries[slot] = _NO_ENTRY
        self._pwrite(_NO_ENTRY.tobytes(), _PAGE + slot * _ENTRY.itemsize)

    def _enter(self, slot: int, key: bytes, checksum: int) -> None:
        entry = self._entries[slot : slot + 1].copy()
        entry["key"] = np.void(key)
        entry["age"], entry["data"] = self._clock + 1, checksum
        entry["check"] = _entry_checksum(memoryview(entry.tobytes()))
        self._pwrite(entry.tobytes(), _PAGE + slot * _ENTRY.itemsize)
        self._clock += 1
        self._entries[slot] = entry[0]
        self._slots[key] = slot

    def _pwrite(self, data: ReadableBuffer, at: int) -> None:
        written = os.pwrite(self._file, data, at)
        if written != memoryview(data).nbytes:
            raise OSError("short write")


def strangers_problem(there: os.stat_result) -> str | None:
    """Say why another user may have placed what is there; None if none can have."""
    if there.st_uid not in (0, os.geteuid()):
        return (
            f"it belongs to user {there.st_uid}, who can put anything there; allowed: root and "
            f"this process's user {os.geteuid()}"
        )
    if there.st_mode & stat.S_IWOTH and not there.st_mode & stat.S_ISVTX:
        return "every user can write to it (chmod o-w)"
    return None


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove tiers' files that nobody has open, as far as allowed; returns them."""
    removed = []
    for path in paths:
        with contextlib.suppress(OSError):  # another was faster, or it is another user's
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            removed.append(path)
    return removed


def _reserve(file: int, size: int) -> None:
    """Reserve all space now, so that a full disk is an error here and not during a write."""
    # Not by ``posix_fallocate``: where a filesystem cannot reserve (a network's), that writes every
    # block, which takes hours. There the free space is checked once, and a write may fail later.
    if _libc().fallocate(file, 0, 0, size) == 0:
        return
    error = ctypes.get_errno()
    if error not in (errno.EOPNOTSUPP, errno.ENOSYS):
        raise OSError(error, os.strerror(error))
    present, room = os.fstat(file).st_blocks * 512, os.fstatvfs(file)
    if size - present > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(file, size)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _entry_checksum(entry: memoryview) -> int:
    # Of key and data checksum: the age may be stale on disk.
    return zlib.crc32(entry[_DATA_AT : _DATA_AT + 4], zlib.crc32(entry[:KEY_BYTES]))


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise StorageError(f"{what} is in use by another process") from None
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}") from error
