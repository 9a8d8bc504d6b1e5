"""Copies of blocks by key, over two tiers: the arena in memory, and a file below it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from .arena import Arena
from .disk import DiskTier


class CopyStore:
    """Which blocks have copies, and where; least recently used first to sink or go.

    A copy is found only after ``commit``: a spill that fails half way is never matched.
    """

    def __init__(self, arena: Arena, disk: DiskTier | None = None) -> None:
        self.arena = arena
        self.disk = disk
        self._handles: OrderedDict[int, int] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._handles or (self.disk is not None and key in self.disk)

    def reserve(self, count: int) -> Any | None:
        """Handles for ``count`` new copies, int64 [count]; None if that is more than fits at all.

        Room is made by sinking the least recently used copies to the disk, or dropping them.
        """
        missing = count - (self.arena.capacity - self.arena.used)
        if missing > len(self._handles):
            return None
        for _ in range(missing):
            self._sink()
        return self.arena.allocate(count)

    def commit(self, keys: Iterable[int], handles: Any) -> None:
        """The copies are complete: from now on they are found. An older copy of a key is freed."""
        for key, handle in zip(keys, handles, strict=True):
            self._forget(key)
            self._handles[key] = int(handle)

    def abandon(self, handles: Any) -> None:
        """Give back handles whose copies did not complete."""
        self.arena.free(handles)

    def bring(self, keys: list[int]) -> Any | None:
        """Handles of copies in memory, read from the disk where need be; None if one is missing."""
        if len(keys) > self.arena.capacity or not all(key in self for key in keys):
            return None
        for key in keys:  # what is asked for must not go to make room for the rest of it
            if key in self._handles:
                self._handles.move_to_end(key)
            if self.disk is not None:
                self.disk.touch(key)
        handles = [self._handles.get(key) or self._raise(key) for key in keys]
        if None in handles or not self.arena.valid(handles).all():
            return None
        return np.array(handles, dtype=np.int64)

    def drop(self, keys: Iterable[int]) -> None:
        """Forget copies in both tiers; unknown keys are ignored."""
        for key in keys:
            self._forget(key)

    def _raise(self, key: int) -> int | None:
        """Read a copy from the disk; None if it is damaged or there is no room."""
        reserved = self.reserve(1) if self.disk is not None else None
        if self.disk is None or reserved is None:
            return None
        handle = int(reserved[0])
        if not self.disk.read(key, self.arena.record_view(handle)):
            self.abandon(reserved)
            return None
        self._handles[key] = handle
        return handle

    def _sink(self) -> None:
        key, handle = self._handles.popitem(last=False)
        if self.disk is not None and key not in self.disk:
            self.disk.write(key, self.arena.record_view(handle))
        self.arena.free([handle])

    def _forget(self, key: int) -> None:
        handle = self._handles.pop(key, None)
        if handle is not None:
            self.arena.free([handle])
        if self.disk is not None:
            self.disk.remove(key)
