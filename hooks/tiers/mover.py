"""A worker's side of the tiers: moves its shard of the blocks, on threads of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final

import torch

from ...kernels import ops
from ...kernels.arena import Arena
from ...kernels.disk import DiskTier
from ...kernels.errors import KernelError, StorageError
from ...kernels.layout import PagedKv
from ...kernels.streams import Fence, TransferStream
from .answers import Answers
from .jobs import Job, Load, Sink, Spill, TierWork

logger = logging.getLogger(__name__)

DISK_KEY_BYTES: Final = 32


class TierMover:
    """Does a scheduler's tier work on one worker; never raises into the engine.

    ``submit`` is called by the engine's thread and waits for nothing: even room in the arena, which
    may have to be page-locked first, is found on the memory's thread. The disk has a thread of its
    own, so that a slow one holds up nobody else.

    Attributes:
        answers: What became of it all.

    Args:
        cache: The engine's paged memory on this worker.
        arena: Where copies in memory live.
        disk: Where they sink to, if there is a disk tier.
        hash_bytes: Length of a block hash; the disk's keys are filled up with zeros.
    """

    def __init__(
        self,
        cache: PagedKv,
        arena: Arena,
        disk: DiskTier | None = None,
        hash_bytes: int = DISK_KEY_BYTES,
    ) -> None:
        self._cache, self._arena, self._disk = cache, arena, disk
        self._handles: dict[int, int] = {}  # copy → record of the arena; the memory's thread's own
        self._stream = TransferStream(cache.memory.device)
        self._memory = _Lane("kvgraph-memory")
        self._storage = _Lane("kvgraph-disk") if disk is not None else self._memory
        self.answers = Answers(key[:hash_bytes] for key in disk or ())
        self._said: set[str] = set()

    def submit(self, work: TierWork) -> None:
        """Begin a step's work; what the engine wrote until now is what a spill reads."""
        try:
            fence = self._stream.fence()
        except Exception as error:
            self._say_once("fence", error)
            self.answers.refuse(work)
        else:
            self._memory.put(lambda: self._order(work, fence))

    def close(self) -> None:
        """Finish what is under way and let memory and disk go."""
        self._memory.close()
        self._storage.close()
        if self._disk is not None:
            self._disk.close()
        self._arena.close()

    # On the memory's thread ---------------------------------------------------------------------

    def _order(self, work: TierWork, fence: Fence) -> None:
        self._release(work.release)
        if work.erase:
            self._storage.put(lambda: self._erase(work.erase))
        for job in work.jobs:
            self._begin(job, fence)

    def _release(self, copies: Sequence[int]) -> None:
        handles = [self._handles.pop(copy) for copy in copies if copy in self._handles]
        try:
            if handles:
                self._arena.free(handles)
        except Exception as error:  # their memory is lost to us, and nothing else is
            self._say_once("release", error)

    def _begin(self, job: Job, fence: Fence) -> None:
        try:
            operation, on_disk = self._planned(job, fence)
        except Exception as error:  # no room, or a copy that is not there: nothing was begun
            self._report(job, frozenset(range(len(job.copies))), 0.0, error)
            return
        if on_disk:
            self._storage.put(lambda: self._do(job, operation))
        else:
            self._do(job, operation)

    def _planned(self, job: Job, fence: Fence) -> tuple[Callable[[], set[int]], bool]:
        """What is to be done, returning positions that failed, and whether it uses the disk."""
        match job:
            case Spill():
                records = self._new_records(job.copies)
                return lambda: self._spill(job, records, fence), False
            case Load():
                self._new_records([job.copies[at] for at in sorted(job.from_disk)])
                records = self._records(job.copies)
                return lambda: self._load(job, records, fence), bool(job.from_disk)
            case Sink():
                records = self._records(job.copies)
                return lambda: self._sink(job, records), True

    def _new_records(self, copies: Sequence[int]) -> Any:
        handles = self._arena.allocate(len(copies))
        self._handles.update(zip(copies, handles.tolist(), strict=True))
        return handles

    def _records(self, copies: Sequence[int]) -> list[int]:
        return [self._handles[copy] for copy in copies]

    # On either thread ---------------------------------------------------------------------------

    def _do(self, job: Job, operation: Callable[[], set[int]]) -> None:
        began = time.perf_counter()
        failure: Exception | None = None
        try:
            failed = operation()
            if failed:
                failure = StorageError(f"the disk refused or damaged {len(failed)} records")
        except Exception as error:
            failed, failure = set(range(len(job.copies))), error
        self._report(job, frozenset(failed), time.perf_counter() - began, failure)

    def _spill(self, job: Spill, records: Any, fence: Fence) -> set[int]:
        slots = torch.from_numpy(self._arena.slots(records))
        blocks = torch.tensor(job.blocks, dtype=torch.int64)
        self._transfer(fence, lambda: ops.spill(self._cache, blocks, self._arena.kv, slots))
        return set()

    def _load(self, job: Load, records: list[int], fence: Fence) -> set[int]:
        failed = {at for at, key in job.from_disk.items() if not self._read(key, records[at])}
        good = [at for at in range(len(records)) if at not in failed]
        slots = torch.from_numpy(self._arena.slots([records[at] for at in good]))
        blocks = torch.tensor([job.blocks[at] for at in good], dtype=torch.int64)
        if good:
            self._transfer(fence, lambda: ops.warm(self._arena.kv, slots, self._cache, blocks))
        return failed

    def _sink(self, job: Sink, records: list[int]) -> set[int]:
        assert self._disk is not None
        views = map(self._arena.record_view, records)
        written = [
            self._disk.write(_disk_key(key), view)
            for key, view in zip(job.hashes, views, strict=True)
        ]
        return {at for at, ok in enumerate(written) if not ok}

    def _read(self, block_hash: bytes, record: int) -> bool:
        view = self._arena.record_view(record)
        return self._disk is not None and self._disk.read(_disk_key(block_hash), view)

    def _erase(self, hashes: Sequence[bytes]) -> None:
        if self._disk is not None:
            for block_hash in hashes:
                self._disk.remove(_disk_key(block_hash))

    def _transfer(self, fence: Fence, operation: Callable[[], None]) -> None:
        self._stream.run(fence, operation).wait()

    def _report(
        self, job: Job, failed: frozenset[int], seconds: float, error: Exception | None
    ) -> None:
        if error is not None:
            self._say_once(type(job).__name__.lower(), error)
        moved = len(job.copies) - len(failed)
        self.answers.report(job, failed, seconds, moved * self._arena.record_bytes)

    def _say_once(self, what: str, error: Exception) -> None:
        reason = f"{what} {type(error).__name__}"
        if reason not in self._said:
            self._said.add(reason)
            detail = str(error) if isinstance(error, KernelError) else type(error).__name__
            logger.warning(
                "kvgraph: a %s failed (%s); blocks without a copy are computed again, and "
                "further failures are only counted",
                what,
                detail,
            )


class _Lane:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(Exception):  # a task reports its own failure
                task()


def _disk_key(block_hash: bytes) -> bytes:
    return block_hash.ljust(DISK_KEY_BYTES, b"\0")
