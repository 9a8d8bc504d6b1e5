"""``Unwritten``: which copies in a worker's memory would be lost if the engine ended now."""

from __future__ import annotations

from collections.abc import Set

from .jobs import Demote, TierWork


class Unwritten:
    """Copies that are whole, on no disk, and that a later process may find there; by their ids.

    A worker cannot know it by itself: whether a copy is whole, and whose it is, the scheduler says.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}
        self._disowned = False

    def told(self, work: TierWork) -> None:
        """Take what a step's work says of copies."""
        self._disowned |= work.disown  # nobody would find what is written from here on
        self._hashes.update(work.named)
        for copy in tuple(self._hashes) if self._disowned else work.release:
            self._hashes.pop(copy, None)

    def written(self, job: Demote, failed: Set[int]) -> None:
        """Note that copies were written, but for the positions ``failed``."""
        for at, copy in enumerate(job.copies):
            if at not in failed:
                self._hashes.pop(copy, None)

    def newest_first(self) -> list[tuple[int, bytes]]:
        """Return the copies and their hashes; of a chain that left the pool, the root first."""
        return list(self._hashes.items())[::-1]
