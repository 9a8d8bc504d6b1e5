"""Notices a disk or a store that no longer answers, so that it holds up nobody who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..jobs import Job

PATIENCE_S: Final = 5.0  # a working disk takes a small part of it per record; chosen


class AnswerWatch:
    """Jobs of a lane's thread, until one side has answered for each: that thread, or whoever
    waits.

    A system call to a disk that hangs (a network's, a dying one) cannot be cancelled. So the
    waiting side answers instead, and what the lane's thread reports later is ignored.

    Attributes:
        stuck: Whether nothing has moved for too long.

    Args:
        clock: Monotonic seconds.
        patience_s: Seconds without a record read or written after which the lane counts as stuck.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._jobs: dict[int, Job] = {}  # ``pop`` is how either side takes a job, and it alone
        self._moved_at = clock()
        self.stuck = False

    def add(self, job: Job) -> None:
        """Note that the lane's thread was given ``job``."""
        if not self._jobs:
            self._moved_at = self._clock()
        self._jobs[job.id] = job

    def moved(self) -> None:
        """Note that a record was read or written."""
        self._moved_at = self._clock()
        self.stuck = False

    def waits_for(self, job: Job) -> bool:
        """Whether ``job`` was not given up yet."""
        return job.id in self._jobs

    def claim(self, job: Job) -> bool:
        """Whether the caller shall answer for ``job``; then no other caller will."""
        return self._jobs.pop(job.id, None) is not None

    def overdue(self) -> list[Job]:
        """Take the jobs to answer for now, as failed: all, once nothing moved for too long."""
        if not self._jobs or self._clock() - self._moved_at < self._patience_s:
            return []
        self.stuck = True
        return [job for job in list(self._jobs.values()) if self.claim(job)]
