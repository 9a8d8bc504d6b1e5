"""Where a worker's records are kept, a disk or a store, and the thread that reads and writes them,
so that a slow one delays nothing else."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final, Protocol

from ....kernels.errors import StorageError
from ....kernels.store.arena import Arena
from ..jobs import Demote, Job, Share, positions
from .answer_watch import AnswerWatch
from .task_thread import TaskThread

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

RECORD_KEY_BYTES: Final = 32
LAST_WRITES_S: Final = 4.0
"""Seconds for which copies are written when an engine ends; chosen: vLLM gives its workers five."""

Outcome = Callable[[], Set[int]]  # what failed; or raises
Rest = Callable[[Set[int], float], None]
"""Goes on with the positions that failed, and the seconds that it took."""


class Records(Protocol):
    """Records of one size by keys of ``RECORD_KEY_BYTES``: ``DiskTier``, ``SealedRecords``."""

    def write(self, key: bytes, record: ReadableBuffer) -> bool:
        """Keep a copy of ``record``; False if that failed."""

    def read(self, key: bytes, into: WriteableBuffer) -> bool:
        """Fill ``into``; False, and ``into`` is undefined, if there is no such record whole."""

    def remove(self, key: bytes) -> None:
        """Forget a record; unknown keys are ignored."""

    def disown(self) -> None:
        """Let no other process find what is written from here on."""

    def close(self) -> None:
        """Let go of what holds the records."""


class RecordLane:
    """Reads and writes records for the memory's thread, which alone calls this.

    Without records, every one is refused.

    Args:
        name: The thread's name, and what the records are called in errors.
        records: Where they are kept, if there is such a place.
        arena: Where copies in memory live.
        memory: The memory's thread, which goes on with what the lane's has done.
        watch: Whether the lane's thread still answers.
        release: Called on the memory's thread with copies that were released meanwhile.
        refuse: Called there with a job that failed, the seconds that it took, and why.

    Attributes:
        records: As given.
        copies: Copies that the lane's thread has.
    """

    def __init__(
        self,
        name: str,
        records: Records | None,
        arena: Arena,
        memory: TaskThread,
        watch: AnswerWatch,
        release: Callable[[Sequence[int]], None],
        refuse: Callable[[Job, float, Exception], None],
    ) -> None:
        self.copies: set[int] = set()
        self.records, self._arena, self._memory, self._watch = records, arena, memory, watch
        self._name, self._release, self._refuse = name, release, refuse
        self._thread = TaskThread(f"kvgraph-{name}") if records is not None else memory
        self._freed_late: set[int] = set()  # copies that were released meanwhile

    @property
    def alive(self) -> bool:
        """Whether a job is under way, or may still come."""
        return self._thread.alive

    def close(self) -> bool:
        """Finish what was begun; False if that takes too long: the records must stay open then.

        What a hanging thread would write must still be what the record's checksum covers.
        """
        return self.records is None or self._thread.close()

    def keep_back(self, copies: Sequence[int]) -> list[int]:
        """Of copies that are released, those that no job uses; the others follow at the end of
        ``use``."""
        self._freed_late |= self.copies.intersection(copies)
        return [copy for copy in copies if copy not in self.copies]

    def use(self, job: Job, operation: Outcome, rest: Rest) -> None:
        """Let the lane's thread do ``operation``, and the memory's thread continue with ``rest``.

        A job that was given up, or comes while the lane hangs, is refused; nothing is written to
        the engine's memory then.
        """
        if self._watch.stuck:
            self._refuse(job, 0.0, self._silence())
            return
        self._watch.add(job)
        self.copies.update(job.copies)
        self._thread.put(lambda: self._work(job, operation, rest))

    def give_up_on_overdue(self) -> None:
        """Refuse jobs that nobody answered for too long; on the engine's thread."""
        for job in self._watch.overdue():
            self._refuse(job, 0.0, self._silence())

    def read_all(
        self, hashes: Mapping[int, bytes], records: Sequence[int], within_s: float
    ) -> Set[int]:
        """Read the records of ``hashes`` by their positions; returns those that could not be read.

        Once ``within_s`` seconds are over, nothing more is read.
        """
        until = time.perf_counter() + within_s
        return {
            at
            for at, key in hashes.items()
            if time.perf_counter() > until or not self._read(key, records[at])
        }

    def write_all(self, job: Demote | Share, records: Sequence[int]) -> Set[int]:
        """Write a job's copies; returns the positions that were not taken."""
        views = map(self._arena.record_view, records)
        pairs = enumerate(zip(job.hashes, views, strict=True))
        return {at for at, (key, view) in pairs if not self._write(key, view)}

    def write_last(self, copies: Sequence[tuple[bytes, int]]) -> None:
        """Write copies before the lane closes, by their hashes and in this order, as many as there
        is time for."""
        if self.records is not None and not self._watch.stuck:
            until = time.perf_counter() + LAST_WRITES_S
            self._thread.put(lambda: self._write_last(copies, until))

    def erase(self, hashes: Sequence[bytes]) -> None:
        """Give up records, after what was begun before."""
        self._thread.put(lambda: self._erase(hashes))

    def disown(self) -> None:
        """Keep other processes from finding what is written from here on."""
        if self.records is not None:
            self._thread.put(self.records.disown)

    # On the lane's thread -----------------------------------------------------------------------

    def _work(self, job: Job, operation: Outcome, rest: Rest) -> None:
        """Run on the lane's thread; a job that was given up meanwhile is not begun."""
        began = time.perf_counter()
        try:
            failed = operation() if self._watch.waits_for(job) else all_of(job)
            outcome = functools.partial(_return, failed)
        except Exception as error:
            outcome = functools.partial(_raise, error)
        self._memory.put(lambda: self._back(job, outcome, rest, began))

    def _back(self, job: Job, outcome: Outcome, rest: Rest, began: float) -> None:
        """Continue on the memory's thread."""
        self._watch.moved()
        self.copies.difference_update(job.copies)
        late = self._freed_late.intersection(job.copies)
        self._freed_late -= late
        if self._watch.claim(job):
            seconds = time.perf_counter() - began
            try:
                rest(outcome(), seconds)
            except Exception as error:
                self._refuse(job, seconds, error)
        self._release(sorted(late))

    def _write_last(self, copies: Sequence[tuple[bytes, int]], until: float) -> None:
        for block_hash, record in copies:
            if time.perf_counter() > until:
                return
            self._write(block_hash, self._arena.record_view(record))

    def _write(self, block_hash: bytes, view: memoryview) -> bool:
        written = self.records is not None and self.records.write(_record_key(block_hash), view)
        self._watch.moved()
        return written

    def _read(self, block_hash: bytes, record: int) -> bool:
        view = self._arena.record_view(record)
        found = self.records is not None and self.records.read(_record_key(block_hash), view)
        self._watch.moved()
        return found

    def _erase(self, hashes: Sequence[bytes]) -> None:
        if self.records is not None:
            for block_hash in hashes:
                self.records.remove(_record_key(block_hash))

    def _silence(self) -> StorageError:
        return StorageError(f"the {self._name} does not answer")


def all_of(job: Job) -> frozenset[int]:
    """Every position that an answer to a job can name."""
    return frozenset(range(positions(job)))


def _return(failed: Set[int]) -> Set[int]:
    return failed


def _raise(error: Exception) -> Set[int]:
    raise error


def _record_key(block_hash: bytes) -> bytes:
    return block_hash.ljust(RECORD_KEY_BYTES, b"\0")
