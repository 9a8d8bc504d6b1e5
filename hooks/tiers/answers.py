"""A worker's answers on their way to the scheduler; any of the worker's threads may add one."""

from __future__ import annotations

import threading

from .jobs import Job, JobDone, Load, TierAnswer, TierWork, WorkerStart, positions


class Answers:
    """Collects what became of jobs until the engine's thread takes it.

    Args:
        start: What the worker has; reported once.
    """

    def __init__(self, start: WorkerStart) -> None:
        self._lock = threading.Lock()
        self._done: list[JobDone] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._starts: tuple[WorkerStart, ...] = (start,)

    def report(self, job: Job, failed: frozenset[int], seconds: float, size: int) -> None:
        """Report that ``job`` is over, except for the positions ``failed``; ``size`` bytes were
        moved."""
        with self._lock:
            self._done.append(JobDone(job.id, failed, seconds, size))
            if isinstance(job, Load) and job.request is not None:
                self._finished.add(job.request)
                self._failed_blocks.update(job.targets[at] for at in failed)

    def refuse(self, work: TierWork) -> None:
        """Report all of ``work`` as failed."""
        for job in work.jobs:
            self.report(job, frozenset(range(positions(job))), 0.0, 0)

    def take_answer(self) -> TierAnswer:
        """Take what was reported since the last call."""
        with self._lock:
            done, self._done = tuple(self._done), []
        starts, self._starts = self._starts, ()
        return TierAnswer(done, starts)

    def take_loaded(self) -> tuple[set[str], set[int]]:
        """Take the requests whose loads ended since the last call, and their blocks that failed."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed_blocks = self._failed_blocks, set()
        return finished, failed
