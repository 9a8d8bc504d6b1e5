"""What an engine pays: reading advice, applying it, and being observed (``steps``).

Block pool, requests and connector are the real ones; only the model is missing. The client's thread
does not run here, since it works beside the engine: what it computes is a figure of its own.
"""

from __future__ import annotations

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
from rich.console import Console

from .figures import Figures, only_errors

PARTS: Final = ("all", "pool", "client", "steps")
BLOCK_SIZE: Final = 16
POOL_BLOCKS: Final = 8192
LAYERS: Final = 32
RUNNING: Final = 32  # requests in the decode batch
OUTPUT_TOKENS: Final = 256
STEP: Final = SimpleNamespace(total_num_scheduled_tokens=RUNNING)  # of a scheduler's output
REPEATS: Final = 15


@only_errors()
def run(progress: bool = False, part: str = "all") -> Figures:
    from vllm import envs

    from .steps.scheduler_steps import add_client, add_scheduler_steps  # built of what stands here
    from .steps.step_figures import add_steps

    figures = Figures("hotpath")
    say = Console(stderr=True, quiet=not progress).print
    if part in ("all", "pool"):
        say("reading the latest ranking; applying new ones to a pool of 8,192 free cached blocks")
        _measure_read(figures)
        _measure_apply(figures)
        envs.enable_envs_cache()  # as vLLM's engine core does once it is up
        add_steps(figures, say)
    if part in ("all", "client"):
        add_client(figures, say)
    if part in ("all", "steps"):
        add_scheduler_steps(figures, say)
    return figures


def _measure_read(figures: Figures) -> None:
    client = AdvisorClient("ipc:///nowhere", _no_engine())
    client.hold_ranking(a_ranking(np.arange(4096, dtype=np.uint64)))
    samples = [_per_call(client.ranking, 50_000) * 1e9 for _ in range(REPEATS)]
    figures.add("read_ns", samples, "ns", "≤ 250")


def _measure_apply(figures: Figures) -> None:
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


def new_pool(num_blocks: int) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_SIZE)


def request_maker() -> Callable[[list[int]], Any]:
    from .paper.paper_engine import request_maker as named

    make, numbers = named(), itertools.count()
    return lambda tokens: make(f"request-{next(numbers)}", tokens, OUTPUT_TOKENS)


def cached_pool(
    num_blocks: int, clock: Callable[[], float] = time.monotonic, compiled: bool = False
) -> tuple[Any, Keys, BlockIndex]:
    """A pool whose blocks are all free and cached; their keys; their index, either core's."""
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
    table = SimpleNamespace(req_to_blocks={})
    connector._kv_cache_manager = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=(table,))
    )
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
    "speculative_config": "a draft model, so that there is no recall",
}


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
