"""A worker's records that are not in memory: on its disk, and in the shared store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Final

from ....kernels.store.arena import Arena
from ..jobs import Demote, Job, Load, Share
from .answer_watch import AnswerWatch
from .record_lane import RecordLane, Records, Rest
from .task_thread import TaskThread

STORE_PATIENCE_S: Final = 0.5
"""Seconds without a record after which nobody waits for the shared store; chosen: half of the
second in which an engine shall be rid of one that died."""

Source = tuple[RecordLane, dict[int, bytes], float]  # what is read of it, and within which time


class RecordLanes:
    """The disk's lane, and two of the store: for it is read by who waits, and written by nobody.

    Args:
        disk: The disk tier, if there is one.
        store: The shared store's records of this worker's shard, if there is one.
        arena, memory, release, refuse: See ``RecordLane``.
        watch: Whether the disk still answers.

    Attributes:
        disk, store_in, store_out: The lanes; the latter two read the store and write to it.
    """

    def __init__(
        self,
        disk: Records | None,
        store: Records | None,
        arena: Arena,
        memory: TaskThread,
        watch: AnswerWatch | None,
        release: Callable[[Sequence[int]], None],
        refuse: Callable[[Job, float, Exception], None],
    ) -> None:
        def lane(name: str, records: Records | None, watch: AnswerWatch) -> RecordLane:
            return RecordLane(name, records, arena, memory, watch, release, refuse)

        clock = time.monotonic
        self.disk = lane("disk", disk, watch or AnswerWatch(clock))
        self.store_in = lane("store", store, AnswerWatch(clock, STORE_PATIENCE_S))
        self.store_out = lane("store", store, AnswerWatch(clock, STORE_PATIENCE_S))

    def __iter__(self) -> Iterator[RecordLane]:
        return iter((self.disk, self.store_in, self.store_out))

    def close(self) -> bool:
        """Finish what was begun and close what keeps the records; False if a lane hangs: what it
        uses stays open."""
        disk, store_in, store_out = (lane.close() for lane in self)
        ended = ((disk, self.disk.records), (store_in and store_out, self.store_in.records))
        for over, records in ended:
            if over and records is not None:
                records.close()
        return disk and store_in and store_out

    def keep_back(self, copies: Sequence[int]) -> Sequence[int]:
        """Of copies that are released, those that no job uses; see ``RecordLane``."""
        for lane in self:
            copies = lane.keep_back(copies)
        return copies

    def disown(self) -> None:
        """Keep other processes from finding what is written from here on."""
        self.disk.disown()
        self.store_out.disown()

    def give_up_on_overdue(self) -> None:
        """Refuse jobs that disk or store has not answered for too long; on the engine's thread."""
        for lane in self:
            lane.give_up_on_overdue()

    def write(self, job: Demote | Share, records: Sequence[int], rest: Rest) -> None:
        """Write a job's copies to where it says; ``rest`` hears which were not taken."""
        lane = self.disk if isinstance(job, Demote) else self.store_out
        lane.use(job, lambda: lane.write_all(job, records), rest)

    def read(self, job: Load, records: Sequence[int], rest: Rest) -> None:
        """Read what a load's copies are not in memory of; ``rest`` hears which failed."""
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
        """Read from one source after the other."""
        if not sources:
            rest(failed, before)
            return
        (lane, hashes, within_s), *others = sources
        reads = {at: hashes[at] for at in sorted(hashes)}
        lane.use(
            job,
            lambda: lane.read_all(reads, records, within_s),
            lambda more, seconds: self._read(
                job, records, rest, others, failed | more, before + seconds
            ),
        )


def kept_by(job: Job) -> str:
    """Where the records of a job are."""
    shared = isinstance(job, Share) or (isinstance(job, Load) and not job.from_disk)
    return "the store" if shared else "the disk"
