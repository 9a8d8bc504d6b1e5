"""Host memory available to tiers, and old files of disk tiers."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from ...kernels.disk import remove_unused
from ...kernels.errors import StorageError
from ..settings import DISK_SUFFIX, FILE_PREFIX
from ..threads import shown

_KEPT_SHARE: Final = 0.1  # share of free memory left free, because the engine's needs grow; chosen
_UNLIMITED: Final = 1 << 60  # control groups write "max", or a number beyond any machine's memory


def share_of(wanted: int, sharers: int, root: Path = Path("/")) -> int:
    """Return the bytes available to each of ``sharers`` workers, all of which want ``wanted``.

    Memory is committed when it is first used. The kernel would kill a process that was promised
    more than there is under load, hours after its start.
    """
    return min(wanted, int(available_bytes(root) * (1 - _KEPT_SHARE)) // sharers)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be used without swapping or exceeding a control group's limit."""
    return max(0, min(_machine_bytes(root), *_group_bytes(root)))


def _machine_bytes(root: Path) -> int:
    lines = _read(root / "proc/meminfo").splitlines()
    free = (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return next(free, _UNLIMITED)


def _group_bytes(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process, up to the outermost, leaves free."""
    yield _UNLIMITED
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _rooms(mounts, group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms(
                mounts / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                "total_inactive_file",
            )  # fmt: skip


def _rooms(mount: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    inner = mount / group.strip("/")
    for folder in (inner, *inner.parents):
        most = _number(folder / limit)
        if most is not None and most < _UNLIMITED:
            reclaimable = dict(
                line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines()
            )
            yield most - (_number(folder / usage) or 0) + int(reclaimable.get(cache, 0))
        if folder == mount:
            return


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not this kernel's layout, or not ours to see
        return ""


logger = logging.getLogger(__name__)

T = TypeVar("T")
ORPHAN_S: Final = 86_400.0
"""Seconds without use after which a file is removed; chosen: whoever returns to other weights or
another cache type within a day finds the old copies.
"""
SWEEP_S: Final = 300.0  # time between two sweeps; chosen


class DiskOrphans:
    """Files of disk tiers of other models, weights or caches, which no process has open."""

    def __init__(self, directory: Path, own: str) -> None:
        self._directory, self._own = directory, own

    def age_out(self, used: Path) -> None:
        """Remove orphans unused for a day by the file system's clock. Raises StorageError or
        OSError.
        """
        os.utime(used)
        long_ago = used.stat().st_mtime - ORPHAN_S
        _remove([path for used, path in self._oldest_first() if used < long_ago], "a day unused")

    def make_room(self, opened: Callable[[], T]) -> T:
        """Call ``opened``, removing the oldest orphan while it lacks space. Raises StorageError."""
        for _, path in self._oldest_first():
            try:
                return opened()
            except StorageError as error:
                if getattr(error.__cause__, "errno", None) != errno.ENOSPC:
                    raise
                _remove([path], "its space is needed")
        return opened()

    def _oldest_first(self) -> list[tuple[float, Path]]:
        found = []
        for path in self._directory.glob(f"{FILE_PREFIX}*{DISK_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                about = path.lstat()
                # To open a pipe of such a name would take for ever.
                if stat.S_ISREG(about.st_mode) and not path.name.startswith(self._own):
                    found.append((about.st_mtime, path))
        return sorted(found)


class DiskSweep:
    """Every five minutes, dates a worker's own file and removes old orphans, on a thread."""

    def __init__(self, path: Path, orphans: DiskOrphans, period_s: float = SWEEP_S) -> None:
        self._path, self._orphans = path, orphans
        self._period_s, self._over = period_s, threading.Event()
        thread = threading.Thread(target=shown(self._run), name="kvgraph-sweep", daemon=True)
        thread.start()

    def close(self) -> None:
        """Stop, without waiting for a sweep that hangs on the disk."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            with contextlib.suppress(OSError, StorageError):  # the next sweep may succeed
                self._orphans.age_out(self._path)  # after a crash, it is as old as it is unused


def _remove(paths: Iterable[Path], why: str) -> None:
    for path in remove_unused(paths):
        logger.info("kvgraph: removed %s: %s", path, why)
