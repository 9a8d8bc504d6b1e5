"""What a model does with a scheduler's output, on paper: it reads, writes, samples, and checks.

The orders are vLLM's own ``SchedulerOutput``; so are the block tables that are followed, and the
outputs that go back, aggregated over workers by vLLM's ``KVOutputAggregator``.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

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

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request

Notes = npt.NDArray[np.uint64]  # what stands at each position of a block, or of several

LANES: Final = 3
LOADS, SPILLS, DISK = range(LANES)  # lanes of a worker

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
    """A job on its lane, due after ``forwards``; ``unread``: positions that the disk refused."""

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
    first, and may be given up there, as where a disk hangs: it goes on without what is on disk.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        warm: int = 0,
        cold: int = 0,
        disk: Mapping[bytes, Notes] = MappingProxyType({}),
    ) -> None:
        # notes by block and position, shape (blocks, block size)
        self.memory: Notes = np.full((blocks, block_size), TORN)
        self.copies: dict[int, Notes] = {}
        self.disk = dict(disk)
        self.disowned = False  # whether a later process may not find what the disk holds
        self.forwards = 0  # batches that were computed so far
        # positions of a job that are to fail, torn
        self.failing: Callable[[Job], Collection[int]] = _no_failure
        # whether what a load reads from disk is given up at once, as where that is overdue
        self.gives_up: Callable[[Job], bool] = _never
        # what the scheduler has not heard yet
        self.answers = Answers(WorkerStart(warm, cold, tuple(disk)))
        self._halves = (slice(0, block_size // 2), slice(block_size // 2, block_size))
        self._lanes: Sequence[deque[_Move | bytes]] = [deque() for _ in range(LANES)]

    @property
    def busy(self) -> bool:
        return any(self._lanes)

    def submit(self, work: TierWork, forwards: int) -> None:
        """Take a step's orders; none is begun before ``forwards`` batches were computed."""
        under_way = {copy for move in self._moves() for copy in move.job.copies}
        assert not under_way & set(work.release), "memory of a job under way is given up"
        for each in work.release:
            self.copies.pop(each, None)
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
        for lane in range(len(self._lanes)):
            while self.advance(lane):
                pass

    def _moves(self) -> list[_Move]:
        return [each for lane in self._lanes for each in lane if isinstance(each, _Move)]

    def _advance_disk(self, queue: deque[_Move | bytes], head: _Move) -> None:
        """Read or write the next half; what was read goes on by the loads' lane."""
        job, over = head.job, False
        if isinstance(job, Load) and not head.halves and self.gives_up(job):
            head.failed.update(job.from_disk)
            over = True
        else:
            self._do_half(head, self._read if isinstance(job, Load) else self._write)
        if over or head.halves == 2:
            queue.popleft()
            if isinstance(job, Load):
                unread = frozenset(head.failed)
                self._lanes[LOADS].append(_Move(job, head.forwards, unread=unread))
            else:
                self._finish(head)

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
        job, copy = move.job, move.job.copies[at]
        if isinstance(job, Spill):
            self._record(copy)[part] = self.memory[job.blocks[at], part]
        elif isinstance(job, Load):
            if copy not in self.copies:
                return False
            self.memory[job.blocks[at], part] = self.copies[copy][part]
        return True

    def _write(self, move: _Move, at: int, part: slice) -> bool:
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


VOCABULARY: Final = 200
_RIGHT_DRAFTS: Final = 0.7  # share of draft tokens that the model would have said


class WrongReadError(AssertionError):
    """A position held something else than its request's own tokens under the weights of now."""


@dataclass
class Text:
    seed: int  # follows from weights, salt and adapter
    tokens: list[int]
    prompt: int  # of them are the prompt's
    blocks: list[list[int]]  # by group
    _notes: list[int] = field(default_factory=list)

    def notes(self, end: int) -> list[int]:
        """What the positions before ``end`` hold once they are computed."""
        notes = self._notes
        while len(notes) < end:
            notes.append(noted(notes[-1] if notes else self.seed, self.tokens[len(notes)]))
        return notes[:end]

    def cut(self, length: int) -> None:
        """Forget tokens that the scheduler did not take."""
        del self.tokens[length:], self._notes[length:]

    def next_token(self) -> int:
        """What the model says after the last token."""
        return (self.notes(len(self.tokens))[-1] >> 20) % VOCABULARY


@dataclass
class Batch:
    order: SchedulerOutput
    seeds: dict[str, int]  # of requests that are new to the workers
    connector_outputs: list[KVConnectorOutput | None]
    result: ModelRunnerOutput | None = None


