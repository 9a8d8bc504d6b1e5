"""``TierMover``: moves a worker's shard of the blocks, on threads of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from ...kernels import ops
from ...kernels.arena import Arena
from ...kernels.disk import DiskTier
from ...kernels.errors import KernelError, RopeError, StorageError
from ...kernels.gpu.streams import Fence, mark
from ...kernels.layout import Blocks, PagedKv, SlotMap
from ...kernels.rope import Rope
from ..threads import Once, TaskThread
from .jobs import Answers, Demote, Job, Load, Share, Spill, TierWork, WorkerStart, positions
from .lanes import (
    RECORD_KEY_BYTES,
    AnswerWatch,
    RecordLanes,
    Records,
    TransferLane,
    all_of,
    kept_by,
)

if TYPE_CHECKING:
    from .jobs import SpliceRun


class DirtyCopies:
    """Complete copies that are on no disk but may be written for a later process, by their ids. The
    scheduler says whether a copy is complete and for whom: a worker cannot know.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}
        self._disowned = False

    def told(self, work: TierWork) -> None:
        self._disowned |= work.disown  # nobody would find what is written from here on
        self._hashes.update(work.named)
        for copy in tuple(self._hashes) if self._disowned else work.release:
            self._hashes.pop(copy, None)

    def written(self, job: Demote, failed: Set[int]) -> None:
        for at, copy in enumerate(job.copies):
            if at not in failed:
                self._hashes.pop(copy, None)

    def newest_first(self) -> list[tuple[int, bytes]]:
        """Return copies and hashes, newest first; of an evicted chain, the root first."""
        return list(self._hashes.items())[::-1]


def slot_map(runs: Sequence[SpliceRun], record: Callable[[int], int], block_size: int) -> SlotMap:
    starts = [(record(run.copy) * block_size + run.first, run.slot, run.delta) for run in runs]
    counts = np.array([run.tokens for run in runs], dtype=np.int64)
    table = np.repeat(np.array(starts, dtype=np.int64), counts, axis=0)
    within = np.arange(len(table)) - np.repeat(np.cumsum(counts) - counts, counts)
    return SlotMap(
        torch.from_numpy(table[:, 0] + within),
        torch.from_numpy(table[:, 1] + within),
        torch.from_numpy(table[:, 2].copy()),
    )


def splicer(
    runs: Sequence[SpliceRun],  # from copies to the cache
    handles: Mapping[int, int],  # the arena's handle of each copy
    arena: Arena,
    cache: PagedKv,
    rope: Rope | None,  # how keys are moved; None where they cannot be
) -> Callable[[], None]:
    """Return a function that moves ``runs`` to their new positions; without runs it does nothing.
    Raises RopeError or KernelError.
    """
    if not runs:
        return lambda: None
    if rope is None:
        raise RopeError("keys of this model cannot be moved to other positions")
    copies = list({run.copy: None for run in runs})
    numbers = arena.slots([handles[copy] for copy in copies]).tolist()
    records = dict(zip(copies, numbers, strict=True))
    slots = slot_map(runs, records.__getitem__, cache.layout.tokens)
    return lambda: ops.splice(arena.kv, cache, slots, rope)


logger = logging.getLogger(__name__)

_FAILED: Final = (
    "kvgraph: a %s failed (%s); blocks without a copy are computed again, and further failures are "
    "only counted"
)
_SHARING: Final = Share.__name__.lower()
_NOT_SHARED: Final = (
    "kvgraph: blocks were not given to the shared store (%s); other engines compute them, and "
    "further failures are only counted"
)
_HAND_OVER_S: Final = 1.0  # for the memory's thread to do so at the end; chosen
_LESS: Final = (
    "kvgraph: host memory for %d copies only: %s; raise what the machine or the container lets a "
    "process lock (ulimit -l, docker's --ulimit memlock=-1, its memory limit)"
)


