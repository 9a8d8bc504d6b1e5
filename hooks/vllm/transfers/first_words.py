"""``FirstWords``: what each worker reports once, at its start: its memory and its disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ...tiers.jobs import WorkerStart

_LOOKUPS_IN_VAIN: Final = 64  # before the workers have reported what their disks hold; chosen


class FirstWords:
    """Collects the workers' starts until all are there.

    Args:
        workers: How many there are.
        with_disk: Whether they may have found records on their disks.
    """

    def __init__(self, workers: int, with_disk: bool) -> None:
        self._workers = workers
        self._starts: list[WorkerStart] = []
        self._patience = _LOOKUPS_IN_VAIN if with_disk else 0

    def is_worth_waiting(self) -> bool:
        """Whether a lookup should ask again later; True a bounded number of times.

        The first requests after a start are those that could use the disk.
        """
        if not self._patience or len(self._starts) == self._workers:
            return False
        self._patience -= 1
        return True

    def add(self, starts: Iterable[WorkerStart]) -> Sequence[WorkerStart]:
        """Take ``starts``; returns all of them, once, when the last has come."""
        for start in starts:
            if len(self._starts) < self._workers:
                self._starts.append(start)
                if len(self._starts) == self._workers:
                    return self._starts
        return ()
