"""A worker's answers on their way to the scheduler, collected from whichever thread has them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from .jobs import Job, JobDone, Load, TierAnswer, TierWork


class Answers:
    """What became of jobs, until the engine's thread asks.

    Args:
        on_disk: Hashes of the records that the worker's disk held at the start; said once.
    """

    def __init__(self, on_disk: Iterable[bytes] = ()) -> None:
        self._lock = threading.Lock()
        self._done: list[JobDone] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._on_disk: tuple[tuple[bytes, ...], ...] = (tuple(on_disk),)

    def report(self, job: Job, failed: frozenset[int], seconds: float, size: int) -> None:
        """``job`` is over, but for the positions ``failed``; ``size`` bytes were moved."""
        with self._lock:
            self._done.append(JobDone(job.id, failed, seconds, size))
            if isinstance(job, Load) and job.request is not None:
                self._finished.add(job.request)
                self._failed_blocks.update(job.blocks[at] for at in failed)

    def refuse(self, work: TierWork) -> None:
        """Nothing of ``work`` will be done."""
        for job in work.jobs:
            self.report(job, frozenset(range(len(job.copies))), 0.0, 0)

    def take_answer(self) -> TierAnswer:
        """What was done since the last call."""
        with self._lock:
            done, self._done = tuple(self._done), []
        on_disk, self._on_disk = self._on_disk, ()
        return TierAnswer(done, on_disk)

    def take_loaded(self) -> tuple[set[str], set[int]]:
        """Requests whose loads ended since the last call, and the blocks among them that failed."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed_blocks = self._failed_blocks, set()
        return finished, failed
