"""The graph on disk: written whole or not at all, and loaded whole or not at all.

A file is ``b"KVGSNAP" + version``, a BLAKE2b digest (32 bytes), and a numpy ``.npz`` archive
(never pickled). Times are stored relative to the moment of saving, since monotonic clocks start
anew. Neither residency nor copies are restored: an engine that says hello states its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .columns.interner import Interner
from .errors import SnapshotError
from .kvcache_graph import KVCacheGraph
from .sessions.sessions import SessionTable
from .tables.blocks import BlockTable
from .tables.edges import EdgeStore
from .tables.integrity import check_integrity
from .tables.tables import Tables

_MAGIC: Final = b"KVGSNAP\x0c"
_DIGEST_BYTES: Final = 32
_INTERNERS: Final = ("segment_names", "tenants", "memories")


def save(graph: KVCacheGraph, path: Path) -> int:
    """Write a snapshot; the file of before stays until the new one is complete.

    Returns:
        Bytes written.

    Raises:
        SnapshotError: The file cannot be written.
    """
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
    """Fill an empty graph from a snapshot.

    Raises:
        SnapshotError: The file cannot be read, is damaged, or is of another version; the graph
            is unchanged.
    """
    assert len(graph.tables.blocks) == 0, "a snapshot is loaded into an empty graph"
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot read snapshot {path}: {error.strerror or error}") from error
    tables = Tables(graph.tables.limits)
    try:
        arrays = _verified(raw, path)
        _fill(tables, arrays, graph.clock())
        check_integrity(tables)
    except (ValueError, KeyError, IndexError, AssertionError, zipfile.BadZipFile) as error:
        raise SnapshotError(f"snapshot {path} is damaged ({error}); it was not loaded") from error
    graph.adopt(tables, _section(arrays, "embeddings"))


def columns_of(tables: Tables, now: float) -> dict[str, npt.NDArray[Any]]:
    """Every column that a snapshot keeps, and all names, by section; times are relative to
    ``now``."""
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


def _fill(tables: Tables, arrays: dict[str, npt.NDArray[Any]], now: float) -> None:
    names = json.loads(arrays["names"].tobytes())
    tables.blocks.load_columns(_shifted(_section(arrays, "blocks"), BlockTable.times(), now))
    tables.blocks.tiers[:] = 0
    tables.edges.load_columns(_shifted(_section(arrays, "edges"), EdgeStore.times(), now))
    sessions = _shifted(_section(arrays, "sessions"), SessionTable.times(), now)
    tables.sessions.load_columns(sessions, names["sessions"])
    tables.sessions.load_learned(_section(arrays, "learned"), names["tools"])
    tables.sessions.interrupt()
    for name in _INTERNERS:
        interner: Interner = getattr(tables, name)
        interner.restore(names[name])


def _verified(raw: bytes, path: Path) -> dict[str, npt.NDArray[Any]]:
    head = len(_MAGIC) + _DIGEST_BYTES
    if raw[: len(_MAGIC)] != _MAGIC:
        raise SnapshotError(f"{path} is not a snapshot of this version")
    payload = raw[head:]
    digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()
    if digest != raw[len(_MAGIC) : head]:
        raise SnapshotError(f"snapshot {path} is damaged (checksum); it was not loaded")
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        return dict(archive)


def _shifted(
    columns: dict[str, npt.NDArray[Any]], times: tuple[str, ...], by: float
) -> dict[str, npt.NDArray[Any]]:
    """The columns with their times moved; NEVER stays as it is."""
    return {**columns, **{name: columns[name] + by for name in times}}


def _prefixed(prefix: str, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Copies of the columns, which go on changing once the lock is released."""
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
