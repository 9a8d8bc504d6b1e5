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
from kvgraph.hooks.tiers.jobs import (
    Answers,
    Demote,
    Job,
    Load,
    Spill,
    TierWork,
    WorkerStart,
    positions,
)

Notes = npt.NDArray[np.uint64]  # what stands at each position of a block, or of several

LANES: Final = 3
LOADS, SPILLS, DISK = range(LANES)
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
    """A job on its lane; ``forwards`` must have run before it moves blocks of the engine.

    ``unread`` are a load's positions that its disk refused.
    """

    job: Job
    forwards: int
    halves: int = 0
    unread: frozenset[int] = frozenset()
    failed: set[int] = field(default_factory=set)
    records: dict[int, Notes] = field(default_factory=dict)  # a demotion's, until they are whole


def _never(job: Job) -> bool:
    return False


def _lane(job: Job) -> int:
    """Which lane a job takes first."""
    match job:
        case Spill(overwritten=True):
            return LOADS
        case Spill():
            return SPILLS
        case Load(from_disk=reads) if not reads:
            return LOADS
    return DISK


class PaperWorker:
    """One worker's shard: memory, copies, a disk, and lanes that move blocks between them.

    As a real worker's, they are apart: loads, what the disk does, and spills, of which those of
    blocks that a load overwrites are on the loads' lane. A load of what is on disk is read there
    first, and may be given up there, as where a disk hangs: what it overwrites is copied later.

    Attributes:
        memory: Notes by block and position, shape (blocks, block size).
        forwards: Batches that were computed so far.
        failing: Positions of a job that are to fail, torn.
        gives_up: Whether a load that is read from disk is refused at once, as one that is overdue.
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
        self.gives_up: Callable[[Job], bool] = _never
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
        for job in work.jobs:
            self._lanes[_lane(job)].append(_Move(job, forwards))

    def advance(self, lane: int) -> bool:
        """Do the next half of what leads a lane; whether there was anything that can begin."""
        queue = self._lanes[lane]
        if not queue:
            return False
        head = queue[0]
        if isinstance(head, bytes):
            self.disk.pop(head, None)
            queue.popleft()
        elif lane == DISK:
            self._advance_disk(queue, head)
        elif head.forwards > self.forwards:
            return False
        else:
            self._do_half(head, self._copy)
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

    def _advance_disk(self, queue: deque[_Move | bytes], head: _Move) -> None:
        """Read or write the next half; what was read goes on by the loads' lane."""
        job, reads = head.job, isinstance(head.job, Load)
        given_up = reads and not head.halves and self.gives_up(job)
        if given_up:
            head.failed.update(range(positions(job)))
        else:
            self._do_half(head, self._read if reads else self._write)
        if given_up or head.halves == 2:
            queue.popleft()
            if given_up or not reads:
                self._finish(head)
            else:
                unread = frozenset(head.failed)
                self._lanes[LOADS].append(_Move(job, head.forwards, unread=unread))

    def _do_half(self, move: _Move, do: Callable[[_Move, int, slice], bool]) -> None:
        if not move.halves:
            move.failed.update(move.unread or self.failing(move.job))
        part = self._halves[move.halves]
        for at in range(len(move.job.copies)):
            if at in move.unread or (move.halves and at in move.failed):
                continue  # torn: its first half moved, the second never does
            if not do(move, at, part):
                move.failed.add(at)
        if move.halves and isinstance(move.job, Load) and do == self._copy:
            self._splice(move.job)
        move.halves += 1

    def _copy(self, move: _Move, at: int, part: slice) -> bool:
        """Copy a half between the engine's memory and a copy."""
        job, copy = move.job, move.job.copies[at]
        if isinstance(job, Spill):
            self._record(copy)[part] = self.memory[job.blocks[at], part]
        elif isinstance(job, Load):
            if copy not in self.copies:
                return False
            self.memory[job.blocks[at], part] = self.copies[copy][part]
        return True

    def _write(self, move: _Move, at: int, part: slice) -> bool:
        """Write a half of a copy to the disk."""
        record = move.records.setdefault(at, np.full_like(self.memory[0], TORN))
        record[part] = self.copies[move.job.copies[at]][part]
        return True

    def _read(self, move: _Move, at: int, part: slice) -> bool:
        """Read a half of what a load's copy is not in memory of."""
        job = move.job
        assert isinstance(job, Load)
        if at not in job.from_disk:
            return True
        record = self.disk.get(job.from_disk[at])
        if record is None:
            return False
        self._record(job.copies[at])[part] = record[part]
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

    def _finish(self, move: _Move) -> None:
        job = move.job
        if isinstance(job, Demote):
            whole = [at for at in range(len(job.copies)) if at not in move.failed]
            self.disk.update((job.hashes[at], move.records[at]) for at in whole)
        moved = (positions(job) - len(move.failed)) * BLOCK_BYTES
        self.answers.report(job, frozenset(move.failed), 1e-3, moved)
