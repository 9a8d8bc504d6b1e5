"""Messages between scheduler and workers: the jobs of a step, and their answers.

Every worker does every job on its own shard of the blocks. A copy's number is never reused in an
engine's life, so that a late message cannot be mistaken for a new one. These are msgspec Structs: a
step creates and pickles several of each, which then needs no Python frame.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec


class Spill(msgspec.Struct, frozen=True):
    """Copy the engine's ``blocks`` into new ``copies`` in memory."""

    id: int
    blocks: tuple[int, ...]
    copies: tuple[int, ...]
    # Whether the step's next load overwrites the blocks, and so waits for this.
    overwritten: bool = False


class SpliceRun(NamedTuple):
    """Consecutive tokens of one copy that go to consecutive slots of the engine's cache."""

    copy: int  # the copy's number
    first: int  # index of the first token in the copy
    slot: int  # slot of that token: block · tokens per block + token
    tokens: int  # how many
    delta: int  # the new position minus the old one


class Load(msgspec.Struct, frozen=True):
    """Copy ``copies`` back into the engine's ``blocks``, and splice ``runs`` into ``spliced``."""

    id: int
    copies: tuple[int, ...]
    blocks: tuple[int, ...]
    from_disk: dict[int, bytes]  # hashes of the copies that must be read from disk, by position
    request: str | None  # the request that waits for the load; None for a prefetch
    runs: tuple[SpliceRun, ...] = ()  # tokens to splice
    spliced: tuple[int, ...] = ()  # the engine's blocks that the runs write to
    # As ``from_disk``, for copies in the shared store.
    from_store: dict[int, bytes] = msgspec.field(default_factory=dict)
    within_s: float = math.inf  # seconds after which reading from the store stops

    @property
    def targets(self) -> tuple[int, ...]:
        """Return all blocks that the load writes to, in the order of an answer's positions."""
        return self.blocks + self.spliced


class Demote(msgspec.Struct, frozen=True):
    """Write ``copies`` to the disk under ``hashes``."""

    id: int
    copies: tuple[int, ...]
    hashes: tuple[bytes, ...]


class Share(msgspec.Struct, frozen=True):
    """Write ``copies`` to the shared store under ``hashes``; they stay in memory."""

    id: int
    copies: tuple[int, ...]
    hashes: tuple[bytes, ...]


Job = Spill | Load | Demote | Share

_NOBODY_WAITS: Final = (Demote, Share)  # jobs whose end no request waits for


def positions(job: Job) -> int:
    return len(job.targets) if isinstance(job, Load) else len(job.copies)


class TierWork(msgspec.Struct, frozen=True):
    """Orders for one engine step: first the copies that became invalid, then new jobs."""

    jobs: tuple[Job, ...] = ()
    release: tuple[int, ...] = ()  # copies in memory to drop; no running job uses them
    erase: tuple[bytes, ...] = ()  # hashes whose records on disk must be erased
    # Whether later processes must not use the present records on disk, because the weights may have
    # changed in memory, which their checkpoint does not show.
    disown: bool = False
    # Complete copies in memory that are on no disk, with their hashes. Those left when the engine
    # ends are written to the disk.
    named: tuple[tuple[int, bytes], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.jobs or self.release or self.erase or self.disown or self.named)


class JobDone(msgspec.Struct, frozen=True):
    """A worker's answer; ``failed`` are positions in the lists of a job (a load's ``targets``)."""

    id: int
    failed: frozenset[int]
    seconds: float
    bytes: int


class WorkerStart(msgspec.Struct, frozen=True):
    """One worker's capacities; workers differ in layers and in memory."""

    warm_capacity: int = 0  # copies that fit into its memory
    cold_capacity: int = 0  # records that fit on its disk; 0 without one
    on_disk: tuple[bytes, ...] = ()  # hashes of the records that its disk held at the start
    store_name: str = ""  # name of its records in the shared store; empty without a store


class TierAnswer(msgspec.Struct, frozen=True):
    """The workers' report after a step; each worker reports its ``starts`` once."""

    done: tuple[JobDone, ...] = ()
    starts: tuple[WorkerStart, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.done or self.starts)

    def __add__(self, other: TierAnswer) -> TierAnswer:
        return TierAnswer(self.done + other.done, self.starts + other.starts)


Finish = Callable[[JobDone], None]


@dataclass(slots=True)
class _Open:
    job: Job
    finish: Finish
    missing: int
    done: JobDone | None = None  # the combined answers so far


class JobBook:
    """Tracks jobs until all workers have answered."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._open: dict[int, _Open] = {}
        self._new: list[Job] = []
        self._next = 0
        self.pressing = 0  # open jobs whose end somebody waits for

    def __len__(self) -> int:
        return len(self._open)

    def number(self) -> int:
        self._next += 1
        return self._next

    def open(self, job: Job, finish: Finish) -> None:
        """Add a job; ``finish`` is called once, when the last worker has answered."""
        self._new.append(job)
        self._open[job.id] = _Open(job, finish, self._workers)
        self.pressing += not isinstance(job, _NOBODY_WAITS)

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    def take(self) -> tuple[Job, ...]:
        jobs, self._new = tuple(self._new), []
        return jobs

    def answer_all(self, done: Iterable[JobDone]) -> None:
        """Handle workers' answers, all of them even if some raise. Raises the last error."""
        failure: Exception | None = None
        for each in done:
            try:
                self.answer(each)
            except Exception as error:  # the others' blocks must come back all the same
                failure = error
        if failure is not None:
            raise failure

    def answer(self, done: JobDone) -> None:
        """Handle one worker's answer. A position that failed for one worker has failed; the slowest
        worker determines the time.
        """
        entry = self._open.get(done.id)
        if entry is None:
            return  # answered already: a worker that repeats itself changes nothing
        if (before := entry.done) is not None:
            done = JobDone(
                done.id,
                before.failed | done.failed,
                max(before.seconds, done.seconds),
                max(before.bytes, done.bytes),
            )
        entry.done = done
        entry.missing -= 1
        if not entry.missing:
            del self._open[done.id]
            self.pressing -= not isinstance(entry.job, _NOBODY_WAITS)
            entry.finish(done)


class Answers:
    """Collects a worker's answers, from any thread, until the engine's thread takes them."""

    def __init__(self, start: WorkerStart) -> None:
        self._lock = threading.Lock()
        self._done: list[JobDone] = []
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._starts: tuple[WorkerStart, ...] = (start,)

    def report(self, job: Job, failed: frozenset[int], seconds: float, size: int) -> None:
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
        with self._lock:
            done, self._done = tuple(self._done), []
        starts, self._starts = self._starts, ()
        return TierAnswer(done, starts)

    def take_loaded(self) -> tuple[set[str], set[int]]:
        """Return the requests whose loads ended since the last call, and the failed blocks."""
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed_blocks = self._failed_blocks, set()
        return finished, failed
