"""Saves and loads the graph; a snapshot is written or loaded completely, or not at all.

A file is ``b"KVGSNAP" + version``, a BLAKE2b digest (32 bytes), and a numpy ``.npz`` archive (never
pickled). Times are stored relative to the moment of saving, since monotonic clocks restart.
Residency and copies are not restored: each engine lists its own when it connects.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import SnapshotError
from .kvcache_graph import KVCacheGraph
from .logs.history import LoggedTables
from .tables.blocks import BlockTable
from .tables.columns import Interner
from .tables.edges import EdgeStore
from .tables.integrity import check_integrity
from .tables.sessions import SessionTable

_MAGIC: Final = b"KVGSNAP\x0c"
_DIGEST_BYTES: Final = 32
_MOST_BYTES: Final = 8 << 30  # largest file read; a block takes some hundred bytes; chosen
_INTERNERS: Final = ("segment_names", "tenants", "memories")


class _Names(msgspec.Struct):
    segment_names: list[str]
    tenants: list[str]
    memories: list[str]
    sessions: list[str]
    tools: list[list[int | str]]


def save(graph: KVCacheGraph, path: Path) -> int:
    """Write a snapshot atomically; return its bytes. Raises SnapshotError."""
    with graph.lock:
        arrays = columns_of(graph.tables, graph.clock())
        arrays |= _prefixed("embeddings", graph.embeddings())
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    payload = buffer.getvalue()
    digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    try:
        _replace(path, _MAGIC + digest + payload)
    except OSError as error:
        raise SnapshotError(f"cannot write snapshot {path}: {error.strerror or error}") from error
    return len(payload)


def load(graph: KVCacheGraph, path: Path) -> None:
    """Fill an empty graph from a snapshot; raises SnapshotError."""
    assert len(graph.tables.blocks) == 0, "a snapshot is loaded into an empty graph"
    tables = LoggedTables(graph.tables.limits)
    try:
        arrays = _verified(_read(path), path)
        _fill(tables, arrays, graph.clock())
        check_integrity(tables)
        graph.adopt(tables, _section(arrays, "embeddings"))
    except SnapshotError:
        raise
    # A correct digest does not prove valid content: another build may have written it, and
    # what numpy and zipfile raise of strange content is anything, as RuntimeError or MemoryError.
    except Exception as error:
        why = str(error) or type(error).__name__
        raise SnapshotError(f"snapshot {path} is damaged ({why}); it was not loaded") from error


def columns_of(tables: LoggedTables, now: float) -> dict[str, npt.NDArray[Any]]:
    """Return all columns and names that a snapshot stores, with times relative to ``now``."""
    names = {name: getattr(tables, name).names for name in _INTERNERS}
    names["sessions"] = tables.sessions.names
    names["tools"] = tables.sessions.tools.names
    return {
        "names": np.frombuffer(json.dumps(names).encode(), dtype=np.uint8),
        **_prefixed("blocks", _shifted(tables.blocks.columns(), BlockTable.times(), -now)),
        **_prefixed("edges", _shifted(tables.edges.columns(), EdgeStore.times(), -now)),
        **_prefixed("sessions", _shifted(tables.sessions.columns(), SessionTable.times(), -now)),
        **_prefixed("learned", tables.sessions.learned()),
    }


def _read(path: Path) -> bytes:
    """Read a regular file; a FIFO does not block."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "rb") as file:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise SnapshotError(f"snapshot {path} is not a regular file")
            if found.st_size > _MOST_BYTES:
                raise SnapshotError(f"snapshot {path} has more than {_MOST_BYTES >> 30} GiB")
            return file.read(found.st_size + 1)
    except OSError as error:
        raise SnapshotError(f"cannot read snapshot {path}: {error.strerror or error}") from error


def _fill(tables: LoggedTables, arrays: dict[str, npt.NDArray[Any]], now: float) -> None:
    names = msgspec.json.decode(arrays["names"].tobytes(), type=_Names)
    tables.blocks.load_columns(_shifted(_section(arrays, "blocks"), BlockTable.times(), now))
    tables.blocks.tiers[:] = 0
    tables.edges.load_columns(_shifted(_section(arrays, "edges"), EdgeStore.times(), now))
    sessions = _shifted(_section(arrays, "sessions"), SessionTable.times(), now)
    tables.sessions.load_columns(sessions, names.sessions)
    tables.sessions.load_learned(_section(arrays, "learned"), names.tools)
    tables.sessions.interrupt()
    for name in _INTERNERS:
        interner: Interner = getattr(tables, name)
        interner.restore(getattr(names, name))


def _verified(raw: bytes, path: Path) -> dict[str, npt.NDArray[Any]]:
    head = len(_MAGIC) + _DIGEST_BYTES
    if raw[: len(_MAGIC)] != _MAGIC:
        raise SnapshotError(f"{path} is not a snapshot of this version")
    payload = raw[head:]
    digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    if digest != raw[len(_MAGIC) : head]:
        raise SnapshotError(f"snapshot {path} is damaged (checksum); it was not loaded")
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        parts = archive.infolist()
    # Ours are stored as they are: no part takes more memory than it takes of the file.
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise SnapshotError(f"snapshot {path} has compressed parts; it was not loaded")
    if sum(part.file_size for part in parts) > len(payload):
        raise SnapshotError(f"snapshot {path} has parts that overlap; it was not loaded")
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return dict(arrays)


def _shifted(
    columns: dict[str, npt.NDArray[Any]], times: tuple[str, ...], by: float
) -> dict[str, npt.NDArray[Any]]:
    """Shift the time columns by ``by`` seconds; NEVER stays as it is."""
    return {**columns, **{name: columns[name] + by for name in times}}


def _prefixed(prefix: str, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Copy the columns, which may change once the lock is released."""
    return {f"{prefix}.{name}": column.copy() for name, column in columns.items()}


def _section(arrays: dict[str, npt.NDArray[Any]], prefix: str) -> dict[str, npt.NDArray[Any]]:
    start = f"{prefix}."
    return {name[len(start) :]: each for name, each in arrays.items() if name.startswith(start)}


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
