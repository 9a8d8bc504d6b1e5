"""What an engine pays: reading advice, applying it, and being observed.

Block pool, requests and connector are the real ones; only the model is missing. The client's thread
does not run here, since it works beside the engine: what it computes is a figure of its own.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from kvgraph.graph.types import Keys, as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import pack_hashes, unpack
from kvgraph.hooks.link.client import AdvisorClient, EngineEnd
from kvgraph.hooks.link.mailbox import looked_up
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.index import BlockIndex

from .figures import Figures
from .paper.quiet import only_errors

PARTS: Final = ("all", "pool", "client", "steps")
BLOCK_SIZE: Final = 16
POOL_BLOCKS: Final = 8192
LAYERS: Final = 32
RUNNING: Final = 32  # requests in the decode batch
PROMPT_TOKENS: Final = 1024
SHARED_TOKENS: Final = 768  # of every prompt, cached since the first
OUTPUT_TOKENS: Final = 256  # each request ends after so many steps and another takes its place
POOL_DECODING: Final = 4096
STEPS: Final = 128
STEP: Final = SimpleNamespace(total_num_scheduled_tokens=RUNNING)  # of a scheduler's output
REPEATS: Final = 15
ROUNDS: Final = 80  # of the observed and the stock loop in turn, so that drift hits both alike


@only_errors()
def run(progress: bool = False, part: str = "all") -> Figures:
    """Measure reading, applying, observing, and steps at production size (``steps/``)."""
    from .steps.scheduler_steps import (
        add_client,  # which are built of what stands here
        add_scheduler_steps,
    )
    from .steps.step_figures import add_steps

    figures = Figures("hotpath")
    say = _say if progress else _silent
    if part in ("all", "pool"):
        for measure in (_measure_read, _measure_apply, _measure_observe, _measure_tiers):
            say(measure.__doc__ or "")
            measure(figures)
        add_steps(figures, say)
    if part in ("all", "client"):
        add_client(figures, say)
    if part in ("all", "steps"):
        add_scheduler_steps(figures, say)
    return figures


def _measure_read(figures: Figures) -> None:
    """Reading the latest ranking, as the engine does each step."""
    client = AdvisorClient("ipc:///nowhere", _no_engine())
    client.hold_ranking(a_ranking(np.arange(4096, dtype=np.uint64)))
    samples = [_per_call(client.ranking, 50_000) * 1e9 for _ in range(REPEATS)]
    figures.add("read_ns", samples, "ns", "≤ 250")


def _measure_apply(figures: Figures) -> None:
    """Applying new rankings to a real pool of 8,192 free cached blocks."""
    pool, keys, index = cached_pool(POOL_BLOCKS)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=768)
    shuffled, samples = np.random.default_rng(7), []
    for epoch in range(1, 4 * REPEATS):
        order = shuffled.permutation(keys)
        ranking = a_ranking(order[512:], epoch, protected=order[:512])
        ranking = looked_up(ranking, index.holders)  # as the client's thread does
        samples.append(apply_us_per_block(arranger, ranking))
    figures.add("apply_us_per_block", samples, "us", "≤ 1")


def apply_us_per_block(arranger: FreeQueueArranger, ranking: EvictionRanking) -> float:
    """Microseconds for each block that a new ranking moves, in all the steps that this takes."""
    before, start = arranger.moved, time.thread_time()
    moved = -1
    while moved != arranger.moved:
        moved = arranger.moved
        arranger.step(ranking)
    return (time.thread_time() - start) / max(1, moved - before) * 1e6


def _measure_observe(figures: Figures) -> None:
    """A decode step of 32 requests under pressure, observed and not."""
    from vllm import envs

    envs.enable_envs_cache()  # as vLLM's engine core does once it is up
    observed = DecodeLoop(new_pool(POOL_DECODING), connected)
    differences = _in_turn(observed, DecodeLoop(new_pool(POOL_DECODING)))
    figures.add("observe_us_per_step", differences, "us", "≤ 20")


def _measure_tiers(figures: Figures) -> None:
    """The same steps with tiers, beside observing alone: every block that goes is copied first."""
    tiered = DecodeLoop(new_pool(POOL_DECODING), tiered_connector)
    observed = DecodeLoop(new_pool(POOL_DECODING), connected)
    figures.add("tiers_us_per_step", _in_turn(tiered, observed), "us")


def _in_turn(loop: DecodeLoop, other: DecodeLoop) -> list[float]:
    """Microseconds a step that ``loop`` takes beyond ``other``."""
    gc.collect()
    gc.freeze()  # so does the engine core: its start-up heap is no garbage to look through
    rounds = [(loop.run(STEPS), other.run(STEPS)) for _ in range(ROUNDS)]
    gc.unfreeze()
    return [(one - two) * 1e6 for one, two in rounds]


class DecodeLoop:
    """A scheduler's dealings with its block pool and connector, without a model."""

    def __init__(self, pool: Any, connect: Callable[[Any], Any] | None = None) -> None:
        self.pool = pool
        self.connector = connect(pool) if connect is not None else None
        self._make_request, self._numbers = request_maker(), itertools.count()
        self._running: list[tuple[Any, list[Any]]] = []
        self._shared: list[Any] = []  # the cached start of every prompt
        while len(self._running) < RUNNING:
            self._start()
            # Staggered, as in a server: not all reach a block's end in the same step.
            self._decode(self._running[-1], len(self._running) * OUTPUT_TOKENS // RUNNING)
        self.run(8 * OUTPUT_TOKENS)  # until the pool is full and every new block evicts one

    def run(self, steps: int) -> float:
        """Seconds a step."""
        start = time.thread_time()  # this thread's own: other processes' load is not our cost
        for _ in range(steps):
            self._step()
        elapsed = time.thread_time() - start
        if self.connector is not None:
            self.connector.side.client.outbox.take_all()  # its thread would have sent them
        return elapsed / steps

    def _step(self) -> None:
        for entry in list(self._running):
            self._decode(entry, 1)
            if entry[0].num_output_tokens >= OUTPUT_TOKENS:
                self._finish(entry)
                self._start()
        if self.connector is not None:
            answer(self.connector, self.connector.build_connector_meta(STEP))

    def _start(self) -> None:
        tokens = list(range(PROMPT_TOKENS))
        tokens[SHARED_TOKENS] = next(self._numbers)  # what follows is this request's own
        request = self._make_request(tokens)
        hits = len(self._shared)
        if self.connector is not None:
            self.connector.on_new_request(request)
            self.connector.get_num_new_matched_tokens(request, hits * BLOCK_SIZE)
        self.pool.touch(self._shared)
        new = self.pool.get_new_blocks(PROMPT_TOKENS // BLOCK_SIZE - hits)
        blocks = self._shared + new
        self.pool.cache_full_blocks(request, blocks, hits, len(blocks), BLOCK_SIZE, 0)
        request.num_computed_tokens = PROMPT_TOKENS
        self._shared = self._shared or blocks[: SHARED_TOKENS // BLOCK_SIZE]
        if self.connector is not None:
            self.connector.update_state_after_alloc(request, _NoBlocks, 0)
        self._running.append((request, blocks))

    def _decode(self, entry: tuple[Any, list[Any]], tokens: int) -> None:
        request, blocks = entry
        for token in range(tokens):
            if request.num_computed_tokens % BLOCK_SIZE == 0:
                blocks += self.pool.get_new_blocks(1)
            request.append_output_token_ids(token % 251)
            request.num_computed_tokens += 1
            full = request.num_computed_tokens // BLOCK_SIZE
            if request.num_computed_tokens % BLOCK_SIZE == 0:
                self.pool.cache_full_blocks(request, blocks, full - 1, full, BLOCK_SIZE, 0)

    def _finish(self, entry: tuple[Any, list[Any]]) -> None:
        request, blocks = entry
        if self.connector is not None:
            self.connector.request_finished_all_groups(request, ([b.block_id for b in blocks],))
        self.pool.free_blocks(reversed(blocks))
        self._running.remove(entry)


def new_pool(num_blocks: int) -> Any:
    """A real ``BlockPool`` with prefix caching."""
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)


def request_maker() -> Callable[[list[int]], Any]:
    """Makes real ``Request`` objects from prompt tokens."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher, numbers = get_request_block_hasher(BLOCK_SIZE, sha256), itertools.count()

    def make(tokens: list[int]) -> Any:
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS)
        return Request(f"request-{next(numbers)}", tokens, sampling, None, block_hasher=hasher)

    return make


def cached_pool(
    num_blocks: int, clock: Callable[[], float] = time.monotonic, compiled: bool = False
) -> tuple[Any, Keys, BlockIndex]:
    """A pool whose blocks are all free and in the prefix cache; their keys; their index, which the
    Python path keeps or the compiled core."""
    pool, count = new_pool(num_blocks), num_blocks - 1  # block 0 is the null block
    index = _core_index(pool, clock) if compiled else BlockIndex(pool, clock)
    request = request_maker()(list(range(count * BLOCK_SIZE)))
    blocks = pool.get_new_blocks(count)
    pool.cache_full_blocks(request, blocks, 0, count, BLOCK_SIZE, 0)
    packed = pack_hashes(request.block_hashes)
    index.remember(unpack(packed), [block.block_id for block in blocks])
    pool.free_blocks(reversed(blocks))
    return pool, as_keys(packed), index


def _core_index(pool: Any, clock: Callable[[], float]) -> BlockIndex:
    from kvgraph.hooks.vllm.core_index import CoreIndex
    from kvgraph.hooks.vllm.groups import ObservedGroup

    return CoreIndex(pool, ObservedGroup(0, BLOCK_SIZE, BLOCK_SIZE), clock)


def dependencies(clock: Callable[[], float] = time.monotonic, **more: Any) -> Any:
    """A scheduler side's without a sidecar: the client's thread is not started."""
    from kvgraph.hooks.vllm.scheduler import SchedulerDependencies

    return SchedulerDependencies(
        lambda end: AdvisorClient("ipc:///nowhere", end, clock=clock), clock, **more
    )


def connected(
    pool: Any,
    tiers_of: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    batched_tokens: int = 2048,
    requests: int = RUNNING,
    spill_all: bool = False,
) -> Any:
    """Our connector, bound to ``pool``; its client's thread is not started."""
    from kvgraph.hooks.tiers.jobs import TierAnswer, WorkerStart
    from kvgraph.hooks.vllm.connector import KvGraphConnector
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    group, extra = _layers(tiers_of, spill_all)
    transfer = KVTransferConfig(
        kv_connector="KvGraphConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    bounds = {"max_num_batched_tokens": batched_tokens, "max_num_seqs": requests}
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(policy="fcfs", **bounds),
        **_ENGINE,
    )
    groups = SimpleNamespace(kv_cache_groups=[group])
    connector = KvGraphConnector(config, KVConnectorRole.SCHEDULER, groups)
    side = connector.attach(pool, dependencies(clock))
    if tiers_of is not None and side.bridge is not None:
        side.bridge.answered(TierAnswer(starts=(WorkerStart(tiers_of),)))
    return connector


def _layers(tiers_of: int | None, spill_all: bool) -> tuple[Any, dict[str, Any]]:
    """A group of layers, and what the connector is told of tiers."""
    import torch
    from kvgraph.hooks.settings import TIERS_KEY, TierSettings
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"] * LAYERS)
    if tiers_of is None:
        return group, {}
    settings = TierSettings(tiers_of * LAYERS * spec.page_size_bytes, spill_all=spill_all)
    return group, {TIERS_KEY: settings.plain()}


def tiered_connector(pool: Any) -> Any:
    """The same with tiers: host memory for as many blocks as the pool has."""
    return connected(pool, tiers_of=POOL_DECODING)


def answer(connector: Any, metadata: Any) -> None:
    """What a worker says to a step's orders, if there are any: all done."""
    from kvgraph.hooks.tiers.jobs import JobDone, TierAnswer
    from kvgraph.hooks.vllm.tiers.worker import TierMetadata, TierWorkerMetadata

    if isinstance(metadata, TierMetadata):
        done = tuple(JobDone(job.id, frozenset(), 0.001, 1) for job in metadata.work.jobs)
        answer = TierWorkerMetadata(TierAnswer(done))
        connector.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=answer, finished_recving=None)
        )


_ENGINE: Final = {
    "model_config": SimpleNamespace(served_model_name="bench", model="bench"),
    "cache_config": SimpleNamespace(prefix_caching_hash_algo="sha256"),
    "parallel_config": SimpleNamespace(
        decode_context_parallel_size=1, prefill_context_parallel_size=1, world_size=1
    ),
}


class _NoBlocks:
    @staticmethod
    def get_block_ids() -> tuple[list[int]]:
        return ([],)


def a_ranking(order: Keys, epoch: int = 1, protected: Keys | None = None) -> EvictionRanking:
    none = np.empty(0, dtype=np.uint64)
    protected = none if protected is None else protected
    never_stale = time.monotonic() + 1e6
    return EvictionRanking(epoch, never_stale, order, protected, none, none)


def _no_engine() -> EngineEnd:
    return SimpleNamespace()


def _per_call(function: Callable[[], object], calls: int) -> float:
    """Seconds a call, the loop's own cost included."""
    start = time.thread_time()
    for _ in itertools.repeat(None, calls):
        function()
    return (time.thread_time() - start) / calls


def _silent(line: str) -> None:
    pass


def _say(line: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(line.splitlines()[0])
