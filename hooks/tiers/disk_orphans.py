"""Disk tiers' files that nobody serves any more: they age out, or make room, and are not wiped."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from ...kernels.errors import StorageError
from ...kernels.store.disk import remove_unused
from ..thread_name import shown
from .budget import DISK_SUFFIX, FILE_PREFIX

logger = logging.getLogger(__name__)

T = TypeVar("T")
ORPHAN_S: Final = 86_400.0
"""Seconds without use after which a file goes; chosen: whoever goes back to other weights, or to
another type of cache, within a day finds what they left."""
SWEEP_S: Final = 300.0  # between two sweeps; chosen


class DiskOrphans:
    """Files in a directory of models, weights and caches that are not this engine's.

    A file that some process has open is no orphan, whatever its age.

    Args:
        directory: Where disk tiers' files are; files of other names are left alone.
        own: With what the names of this engine's files begin, those of all its workers.
    """

    def __init__(self, directory: Path, own: str) -> None:
        self._directory, self._own = directory, own

    def age_out(self, used: Path) -> None:
        """Remove those that nobody has used for a day, by the clock that dates files.

        Args:
            used: A file that is in use now; it is dated so.

        Raises:
            StorageError: One cannot be removed.
            OSError: ``used`` cannot be dated.
        """
        os.utime(used)
        long_ago = used.stat().st_mtime - ORPHAN_S
        _remove([path for used, path in self._oldest_first() if used < long_ago], "a day unused")

    def make_room(self, opened: Callable[[], T]) -> T:
        """Return what ``opened`` returns; while there is no space for it, remove the oldest.

        Raises:
            StorageError: ``opened`` raised it, and no orphan is left, or it was not for space.
        """
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
                if not path.name.startswith(self._own):
                    found.append((path.stat().st_mtime, path))
        return sorted(found)


class DiskSweep:
    """Dates a worker's own file, and lets orphans age out, every five minutes; on its own thread.

    Args:
        path: The file.
        orphans: Those beside it.
        period_s: Seconds between two sweeps.
    """

    def __init__(self, path: Path, orphans: DiskOrphans, period_s: float = SWEEP_S) -> None:
        self._path, self._orphans = path, orphans
        self._period_s, self._over = period_s, threading.Event()
        thread = threading.Thread(target=shown(self._run), name="kvgraph-sweep", daemon=True)
        thread.start()

    def close(self) -> None:
        """Sweep no more; what a disk that hangs is busy with is not waited for."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            with contextlib.suppress(OSError, StorageError):  # the next sweep may succeed
                self._orphans.age_out(self._path)  # after a crash, it is as old as it is unused


def _remove(paths: Iterable[Path], why: str) -> None:
    for path in remove_unused(paths):
        logger.info("kvgraph: removed %s: %s", path, why)
