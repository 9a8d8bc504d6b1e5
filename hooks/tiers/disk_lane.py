"""A worker's disk, and the thread that reads and writes it, so that a slow disk delays nothing
else."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final

from ...kernels.store.arena import Arena
from ...kernels.store.disk import DiskTier
from .disk_watch import DiskWatch
from .jobs import Demote, Job, positions
from .task_thread import TaskThread

DISK_KEY_BYTES: Final = 32

Outcome = Callable[[], Set[int]]  # what failed; or raises


class DiskLane:
    """Reads and writes records for the memory's thread, which alone calls this.

    Without a disk every record is refused.

    Args:
        disk: The disk tier, if there is one.
        arena: Where copies in memory live.
        memory: The memory's thread, which goes on with what the disk's has done.
        watch: Whether the disk still answers.

    Attributes:
        disk: The disk tier, if there is one.
        copies: Copies that the disk's thread has.
    """

    def __init__(
        self, disk: DiskTier | None, arena: Arena, memory: TaskThread, watch: DiskWatch
    ) -> None:
        self.copies: set[int] = set()
        self.disk, self._arena, self._memory, self._watch = disk, arena, memory, watch
        self._thread = TaskThread("kvgraph-disk") if disk is not None else memory
        self._freed_late: set[int] = set()  # copies that were released meanwhile

    @property
    def alive(self) -> bool:
        """Whether a job is under way, or may still come."""
        return self._thread.alive

    def close(self) -> None:
        """Finish what was begun and close the file; the file of a disk that hangs stays open.

        What its thread would write then must still be what the record's checksum covers.
        """
        if self.disk is not None and self._thread.close():
            self.disk.close()

    def keep_back(self, copies: Sequence[int]) -> list[int]:
        """Of copies that are released, those that no job uses; the others follow at the end of
        ``use``."""
        self._freed_late |= self.copies.intersection(copies)
        return [copy for copy in copies if copy not in self.copies]

    def use(
        self,
        job: Job,
        operation: Outcome,
        then: Callable[[Outcome, float], None],
        release: Callable[[Sequence[int]], None],
    ) -> bool:
        """Let the disk's thread do ``operation``; False, and nothing is begun, while the disk
        hangs.

        Args:
            then: Called on the memory's thread with the outcome and when it began, unless the job
                was given up: nothing is written to the engine's memory then.
            release: Called there with copies that were released meanwhile.
        """
        if self._watch.stuck:
            return False
        self._watch.add(job)
        self.copies.update(job.copies)
        self._thread.put(lambda: self._work(job, operation, then, release))
        return True

    def read_all(self, hashes: Mapping[int, bytes], records: Sequence[int]) -> Set[int]:
        """Read the records of ``hashes`` by their positions; returns those that could not
        be read."""
        return {at for at, key in hashes.items() if not self._read(key, records[at])}

    def write_all(self, job: Demote, records: Sequence[int]) -> Set[int]:
        """Write a job's copies; returns the positions that the disk did not take."""
        views = map(self._arena.record_view, records)
        pairs = enumerate(zip(job.hashes, views, strict=True))
        return {at for at, (key, view) in pairs if not self._write(key, view)}

    def erase(self, hashes: Sequence[bytes]) -> None:
        """Give up records, after what was begun before."""
        self._thread.put(lambda: self._erase(hashes))

    def disown(self) -> None:
        """Keep later processes from finding what the disk holds from here on."""
        if self.disk is not None:
            self._thread.put(self.disk.disown)

    # On the disk's thread -----------------------------------------------------------------------

    def _work(
        self,
        job: Job,
        operation: Outcome,
        then: Callable[[Outcome, float], None],
        release: Callable[[Sequence[int]], None],
    ) -> None:
        """Run on the disk's thread; a job that was given up meanwhile is not begun."""
        began = time.perf_counter()
        try:
            failed = operation() if self._watch.waits_for(job) else all_of(job)
            outcome = functools.partial(_return, failed)
        except Exception as error:
            outcome = functools.partial(_raise, error)
        self._memory.put(lambda: self._back(job, lambda: then(outcome, began), release))

    def _back(
        self, job: Job, then: Callable[[], None], release: Callable[[Sequence[int]], None]
    ) -> None:
        """Continue on the memory's thread."""
        self._watch.moved()
        self.copies.difference_update(job.copies)
        late = self._freed_late.intersection(job.copies)
        self._freed_late -= late
        if self._watch.claim(job):
            then()
        release(sorted(late))

    def _write(self, block_hash: bytes, view: memoryview) -> bool:
        written = self.disk is not None and self.disk.write(_disk_key(block_hash), view)
        self._watch.moved()
        return written

    def _read(self, block_hash: bytes, record: int) -> bool:
        view = self._arena.record_view(record)
        found = self.disk is not None and self.disk.read(_disk_key(block_hash), view)
        self._watch.moved()
        return found

    def _erase(self, hashes: Sequence[bytes]) -> None:
        if self.disk is not None:
            for block_hash in hashes:
                self.disk.remove(_disk_key(block_hash))


def all_of(job: Job) -> frozenset[int]:
    """Every position that an answer to a job can name."""
    return frozenset(range(positions(job)))


def _return(failed: Set[int]) -> Set[int]:
    return failed


def _raise(error: Exception) -> Set[int]:
    raise error


def _disk_key(block_hash: bytes) -> bytes:
    return block_hash.ljust(DISK_KEY_BYTES, b"\0")