class PaperModel:
    """Computes batches on all workers, in the order in which they were dispatched."""

    def __init__(
        self,
        workers: list[PaperWorker],
        rng: random.Random,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.workers = workers
        self._windows = windows
        self.positions_read = 0  # positions whose notes were compared
        self._rng = rng
        self._texts: dict[str, Text] = {}
        self._block_size = workers[0].memory.shape[1]

    def run(self, batch: Batch) -> None:
        self._learn(batch)
        order = batch.order
        tokens = {name: self._compute(name, order) for name in order.num_scheduled_tokens}
        batch.result = runner_output(tokens)
        for worker in self.workers:
            worker.forwards += 1

    def drafts(self, names: list[str], count: int) -> list[list[int]]:
        return [self._drafts(self._texts[name], count) for name in names]

    def _learn(self, batch: Batch) -> None:
        order = batch.order
        for name in order.finished_req_ids:
            self._texts.pop(name, None)
        for new in order.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids or ())
            seed, prompt = batch.seeds[new.req_id], len(new.prompt_token_ids or ())
            self._texts[new.req_id] = Text(
                seed, tokens, prompt, [list(each) for each in new.block_ids]
            )
        cached = order.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            text, more = self._texts[name], cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids[name])
                assert more is not None
                text = Text(batch.seeds[name], tokens, text.prompt, [list(each) for each in more])
                self._texts[name] = text
            elif more is not None:
                for held, added in zip(text.blocks, more, strict=True):
                    held += added
            text.cut(text.prompt + cached.num_output_tokens[at])

    def _compute(self, name: str, order: SchedulerOutput) -> list[int]:
        text, count = self._texts[name], order.num_scheduled_tokens[name]
        drafts = list(order.scheduled_spec_decode_tokens.get(name, ()))
        if -1 in drafts:  # asynchronous scheduling: the worker has them
            drafts = self._drafts(text, len(drafts))
        real = count - len(drafts)
        # A step that was scheduled before drafts were rejected counts from too far on.
        start = min(_computed(name, order), len(text.tokens) - real)
        self.read(name, text, start)
        end = start + real
        notes = text.notes(end)[start:]
        for token in drafts:
            notes.append(noted(notes[-1], token))
        self.write(text, start, notes)
        return self._sample(text, drafts) if end == len(text.tokens) else []

    def read(self, name: str, text: Text, end: int) -> None:
        """Compare what stands at the positions before ``end``."""
        expected = np.array(text.notes(end), dtype=np.uint64)
        for group, window in enumerate(self._windows):
            start = 0 if window is None else max(0, end - window + 1)
            if start < end and window != 0:
                self._compare(name, text.blocks[group], expected[start:] ^ _mark(group), start)
                self.positions_read += end - start

    def _compare(self, name: str, blocks: list[int], expected: Notes, start: int) -> None:
        places = np.arange(start, start + len(expected))
        held = np.array(blocks)[places // self._block_size]
        for number, worker in enumerate(self.workers):
            found: Notes = worker.memory[held, places % self._block_size]
            if not np.array_equal(found, expected):
                first = int(np.argmax(found != expected))
                raise WrongReadError(
                    f"{name} reads {int((found != expected).sum())} of {len(found)} positions "
                    f"wrong on worker {number}, the first at {start + first} in block {held[first]}"
                )

    def write(self, text: Text, start: int, notes: list[int]) -> None:
        places = np.arange(start, start + len(notes))
        for group, window in enumerate(self._windows):
            if window == 0:
                continue
            blocks = np.array(text.blocks[group])[places // self._block_size]
            content = np.array(notes, dtype=np.uint64) ^ _mark(group)
            for worker in self.workers:
                worker.memory[blocks, places % self._block_size] = content

    def _sample(self, text: Text, drafts: list[int]) -> list[int]:
        said = [text.next_token()]
        text.tokens.append(said[0])
        for draft in drafts:
            if draft != said[-1]:
                break
            said.append(text.next_token())
            text.tokens.append(said[-1])
        return said

    def _drafts(self, text: Text, count: int) -> list[int]:
        notes, drafts = list(text.notes(len(text.tokens))), list[int]()
        guess = Text(text.seed, list(text.tokens), text.prompt, [], notes)
        for _ in range(count):
            right = self._rng.random() < _RIGHT_DRAFTS
            drafts.append(guess.next_token() if right else self._rng.randrange(VOCABULARY))
            guess.tokens.append(drafts[-1])
        return drafts


def _mark(group: int) -> np.uint64:
    """What tells one group's notes of a position from another's; an even number."""
    return np.uint64(group << 50)


def seed_of(request: Request, weights: int, training: int = 0) -> int:
    """What stands before a request's first position: weights, salt, adapter, images."""
    lora = request.lora_request
    adapter = f"{lora.lora_name} {training}" if lora else ""
    images = [feature.identifier for feature in request.mm_features or ()]
    text = f"{weights} {request.cache_salt} {adapter} {images}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") * 2


def aggregated(batch: Batch, aggregator: Any) -> ModelRunnerOutput:
    """A batch's result with what all workers' connectors have to say."""
    assert batch.result is not None
    outputs = []
    for said in batch.connector_outputs:
        output = copy(batch.result)
        output.kv_connector_output = said
        outputs.append(output)
    if aggregator is None:
        return outputs[0]
    result: ModelRunnerOutput = aggregator.aggregate(outputs)
    return result


def runner_output(tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(tokens)
    places = {name: at for at, name in enumerate(names)}
    return ModelRunnerOutput(names, places, [tokens[name] for name in names])


def _computed(name: str, order: SchedulerOutput) -> int:
    for new in order.scheduled_new_reqs:
        if new.req_id == name:
            return int(new.num_computed_tokens)
    cached = order.scheduled_cached_reqs
    return int(cached.num_computed_tokens[cached.req_ids.index(name)])
