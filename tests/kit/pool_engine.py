"""A real block pool and our scheduler side, with a worker that moves names of contents.

``Engine`` does what vLLM's scheduler does with pool and connector. Memory holds, for each block,
what was computed into it; after every step each block in the prefix cache must hold what its hash
says, under the weights of now.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.settings import TierSettings
from kvgraph.hooks.tiers.costs import TransferCosts
from kvgraph.hooks.tiers.jobs import (
    Job,
    JobDone,
    Load,
    Share,
    Spill,
    TierAnswer,
    TierWork,
    WorkerStart,
)
from kvgraph_bench.hotpath import BLOCK_SIZE, dependencies, new_pool, request_maker

BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 8 * 4  # two layers; K and V; one head of 8 floats
STEP_S = 0.05  # what a step takes by the engine's own clock, as a batch does on a GPU

Content = tuple[bytes, int] | None  # whose bytes, under which weights; None: torn or never written


class Worker:
    """Holds contents by copy and by hash, and does its jobs when it is told to."""

    def __init__(self, memory: list[Content], disk_capacity: int) -> None:
        self.memory = memory
        self.disk_capacity = disk_capacity
        self.copies: dict[int, Content] = {}
        self.disk: dict[bytes, Content] = {}
        self.store: dict[bytes, Content] = {}
        self.open: list[Job] = []
        self.done: list[JobDone] = []
        self.finished: set[str] = set()
        self.failed_blocks: set[int] = set()

    def submit(self, work: TierWork) -> None:
        busy = {copy for job in self.open for copy in job.copies}
        assert not busy & set(work.release), "memory of a job under way is given up"
        for copy in work.release:
            self.copies.pop(copy, None)
        for block_hash in work.erase:
            self.disk.pop(block_hash, None)
        self.open += work.jobs

    def finish(self, job: Job, failed: Sequence[int] = ()) -> None:
        if isinstance(job, Load):  # what it overwrites is copied before, on its lane
            for before in [each for each in self.open[: self.open.index(job)] if _is_saved(each)]:
                self.finish(before)
        self.open.remove(job)
        wrong = set(failed)
        for at, copy in enumerate(job.copies):
            if at not in wrong and not self._do(job, at, copy):
                wrong.add(at)
        self.done.append(JobDone(job.id, frozenset(wrong), 1e-3, BLOCK_BYTES))
        if isinstance(job, Load) and job.request is not None:
            self.finished.add(job.request)
            self.failed_blocks |= {job.blocks[at] for at in wrong}

    def _do(self, job: Job, at: int, copy: int) -> bool:
        match job:
            case Spill():
                self.copies[copy] = self.memory[job.blocks[at]]
            case Load():
                if at in job.from_disk:
                    if job.from_disk[at] not in self.disk:
                        return False
                    self.copies[copy] = self.disk[job.from_disk[at]]
                if at in job.from_store:
                    if job.from_store[at] not in self.store:
                        return False
                    self.copies[copy] = self.store[job.from_store[at]]
                if copy not in self.copies:
                    return False
                self.memory[job.blocks[at]] = self.copies[copy]
            case Share():
                self.store[job.hashes[at]] = self.copies[copy]
            case _:
                self.disk[job.hashes[at]] = self.copies[copy]
                assert len(self.disk) <= self.disk_capacity, "the disk must choose a victim itself"
        return True

    def finish_all(self, kind: type[Any] = object, failed: Sequence[int] = ()) -> None:
        for job in [job for job in self.open if isinstance(job, kind)]:
            if job in self.open:
                self.finish(job, failed)


def _is_saved(job: Job) -> bool:
    return isinstance(job, Spill) and job.overwritten


@dataclass(eq=False)
class Turn:
    """A request on its way."""

    request: Any
    state: str = "waiting"  # loading, running, over
    blocks: list[Any] = field(default_factory=list)
    loaded: int = 0  # blocks that a load brought
    hits: int = 0  # blocks that the prefix cache held

    @property
    def computed(self) -> int:
        return len(self.request.block_hashes) - self.hits - self.loaded


class Scheduler:
    """vLLM's scheduler, as far as pool and connector see it, of ``workers`` of which one is there;
    ``started``: all of them have said what they have. Only steps move ``now``, seconds, on, so that
    a run depends on nothing but what is asked.
    """

    def __init__(
        self,
        blocks: int = 17,
        warm: int = 32,
        cold: int = 0,
        workers: int = 1,
        started: bool = True,
        **options: Any,
    ) -> None:
        self.pool = new_pool(blocks)
        self.memory: list[Content] = [None] * blocks
        self.worker = Worker(self.memory, cold)
        self.weights = 0
        self.turns: list[Turn] = []
        self._make, self._numbers = request_maker(), count()
        directory = Path("/nowhere") if cold else None
        settings = TierSettings(warm * BLOCK_BYTES, cold * BLOCK_BYTES, directory, **options)
        self.now = time.monotonic()
        self.side = scheduler_side(self.pool, settings, workers, lambda: self.now, Manager(self))
        self.calls = self.side.calls()
        self.bridge = self.side.bridge
        if started:
            self.hear(TierAnswer(starts=(WorkerStart(warm, cold),) * workers))

    def ask(self, tokens: Sequence[int]) -> Turn:
        turn = Turn(self._make(list(tokens)))
        for note in self.calls.on_new_request:
            note(turn.request)
        self.turns.append(turn)
        return turn

    def step(self) -> None:
        """One engine step; jobs that it gives out are begun, none is done."""
        self.now += STEP_S
        written: list[tuple[Any, bytes]] = []
        for turn in self.turns:
            if turn.state == "waiting":
                self._admit(turn, written)
        work = self.side.step(BLOCK_SIZE * len(written))
        for block, block_hash in written:
            self.memory[block.block_id] = (block_hash, self.weights)
        self.worker.submit(work)
        self.update()

    def update(self) -> None:
        """The step's output arrives."""
        worker = self.worker
        answer, worker.done = TierAnswer(tuple(worker.done)), []
        finished, worker.finished = worker.finished, set()
        failed, worker.failed_blocks = worker.failed_blocks, set()
        for note in (*self.calls.catch_up, *self.calls.step_ended):
            note()
        self.hear(answer, finished)
        for turn in [turn for turn in self.turns if turn.request.request_id in finished]:
            self._loaded(turn, failed)

    def look_up(self, request: Any, cached: int) -> tuple[int | None, bool]:
        """What is found beyond so many cached tokens."""
        found: tuple[int | None, bool] = 0, False
        for catch_up in self.calls.catch_up:
            catch_up()
        for look_up in self.calls.get_num_new_matched_tokens:
            found = look_up(request, cached, found)
        return found

    def hear(self, answer: TierAnswer, received: Collection[str] = ()) -> None:
        """Take what the workers say, and which requests' loads are over."""
        for take in self.calls.answered:
            take(answer, received)

    def drop_copies(self) -> bool:
        """Give up what the colder tiers hold; False while a request waits for some of it."""
        return all([drop() for drop in self.calls.reset_cache])  # noqa: C419

    @property
    def busy(self) -> bool:
        """Whether only another step can report the end of a transfer, or begin one."""
        return any(has_work() for has_work in self.calls.has_pending_push_work)

    def _admit(self, turn: Turn, written: list[tuple[Any, bytes]]) -> None:
        request, hashes = turn.request, turn.request.block_hashes
        if not turn.blocks:
            hits = self._hits(hashes[: (request.num_tokens - 1) // BLOCK_SIZE])
            tokens, _ = self.look_up(request, len(hits) * BLOCK_SIZE)
            if tokens is None:
                return
            assert tokens % BLOCK_SIZE == 0
            assert len(hits) * BLOCK_SIZE + tokens < request.num_tokens, "the last token is ours"
            if not self._allocate(turn, hits, tokens):
                return
            if tokens:
                turn.state, turn.loaded = "loading", tokens // BLOCK_SIZE
                return
        elif not self._allocate(turn, turn.blocks, 0):
            return
        done = turn.hits + turn.loaded
        self.pool.cache_full_blocks(request, turn.blocks, done, len(hashes), BLOCK_SIZE, 0)
        written += [(turn.blocks[at], hashes[at]) for at in range(done, len(hashes))]
        request.num_computed_tokens = request.num_tokens
        turn.state = "running"

    def _hits(self, hashes: Sequence[bytes]) -> list[Any]:
        found: list[Any] = []
        for block_hash in hashes:
            cached = self.pool.get_cached_block(block_hash, [0])
            if cached is None:
                break
            found += cached
        return found

    def _allocate(self, turn: Turn, held: list[Any], to_load: int) -> bool:
        new = to_load // BLOCK_SIZE or -(-turn.request.num_tokens // BLOCK_SIZE) - len(held)
        free_hits = sum(block.ref_cnt == 0 for block in held)
        if new > self.pool.get_num_free_blocks() - free_hits:
            return False
        if not turn.blocks:
            self.pool.touch(held)
            turn.hits = len(held)
        turn.blocks = [*held, *self.pool.get_new_blocks(new)]
        ids = [block.block_id for block in turn.blocks]
        for note in self.calls.update_state_after_alloc:
            note(turn.request, SimpleNamespace(get_block_ids=lambda: (ids,)), to_load)
        return True

    def _loaded(self, turn: Turn, failed: set[int]) -> None:
        if turn.state == "over":  # aborted: its blocks were kept until now
            self._free(turn)
            return
        good = next((at for at, b in enumerate(turn.blocks) if b.block_id in failed), None)
        turn.loaded = (len(turn.blocks) if good is None else good) - turn.hits
        if turn.hits + turn.loaded:
            self.pool.cache_full_blocks(
                turn.request, turn.blocks, turn.hits, turn.hits + turn.loaded, BLOCK_SIZE, 0
            )
        else:
            self.pool.free_blocks(reversed(turn.blocks))
            turn.blocks = []
        turn.state = "waiting"

    def end(self, turn: Turn) -> None:
        """A request finishes, or is aborted in whatever state it is."""
        from vllm.v1.request import RequestStatus

        turn.request.status = RequestStatus.FINISHED_ABORTED
        ids = [block.block_id for block in turn.blocks]
        for note in self.calls.request_finished:
            note(turn.request, (ids,))
        loading, turn.state = turn.state == "loading", "over"
        if not loading:
            self._free(turn)

    def _free(self, turn: Turn) -> None:
        self.pool.free_blocks(reversed(turn.blocks))
        self.turns.remove(turn)

    def preempt(self, turn: Turn) -> None:
        self.pool.free_blocks(reversed(turn.blocks))
        turn.blocks, turn.state, turn.loaded, turn.hits = [], "waiting", 0, 0
        turn.request.num_computed_tokens = 0


class Engine(Scheduler):
    """A scheduler whose every step is checked, and what a test asks of it."""

    def update(self) -> None:
        super().update()
        self.check()

    @property
    def events(self) -> list[Any]:
        """What the sidecar would have heard."""
        return list(self.side.client.outbox)

    @property
    def counts(self) -> Any:
        self.side.index.catch_up()
        return self.bridge.ledger.counts

    @property
    def directory(self) -> Any:
        return self.bridge.ledger.directory

    def advise(self, wanted: Sequence[int] = (), **keys: Sequence[int]) -> None:
        """A ranking and suggestions that stay young."""
        names = ("order", "protected", "spill_first", "demote_first")
        columns = [np.array(list(keys.get(name, ())), dtype=np.uint64) for name in names]
        self.side.client.hold_ranking(EvictionRanking(1, self.now + 1e6, *columns))
        self.want(wanted)

    def want(self, wanted: Sequence[int]) -> None:
        """A sidecar would have these blocks back."""
        self.side.client.hold_wanted(np.array(list(wanted), dtype=np.uint64))

    def keys_of(self, tokens: Sequence[int]) -> list[int]:
        """What a prompt's full blocks will be called."""
        return [key_of(block_hash) for block_hash in self.hashes_of(tokens)]

    def hashes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """What vLLM will call them."""
        hashes: list[bytes] = self._make(list(tokens)).block_hashes
        return hashes

    def serve(self, tokens: Sequence[int]) -> Turn:
        """A request from its arrival to its end; what it needs is loaded at once."""
        turn = self.ask(tokens)
        self.finish_loading(turn)
        self.end(turn)
        self.settle()
        return turn

    def finish_whole(self, *turns: Turn) -> None:
        """They end, and nothing is held any more."""
        for turn in turns:
            self.end(turn)
        self.settle()
        self.check_whole()

    def finish_loading(self, turn: Turn) -> None:
        for _ in range(50):
            self.step()
            if turn.state == "running":
                return
            self.worker.finish_all()
        raise AssertionError("the request hangs")

    def settle(self) -> None:
        for _ in range(50):
            self.step()
            if not self.busy and not self.worker.open:
                return
            self.worker.finish_all()
        raise AssertionError("the workers are never done")

    def push_out(self) -> None:
        """Other requests take the whole pool."""
        for _ in range(self.pool.num_gpu_blocks // 4 + 1):
            self.serve(prompt(4, 10_000 + next(self._numbers)))

    def reset(self) -> bool:
        done = bool(self.pool.reset_prefix_cache())
        self.weights += done
        return done

    def check(self) -> None:
        self.directory.check_integrity()
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == self.pool.get_num_free_blocks() == len({b.block_id for b in free})
        held = Counter(b.block_id for turn in self.turns for b in turn.blocks)
        for block in self.pool.blocks[1:]:
            if block.block_hash is not None:
                holds = self.memory[block.block_id]
                assert holds == (block.block_hash[:-4], self.weights), "a wrong block is matched"
            assert block.ref_cnt >= held[block.block_id]
        if not self.side.tap.was_reset:
            for block_hash in self.directory.warm_hashes():
                copy = self.directory.warm(block_hash)
                assert self.worker.copies[copy.id] == (block_hash, self.weights)
            for block_hash in self.directory.cold_hashes():
                assert self.worker.disk.get(block_hash) in (None, (block_hash, self.weights))

    def check_whole(self) -> None:
        """Nothing is held any more: the pool can be reset."""
        assert not self.turns
        assert all(block.ref_cnt == 0 for block in self.pool.blocks[1:])
        assert self.reset()


class Manager:
    """vLLM's table of which request has which blocks."""

    def __init__(self, engine: Scheduler) -> None:
        self._engine = engine
        self.coordinator = SimpleNamespace(single_type_managers=(self,))

    @property
    def req_to_blocks(self) -> dict[str, list[Any]]:
        return {turn.request.request_id: turn.blocks for turn in self._engine.turns}

    def free(self, request: Any) -> None:
        (turn,) = (turn for turn in self._engine.turns if turn.request is request)
        self._engine.preempt(turn)


class NoCosts(TransferCosts):
    """Loads are always worth it: what moves here has no size."""

    def worth_loading(
        self, tokens: int, warm_bytes: int, cold_bytes: int, store_bytes: int = 0
    ) -> bool:
        return True

    def worth_asking(self, tokens: int) -> bool:
        return tokens > 0


def scheduler_side(
    pool: Any, settings: TierSettings, workers: int, clock: Callable[[], float], manager: Any
) -> Any:
    from kvgraph.hooks.vllm.scheduler import SchedulerSide
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    init_none_hash(sha256)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=8, policy="fcfs"),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=workers
        ),
        model_config=SimpleNamespace(served_model_name="model", model="model"),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        speculative_config="drafts, so that there is no recall",
    )
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
    kv_cache = SimpleNamespace(kv_cache_groups=[group])
    costs = dependencies(clock, costs=NoCosts)
    return SchedulerSide(config, kv_cache, pool, costs, settings, manager)


def prompt(blocks: int, seed: int, extra: int = 1) -> list[int]:
    """Tokens of whole blocks that are this seed's own, and some more."""
    return [seed * 1000 + at for at in range(blocks * BLOCK_SIZE + extra)]


def picture(identifier: str, offset: int = 2) -> Any:
    """A picture in a prompt, as vLLM's request has it."""
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def counted_walks(pool: Any) -> list[int]:
    """Numbers of the blocks that anybody looks at in the queue from now on."""
    looked: list[int] = []
    walk = pool.free_block_queue.iter_blocks_after

    def counting(cursor: object) -> Iterator[Any]:
        for block in walk(cursor):
            looked.append(block.block_id)
            yield block

    pool.free_block_queue.iter_blocks_after = counting
    return looked


def keys(turn: Turn) -> list[int]:
    return [key_of(block_hash) for block_hash in turn.request.block_hashes]


def parked(engine: Engine, blocks: int = 4, seed: int = 1) -> Turn:
    """A turn whose blocks left the pool, copied."""
    turn = engine.serve(prompt(blocks, seed))
    engine.push_out()
    return turn
