"""A worker's memory and tiers, without a model: it notes what stands at each position.

A note follows from the weights, the salt and every token up to its position, so whoever reads
another's bytes, those of old weights, or half of a copy, is found out. Blocks are copied in two
halves, at times that the caller chooses, and answered late, as a real worker does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from ...hooks.tiers.answers import Answers
from ...hooks.tiers.jobs import Demote, Job, Load, Spill, TierWork, WorkerStart

Notes = npt.NDArray[np.uint64]  # what stands at each position of a block, or of several

LOADS, SPILLS, DISK = range(LANES := 3)
"""Lanes of a worker."""

TORN: Final = np.uint64(1)  # stands nowhere else: whatever is computed is even
BLOCK_BYTES: Final = 4096  # that a paper block pretends to have, for budgets
_MASK: Final = (1 << 64) - 2


def noted(before: int, token: int) -> int:
    """What computing ``token`` leaves at its position, behind one that holds ``before``."""
    return ((before ^ (before >> 29)) * 0x9E3779B97F4A7C15 + 2 * token + 2) & _MASK


def _no_failure(job: Job) -> Collection[int]:
    return ()


@dataclass(slots=True)
class _Move:
    """A job on its lane; ``forwards`` must have run before it begins."""

    job: Job
    forwards: int
    halves: int = 0
    failed: set[int] = field(default_factory=set)
    records: dict[int, Notes] = field(default_factory=dict)  # a demotion's, until they are whole


def _lane(jobs: Sequence[Job]) -> int:
    """Which lane the first of ``jobs`` takes."""
    match jobs[0]:
        case Spill(overwritten=True):
            return _lane(jobs[1:])  # the next is the load
        case Spill():
            return SPILLS
        case Load(from_disk=reads) if not reads:
            return LOADS
    return DISK


class PaperWorker:
    """One worker's shard: memory, copies, a disk, and lanes that move blocks between them.

    As a real worker's, they are apart: loads, what the disk does, and spills, of which those of
    blocks that a load overwrites are on that load's lane.

    Attributes:
        memory: Notes by block and position, shape (blocks, block size).
        forwards: Batches that were computed so far.
        failing: Positions of a job that are to fail, torn.
        disowned: Whether a later process may not find what the disk holds.
        answers: What the scheduler has not heard yet.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        warm: int = 0,
        cold: int = 0,
        disk: Mapping[bytes, Notes] = MappingProxyType({}),
    ) -> None:
        self.memory: Notes = np.full((blocks, block_size), TORN)
        self.copies: dict[int, Notes] = {}
        self.disk = dict(disk)
        self.disowned = False
        self.forwards = 0
        self.failing: Callable[[Job], Collection[int]] = _no_failure
        self.answers = Answers(WorkerStart(warm, cold, tuple(disk)))
        self._halves = (slice(0, block_size // 2), slice(block_size // 2, block_size))
        self._lanes: Sequence[deque[_Move | bytes]] = [deque() for _ in range(LANES)]

    @property
    def busy(self) -> bool:
        """Whether jobs are under way."""
        return any(self._lanes)

    def submit(self, work: TierWork, forwards: int) -> None:
        """Take a step's orders; none is begun before ``forwards`` batches were computed."""
        under_way = {copy for move in self._moves() for copy in move.job.copies}
        assert not under_way & set(work.release), "memory of a job under way is given up"
        for copy in work.release:
            self.copies.pop(copy, None)
        self.disowned |= work.disown
        self._lanes[DISK].extend(work.erase)
        for at, job in enumerate(work.jobs):
            self._lanes[_lane(work.jobs[at:])].append(_Move(job, forwards))

    def advance(self, lane: int) -> bool:
        """Do the next half of what leads a lane; whether there was anything that can begin."""
        queue = self._lanes[lane]
        if not queue:
            return False
        head = queue[0]
        if isinstance(head, bytes):
            self.disk.pop(head, None)
            queue.popleft()
        elif head.forwards > self.forwards:
            return False
        else:
            self._do_half(head)
            if head.halves == 2:
                queue.popleft()
                self._finish(head)
        return True

    def leading(self, lane: int) -> int | None:
        """How many copies the job has that leads a lane; None without one."""
        head = self._lanes[lane][0] if self._lanes[lane] else None
        return len(head.job.copies) if isinstance(head, _Move) else None

    def finish_all(self) -> None:
        """Do whatever can be done."""
        for lane in range(len(self._lanes)):
            while self.advance(lane):
                pass

    def _moves(self) -> list[_Move]:
        return [each for lane in self._lanes for each in lane if isinstance(each, _Move)]

    def _do_half(self, move: _Move) -> None:
        if not move.halves:
            move.failed.update(self.failing(move.job))
        part = self._halves[move.halves]
        for at, copy in enumerate(move.job.copies):
            if move.halves and at in move.failed:
                continue  # torn: its first half moved, the second never does
            if not self._copy(move, at, copy, part):
                move.failed.add(at)
        if move.halves and isinstance(move.job, Load):
            self._splice(move.job)
        move.halves += 1

    def _copy(self, move: _Move, at: int, copy: int, part: slice) -> bool:
        match move.job:
            case Spill() as job:
                self._record(copy)[part] = self.memory[job.blocks[at], part]
            case Load() as job:
                if at in job.from_disk and not self._read(copy, job.from_disk[at], part):
                    return False
                if copy not in self.copies:
                    return False
                self.memory[job.blocks[at], part] = self.copies[copy][part]
            case Demote():
                record = move.records.setdefault(at, np.full_like(self.memory[0], TORN))
                record[part] = self.copies[copy][part]
        return True

    def _splice(self, job: Load) -> None:
        """Bring tokens to other positions; each keeps the note of where it was computed."""
        size = self.memory.shape[1]
        for run in job.runs:
            block, at = divmod(run.slot, size)
            record = self.copies[run.copy]
            self.memory[block, at : at + run.tokens] = record[run.first : run.first + run.tokens]

    def _record(self, copy: int) -> Notes:
        return self.copies.setdefault(copy, np.full_like(self.memory[0], TORN))

    def _read(self, copy: int, block_hash: bytes, part: slice) -> bool:
        record = self.disk.get(block_hash)
        if record is None:
            return False
        self._record(copy)[part] = record[part]
        return True

    def _finish(self, move: _Move) -> None:
        job = move.job
        if isinstance(job, Demote):
            whole = [at for at in range(len(job.copies)) if at not in move.failed]
            self.disk.update((job.hashes[at], move.records[at]) for at in whole)
        moved = (len(job.copies) - len(move.failed)) * BLOCK_BYTES
        self.answers.report(job, frozenset(move.failed), 1e-3, moved)
