"""Whether a worker's disk still answers: a hanging one must not hold up whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .jobs import Job

PATIENCE_S: Final = 5.0  # chosen: one record takes a disk that works a small part of it


class DiskWatch:
    """Jobs that the disk's thread has, until one side answers for each: it, or whoever waits.

    A system call to a disk that hangs (a network's, a dying one) cannot be ended. So the answer is
    given without it, and what it says later, if ever, counts for nothing.

    Attributes:
        stuck: Whether nothing was heard for too long, and nothing since.

    Args:
        clock: Monotonic seconds.
        patience_s: Without a record read or written.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._jobs: dict[int, Job] = {}  # ``pop`` is how either side takes a job, and it alone
        self._moved_at = clock()
        self.stuck = False

    def add(self, job: Job) -> None:
        """The disk's thread is given ``job``."""
        if not self._jobs:
            self._moved_at = self._clock()
        self._jobs[job.id] = job

    def moved(self) -> None:
        """The disk answered."""
        self._moved_at = self._clock()
        self.stuck = False

    def waits_for(self, job: Job) -> bool:
        """Whether ``job`` was not given up yet."""
        return job.id in self._jobs

    def claim(self, job: Job) -> bool:
        """Whether the caller is to answer for ``job``; nobody else will then."""
        return self._jobs.pop(job.id, None) is not None

    def overdue(self) -> list[Job]:
        """Jobs to answer for now, as failed: all, once nothing moved for too long."""
        if not self._jobs or self._clock() - self._moved_at < self._patience_s:
            return []
        self.stuck = True
        return [job for job in list(self._jobs.values()) if self.claim(job)]