class TierMover:
    """Does the scheduler's tier work on one worker; never raises into the engine.

    The engine's thread calls ``submit``, which never waits. The memory's thread manages the arena.
    Loads, spills, the disk, and reads and writes of the shared store each have their own thread. So
    a load, for which a request waits, waits only for the spill of the blocks that it overwrites,
    and a slow disk delays nothing else.
    """

    def __init__(
        self,
        cache: PagedKv,  # the engine's paged memory on this worker
        arena: Arena,  # the memory for copies
        disk: DiskTier | None = None,  # the disk tier, if there is one
        # length of a block hash; the disk's keys are padded with zeros
        hash_bytes: int = RECORD_KEY_BYTES,
        watch: AnswerWatch | None = None,  # whether the disk still answers
        # how keys are moved to other positions; None where they cannot be
        rope: Rope | None = None,
        # the shared store's records of this worker's shard, if there is one, and their name
        store: tuple[Records, str] | None = None,
    ) -> None:
        self.cache, self._arena, self._rope = cache, arena, rope
        self._handles: dict[int, int] = {}  # copy → record of the arena; the memory's thread's own
        self._unwritten = DirtyCopies()  # the memory's thread's own, too
        self._loads = TransferLane("kvgraph-loads", cache.memory.device, first=True)
        self._spills = TransferLane("kvgraph-spills", cache.memory.device)
        self._memory = TaskThread("kvgraph-memory")
        records, name = store or (None, "")
        self.lanes = RecordLanes(
            disk, records, arena, self._memory, watch, self._release, self._refuse, self._say
        )
        self.answers = Answers(_start(arena, disk, hash_bytes, name))  # outcomes of the jobs
        self._once = Once(logger)
        if arena.problem is not None:
            logger.warning(_LESS, arena.capacity, arena.problem)

    def submit(self, work: TierWork) -> None:
        """Start a step's work; a spill reads what the engine has written so far."""
        try:
            fence = mark(self.cache.memory.device)
        except Exception as error:
            self._say_once("fence", error)
            self.answers.refuse(work)
        else:
            self._memory.put(lambda: self._order(work, fence))

    def close(self) -> None:
        """Finish running work, write what no disk has yet, and close memory and disk."""
        handed = threading.Event()
        self._memory.put(lambda: self._hand_over(handed))
        handed.wait(_HAND_OVER_S)
        # Each hands over to those that follow; of one that hangs no memory is taken away.
        others = (self._memory, self._loads, self._spills)
        if all([self.lanes.close(), *(each.close() for each in others)]):
            self._arena.close()

    # On the memory's thread ---------------------------------------------------------------------

    def _hand_over(self, handed: threading.Event) -> None:
        """Give the disk's thread the copies that it must write before it ends."""
        with contextlib.suppress(Exception):  # they are computed again
            rest = self._unwritten.newest_first()
            self.lanes.disk.write_last([(key, self._handles[copy]) for copy, key in rest])
        handed.set()

    def _order(self, work: TierWork, fence: Fence) -> None:
        self._unwritten.told(work)
        self._release(work.release)
        if work.erase:
            self.lanes.disk.erase(work.erase)
        if work.disown:
            self.lanes.disown()  # before anything new is written to them
        for job in sorted(work.jobs, key=_can_wait):
            self._begin(job, fence)

    def _release(self, copies: Sequence[int]) -> None:
        """Free copies; those that the disk's thread uses, only when it is done with them."""
        free = [copy for copy in self.lanes.keep_back(copies) if copy in self._handles]
        handles = [self._handles.pop(copy) for copy in free]
        try:
            if handles:
                self._arena.free(handles)
        except Exception as error:  # their memory is lost to us, and nothing else is
            self._say_once("release", error)

    def _begin(self, job: Job, fence: Fence) -> None:
        try:
            self._start(job, self._records_for(job), fence)
        except Exception as error:  # no room, or a copy that is not there: nothing was begun
            self._report(job, all_of(job), 0.0, error)

    def _start(self, job: Job, records: Sequence[int], fence: Fence) -> None:
        match job:
            case Spill():
                self._spill(job, records, fence)
            case Load():
                self.lanes.read(
                    job,
                    records,
                    lambda failed, seconds: self._load(job, records, fence, failed, seconds),
                )
            case Demote() | Share():
                self.lanes.write(
                    job, records, lambda failed, seconds: self._over(job, failed, seconds)
                )

    def _records_for(self, job: Job) -> list[int]:
        """Return handles of a job's copies; allocates those that the job makes."""
        if isinstance(job, Spill):
            self._new_records(job.copies)
        elif isinstance(job, Load):
            self._new_records([job.copies[at] for at in sorted((*job.from_disk, *job.from_store))])
        return [self._handles[copy] for copy in job.copies]

    def _new_records(self, copies: Sequence[int]) -> None:
        handles = self._arena.allocate(len(copies))
        self._handles.update(zip(copies, handles.tolist(), strict=True))

    def _spill(self, job: Spill, records: Sequence[int], fence: Fence) -> None:
        copies = Blocks(self._arena.kv, torch.from_numpy(self._arena.slots(records)))
        blocks = Blocks(self.cache, torch.tensor(job.blocks, dtype=torch.int64))
        lane = self._loads if job.overwritten else self._spills  # a lane keeps its order
        lane.put(
            fence,
            lambda: ops.spill(blocks, copies),
            lambda seconds, error: self._over(job, frozenset(), seconds, error),
        )

    def _load(
        self, job: Load, records: Sequence[int], fence: Fence, failed: Set[int], before: float
    ) -> None:
        """Load all but the positions that ``failed`` in the ``before`` seconds on the disk."""
        good = [at for at in range(len(records)) if at not in failed]
        slots = torch.from_numpy(self._arena.slots([records[at] for at in good]))
        copies = Blocks(self._arena.kv, slots)
        blocks = Blocks(self.cache, torch.tensor([job.blocks[at] for at in good]).long())
        splice = splicer(job.runs, self._handles, self._arena, self.cache, self._rope)

        def move() -> None:
            ops.load(copies, blocks)
            splice()

        self._loads.put(
            fence, move, lambda seconds, error: self._over(job, failed, before + seconds, error)
        )

    # Answers ------------------------------------------------------------------------------------

    def _over(
        self, job: Job, failed: Set[int], seconds: float, error: Exception | None = None
    ) -> None:
        """Report a job; all of it failed after an error, else the positions ``failed``."""
        if isinstance(job, Demote):
            self._unwritten.written(job, failed)
        if error is None and failed:
            refused = StorageError(f"{kept_by(job)} refused or damaged {len(failed)} records")
            self._report(job, frozenset(failed), seconds, refused)
        else:
            self._report(job, all_of(job) if error else frozenset(), seconds, error)

    def _report(
        self, job: Job, failed: frozenset[int], seconds: float, error: Exception | None
    ) -> None:
        if error is not None:
            self._say(job, error)
        moved = positions(job) - len(failed)
        self.answers.report(job, failed, seconds, moved * self._arena.record_bytes)

    def _refuse(self, job: Job, seconds: float, error: Exception) -> None:
        self._report(job, all_of(job), seconds, error)

    def _say(self, job: Job, error: BaseException) -> None:
        self._say_once(type(job).__name__.lower(), error)

    def _say_once(self, what: str, error: BaseException) -> None:
        detail = str(error) if isinstance(error, KernelError) else type(error).__name__
        kind = f"{what} {type(error).__name__}"
        if what == _SHARING:  # nothing that this engine has is lost
            self._once.warn(kind, _NOT_SHARED, detail)
        else:
            self._once.warn(kind, _FAILED, what, detail)


def _start(arena: Arena, disk: DiskTier | None, hash_bytes: int, store: str) -> WorkerStart:
    if disk is None:
        return WorkerStart(arena.capacity, store_name=store)
    on_disk = tuple(key[:hash_bytes] for key in disk)
    return WorkerStart(arena.capacity, disk.capacity, on_disk, store)


def _can_wait(job: Job) -> bool:
    """Tell whether no request, and no other job of its step, waits for this job."""
    return isinstance(job, Spill) and not job.overwritten
