"""Threads that move a worker's records to and from disk and store, and blocks to the device."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import torch

from ...kernels.arena import Arena
from ...kernels.errors import StorageError
from ...kernels.gpu.streams import Fence, Ticket, TransferStream
from ..threads import TaskThread, shown
from .jobs import Demote, Job, Load, Share, positions

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

PATIENCE_S: Final = 5.0  # a working disk takes a small part of it per record; chosen


class AnswerWatch:
    """Ensures that each job of a lane is answered once: by its thread, or by whoever waits. After
    ``patience_s`` without a record read or written the lane counts as stuck.

    A system call to a hanging disk (a network's, a dying one) cannot be cancelled. So the waiting
    side answers instead, and a later report of the lane's thread is ignored.
    """

    def __init__(self, clock: Callable[[], float], patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._jobs: dict[int, Job] = {}  # ``pop`` is how either side takes a job, and it alone
        self._moved_at = clock()
        self.stuck = False  # whether nothing has moved for too long

    def add(self, job: Job) -> None:
        """Note that the lane's thread was given ``job``."""
        if not self._jobs:
            self._moved_at = self._clock()
        self._jobs[job.id] = job

    def moved(self) -> None:
        self._moved_at = self._clock()
        self.stuck = False

    def waits_for(self, job: Job) -> bool:
        return job.id in self._jobs

    def claim(self, job: Job) -> bool:
        """Return whether the caller must answer for ``job``; if so, no other caller will."""
        return self._jobs.pop(job.id, None) is not None

    def overdue(self) -> list[Job]:
        """Return the jobs to answer as failed: all of them, once nothing has moved for too long."""
        if not self._jobs or self._clock() - self._moved_at < self._patience_s:
            return []
        self.stuck = True
        return [job for job in list(self._jobs.values()) if self.claim(job)]


RECORD_KEY_BYTES: Final = 32
LAST_WRITES_S: Final = 4.0
"""Seconds for writing copies when an engine ends; chosen: vLLM gives its workers five."""

Outcome = Callable[[], Set[int]]  # returns the positions that failed, or raises
Rest = Callable[[Set[int], float], None]
"""Continues a job, given the positions that failed and the seconds taken."""


class Records(Protocol):
    """Records of one size by keys of ``RECORD_KEY_BYTES``: ``DiskTier``, ``SealedRecords``."""

    def write(self, key: bytes, record: ReadableBuffer) -> bool:
        """Store a copy of ``record``; returns False if that failed."""

    def read(self, key: bytes, into: WriteableBuffer) -> bool:
        """Read a record; False, with ``into`` undefined, if none is intact."""

    def remove(self, key: bytes) -> None:
        """Remove a record; unknown keys are ignored."""

    def disown(self) -> None:
        """Keep other processes from finding what is written from now on."""

    def close(self) -> None:
        """Release the file or connection that holds the records."""


class RecordLane:
    """Reads and writes records on a thread, for the memory's; without records, refuses."""

    def __init__(
        self,
        name: str,  # the thread's name, and what the records are called in errors
        records: Records | None,  # where they are kept, if anywhere
        arena: Arena,  # where copies in memory live
        memory: TaskThread,  # the memory's thread, which continues after the lane's
        watch: AnswerWatch,  # whether the lane's thread still answers
        # called on the memory's thread with copies that were released meanwhile
        release: Callable[[Sequence[int]], None],
        # called there with a job that failed, the seconds that it took, and why
        refuse: Callable[[Job, float, Exception], None],
        # called on any thread with a job, and why the lane did not do its part of it
        say: Callable[[Job, BaseException], None],
    ) -> None:
        self.copies: set[int] = set()  # copies that the lane's thread uses
        self.records, self._arena, self._memory, self._watch = records, arena, memory, watch
        self._name, self._release, self._refuse, self._say = name, release, refuse, say
        # By job: the positions that are the lane's part of it, and how it goes on.
        self._parts: dict[int, tuple[Set[int], Rest]] = {}
        self._thread = TaskThread(f"kvgraph-{name}") if records is not None else memory
        self._freed_late: set[int] = set()  # copies that were released meanwhile

    @property
    def alive(self) -> bool:
        """Whether a job is running, or may still come."""
        return self._thread.alive

    def close(self) -> bool:
        """Finish the jobs that were started. Returns False if that takes too long: the records must
        then stay open, because a hanging thread's write must still match the record's checksum.
        """
        return self.records is None or self._thread.close()

    def keep_back(self, copies: Sequence[int]) -> list[int]:
        """Return those of ``copies`` that no job uses; ``use`` releases the others at its end."""
        self._freed_late |= self.copies.intersection(copies)
        return [copy for copy in copies if copy not in self.copies]

    def use(self, job: Job, part: Set[int], operation: Outcome, rest: Rest) -> None:
        """Run ``operation`` on the lane's thread, and then ``rest`` on the memory's.

        If the lane hangs or the job was given up, ``operation`` does not run and the positions
        ``part`` count as failed; the job's other positions continue.
        """
        if self._watch.stuck:
            self._fail(job, part, rest, 0.0, self._silence())
            return
        self._parts[job.id] = part, rest
        self._watch.add(job)
        self.copies.update(job.copies)
        self._thread.put(lambda: self._work(job, operation))

    def give_up_on_overdue(self) -> None:
        """Let jobs go on without their overdue parts of this lane; on the engine's thread."""
        for job in self._watch.overdue():
            self._memory.put(functools.partial(self._give_up, job))

    def read_all(
        self, hashes: Mapping[int, bytes], records: Sequence[int], within_s: float
    ) -> Set[int]:
        """Read the records of ``hashes`` by their positions; returns the positions that failed.
        After ``within_s`` seconds, nothing more is read.
        """
        until = time.perf_counter() + within_s
        return {
            at
            for at, key in hashes.items()
            if time.perf_counter() > until or not self._read(key, records[at])
        }

    def write_all(self, job: Demote | Share, records: Sequence[int]) -> Set[int]:
        """Write a job's copies; returns the positions that were refused."""
        views = map(self._arena.record_view, records)
        pairs = enumerate(zip(job.hashes, views, strict=True))
        return {at for at, (key, view) in pairs if not self._write(key, view)}

    def write_last(self, copies: Sequence[tuple[bytes, int]]) -> None:
        """Write copies by their hashes before the lane closes, in this order, as time allows."""
        if self.records is not None and not self._watch.stuck:
            until = time.perf_counter() + LAST_WRITES_S
            self._thread.put(lambda: self._write_last(copies, until))

    def erase(self, hashes: Sequence[bytes]) -> None:
        self._thread.put(lambda: self._erase(hashes))

    def disown(self) -> None:
        """Keep other processes from finding what is written from now on."""
        if self.records is not None:
            self._thread.put(self.records.disown)

    # On the lane's thread -----------------------------------------------------------------------

    def _work(self, job: Job, operation: Outcome) -> None:
        """Run on the lane's thread; a job that was given up meanwhile is not begun."""
        began, outcome = time.perf_counter(), Future[Set[int]]()
        try:
            outcome.set_result(operation() if self._watch.waits_for(job) else all_of(job))
        except Exception as error:
            outcome.set_exception(error)
        self._memory.put(lambda: self._back(job, outcome, began))

    def _back(self, job: Job, outcome: Future[Set[int]], began: float) -> None:
        """Continue on the memory's thread."""
        self._watch.moved()
        self.copies.difference_update(job.copies)
        late = self._freed_late.intersection(job.copies)
        self._freed_late -= late
        if self._watch.claim(job):
            part, rest = self._parts.pop(job.id)
            seconds = time.perf_counter() - began
            if (error := outcome.exception()) is None:
                self._go_on(job, outcome.result(), rest, seconds)
            else:
                self._fail(job, part, rest, seconds, error)
        self._release(sorted(late))

    def _give_up(self, job: Job) -> None:
        self._fail(job, *self._parts.pop(job.id), 0.0, self._silence())

    def _fail(
        self, job: Job, part: Set[int], rest: Rest, seconds: float, error: BaseException
    ) -> None:
        self._say(job, error)
        self._go_on(job, part, rest, seconds)

    def _go_on(self, job: Job, failed: Set[int], rest: Rest, seconds: float) -> None:
        try:
            rest(failed, seconds)
        except Exception as error:
            self._refuse(job, seconds, error)

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
    return frozenset(range(positions(job)))


def _record_key(block_hash: bytes) -> bytes:
    return block_hash.ljust(RECORD_KEY_BYTES, b"\0")


STORE_PATIENCE_S: Final = 0.5
"""Seconds without a record after which nobody waits for the shared store; chosen: half of the
second within which an engine should be rid of a dead store."""

Source = tuple[RecordLane, dict[int, bytes], float]  # lane, what to read, seconds allowed


class RecordLanes:
    """The disk's lane and the store's two: a request waits for reads, and none waits for writes."""

    def __init__(
        self,
        disk: Records | None,
        store: Records | None,
        arena: Arena,
        memory: TaskThread,
        watch: AnswerWatch | None,
        release: Callable[[Sequence[int]], None],
        refuse: Callable[[Job, float, Exception], None],
        say: Callable[[Job, BaseException], None],
    ) -> None:
        def lane(name: str, records: Records | None, watch: AnswerWatch) -> RecordLane:
            return RecordLane(name, records, arena, memory, watch, release, refuse, say)

        clock = time.monotonic
        self.disk = lane("disk", disk, watch or AnswerWatch(clock))
        self.store_in = lane("store", store, AnswerWatch(clock, STORE_PATIENCE_S))
        self.store_out = lane("store", store, AnswerWatch(clock, STORE_PATIENCE_S))

    def __iter__(self) -> Iterator[RecordLane]:
        return iter((self.disk, self.store_in, self.store_out))

    def close(self) -> bool:
        """Finish the jobs that were started and close the records. Returns False if a lane hangs,
        whose memory and records must then stay open.
        """
        disk, store_in, store_out = (lane.close() for lane in self)
        ended = ((disk, self.disk.records), (store_in and store_out, self.store_in.records))
        for over, records in ended:
            if over and records is not None:
                records.close()
        return disk and store_in and store_out

    def keep_back(self, copies: Sequence[int]) -> Sequence[int]:
        """Return those of ``copies`` that no job uses; see ``RecordLane``."""
        for lane in self:
            copies = lane.keep_back(copies)
        return copies

    def disown(self) -> None:
        self.disk.disown()
        self.store_out.disown()

    def give_up_on_overdue(self) -> None:
        """Let jobs go on without overdue parts of disk or store; on the engine's thread."""
        for lane in self:
            lane.give_up_on_overdue()

    def write(self, job: Demote | Share, records: Sequence[int], rest: Rest) -> None:
        """Write a job's copies to its tier; ``rest`` gets the positions that failed."""
        lane = self.disk if isinstance(job, Demote) else self.store_out
        lane.use(job, all_of(job), lambda: lane.write_all(job, records), rest)

    def read(self, job: Load, records: Sequence[int], rest: Rest) -> None:
        """Read a load's copies that are not in memory; ``rest`` gets the positions that failed."""
        sources = [
            (self.disk, job.from_disk, math.inf),
            (self.store_in, job.from_store, job.within_s),
        ]
        self._read(job, records, rest, [each for each in sources if each[1]], frozenset(), 0.0)

    def _read(
        self,
        job: Load,
        records: Sequence[int],
        rest: Rest,
        sources: Sequence[Source],
        failed: Set[int],
        before: float,
    ) -> None:
        if not sources:
            rest(failed, before)
            return
        (lane, hashes, within_s), *others = sources
        reads = {at: hashes[at] for at in sorted(hashes)}
        lane.use(
            job,
            reads.keys(),
            lambda: lane.read_all(reads, records, within_s),
            lambda more, seconds: self._read(
                job, records, rest, others, failed | more, before + seconds
            ),
        )


def kept_by(job: Job) -> str:
    shared = isinstance(job, Share) or (isinstance(job, Load) and not job.from_disk)
    return "the store" if shared else "the disk"


_CLOSE_S: Final = 5.0  # seconds to finish when the engine ends; chosen
_MOST_QUEUED: Final = 16  # moves queued on a device before the first is waited for; chosen

OnDone = Callable[[float, Exception | None], None]


class _Order(NamedTuple):
    fence: Fence
    move: Callable[[], None]
    told: OnDone


class TransferLane:
    """Runs moves in order on its own thread: one direction of a worker's transfers.

    Moves are queued on the device at once, so that it goes from one to the next without a gap. Only
    then does the thread sleep until the oldest is done.
    """

    def __init__(self, name: str, device: torch.device, first: bool = False) -> None:
        self._stream = TransferStream(device, first)
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._queued: deque[tuple[Ticket, OnDone]] = deque()
        self._thread = threading.Thread(target=shown(self._run), name=name, daemon=True)
        self._thread.start()

    def put(self, fence: Fence, move: Callable[[], None], told: OnDone) -> None:
        """Run ``move`` after ``fence``; ``told`` is called with the seconds taken and any error, on
        the lane's thread, once nothing of the move is running any more.
        """
        self._orders.put(_Order(fence, move, told))

    def close(self) -> bool:
        """Finish the queued moves; returns False if that takes too long."""
        self._orders.put(None)
        self._thread.join(timeout=_CLOSE_S)
        return not self._thread.is_alive()

    # On the lane's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a device that is gone fails each move by itself
            self._stream.bind_thread()
        while (order := self._next()) is not None:
            self._begin(order)
        while self._queued:
            self._settle()

    def _next(self) -> _Order | None:
        """Return the next order; while there is none, settle what is under way."""
        while self._queued:
            over = _is_over(self._queued[0][0])
            if not over and len(self._queued) < _MOST_QUEUED:
                with contextlib.suppress(Empty):
                    return self._orders.get_nowait()
            self._settle()
        return self._orders.get()

    def _begin(self, order: _Order) -> None:
        try:
            ticket = self._stream.run(order.fence, order.move)
        except Exception as error:
            _tell(order.told, 0.0, error)
        else:
            self._queued.append((ticket, order.told))

    def _settle(self) -> None:
        ticket, told = self._queued.popleft()
        try:
            ticket.wait()
            seconds = ticket.seconds()
        except Exception as error:
            _tell(told, 0.0, error)
        else:
            _tell(told, seconds, None)


def _is_over(ticket: Ticket) -> bool:
    """Tell whether a move need not be waited for; an error is raised where the move is settled."""
    try:
        return ticket.done()
    except Exception:
        return True


def _tell(told: OnDone, seconds: float, error: Exception | None) -> None:
    with contextlib.suppress(Exception):  # the lane goes on, whoever asked for this move
        told(seconds, error)
