"""vLLM's scheduler with our connector, above workers on paper: an engine without a model.

Scheduler, cache manager, block pool, connector and aggregator are vLLM's and ours; only what a GPU
would do is written down instead (``paper_model``).
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgraph.hooks.settings import TierSettings
from kvgraph.hooks.vllm.patches import own_transfer_config
from kvgraph.hooks.vllm.tiers.worker import TierMetadata, TierWorkerMetadata

from ..hotpath import dependencies
from .paper_model import Batch, Notes, PaperModel, PaperWorker, aggregated, seed_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

BLOCK_SIZE: Final = 16
NOBODY: Final = "ipc:///nowhere/kvgraph.sock"  # the advisor's client finds no sidecar there
_PATIENCE: Final = 3_000  # steps in which every request that can end has ended


@dataclass(frozen=True)
class Shape:
    blocks: int = 33  # in the pool, the null block among them
    asynchronous: bool = False  # whether a batch is scheduled while another is computed
    warm: int | None = 64  # blocks in host memory; None for an engine without tiers
    plain: bool = False  # tiers keep all that goes, drop the oldest, and bring nothing back unasked
    cold: int = 0  # blocks on disk
    workers: int = 1  # that hold a shard each (tensor or pipeline parallel)
    drafts: int = 0  # speculative tokens in a step
    stock: bool = False  # whether the engine runs without us
    # of each group of layers: how many positions it attends to; None: full attention; 0: a state,
    # as Mamba layers have
    windows: tuple[int | None, ...] = (None,)
    rank: tuple[int, int] = (0, 1)  # of how many data-parallel engines it is which one


class PaperEngine:
    """vLLM's scheduler with workers that note; ``outputs`` are each request's tokens."""

    def __init__(
        self,
        base: VllmConfig,
        shape: Shape,
        rng: random.Random | None = None,
        disks: Sequence[Mapping[bytes, Notes]] | None = None,
        training: int = 0,
        endpoint: str = NOBODY,
        clock: Callable[[], float] | None = None,
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.v1.structured_output import StructuredOutputManager

        self.shape, self.rng, self.clock = shape, rng or random.Random(0), clock
        self.config = configured(base, shape, endpoint if clock is None else "")
        scheduler = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = scheduler(
            self.config, cache_of(shape), StructuredOutputManager(self.config), BLOCK_SIZE
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.connector = self.scheduler.connector
        if clock is not None and self.connector is not None:
            self.connector.attach(self.pool, dependencies(clock))
        self.workers = [self._new_worker(disk) for disk in disks or [{}] * shape.workers]
        self.model = PaperModel(self.workers, self.rng, shape.windows)
        self.weights, self.training = 0, training
        self.outputs: dict[str, list[int]] = {}
        self.aggregator = (
            KVOutputAggregator.from_connector(self.connector, shape.workers)
            if self.connector is not None
            else None
        )
        self.batches: deque[Batch] = deque()
        self._in_flight = 2 if shape.asynchronous else 1
        self._dispatched, self._numbers = 0, itertools.count()
        self.make = request_maker()
        if self.has_tiers:
            self.side.bridge.ledger.costs.worth_loading = lambda *_: True

    @property
    def has_tiers(self) -> bool:
        return self.shape.warm is not None and not self.shape.stock

    @property
    def side(self) -> Any:
        """Our part of the scheduler's process; None once it was disabled."""
        return self.connector.side

    def rewire(self) -> None:
        """Have vLLM call what took the place of a method of ours."""
        self.connector.calls = self.side.calls()

    # Requests -----------------------------------------------------------------------------------

    def ask(self, tokens: Sequence[int], output: int = 1, **fields: Any) -> Request:
        """A new request for ``output`` tokens; ``fields`` go to vLLM's ``Request``."""
        request = self.make(f"r{next(self._numbers)}", list(tokens), output, **fields)
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def serve(self, tokens: Sequence[int], output: int = 1, **fields: Any) -> list[int]:
        request = self.ask(tokens, output, **fields)
        self.settle()
        return self.outputs[request.request_id]

    def settle(self) -> None:
        self.until(lambda: not self.scheduler.has_requests() and not self.batches)

    def until(self, done: Callable[[], object]) -> None:
        """Steps, with copies that move at once, until ``done``."""
        for _ in range(_PATIENCE):
            if done():
                return
            self.step()
            self.finish_copies()
        raise AssertionError("the engine hangs, or never falls idle")

    # Steps --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step as ``EngineCore`` does it, with a queue of batches or without."""
        if self.scheduler.has_requests():
            order = self.scheduler.schedule()
            self.dispatch(order)
            has_more = order.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            if len(self.batches) < self._in_flight and has_more:
                return
        if self.batches:
            self.end(self.batches.popleft())

    def compute(self, count: int | None = None) -> None:
        """Run forwards that were dispatched: the oldest ``count``, or all."""
        waiting = [batch for batch in self.batches if batch.result is None]
        for batch in waiting[:count]:
            self.model.run(batch)

    def finish_copies(self) -> None:
        for worker in self.workers:
            worker.finish_all()

    def reset(self, **options: bool) -> bool:
        """New weights, as a trainer brings them: what was dispatched runs before."""
        self.compute()
        done: bool = self.scheduler.reset_prefix_cache(**options)
        self.weights += done
        return done

    def close(self) -> None:
        self.scheduler.shutdown()

    def is_whole(self) -> bool:
        """Every block is free, once, and the scheduler knows of no request."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        single = len(free) == self.pool.get_num_free_blocks() == len({b.block_id for b in free})
        return single and len(free) == self.shape.blocks - 1 and not self.scheduler.requests

    def _new_worker(self, disk: Mapping[bytes, Notes]) -> PaperWorker:
        shape = self.shape
        return PaperWorker(shape.blocks, BLOCK_SIZE, shape.warm or 0, shape.cold, disk)

    def dispatch(self, order: SchedulerOutput) -> None:
        self._dispatched += 1
        requests = self.scheduler.requests
        new = [each.req_id for each in order.scheduled_new_reqs]
        names = [*new, *order.scheduled_cached_reqs.resumed_req_ids]
        seeds = {name: seed_of(requests[name], self.weights, self.training) for name in names}
        said = [self._exchange(worker, order) for worker in self.workers]
        self.batches.append(Batch(order, seeds, said))

    def _exchange(self, worker: PaperWorker, order: SchedulerOutput) -> KVConnectorOutput | None:
        """What vLLM's runner does with a connector around a forward."""
        from vllm.v1.outputs import KVConnectorOutput

        if not self.has_tiers:
            return None
        metadata = order.kv_connector_metadata
        if isinstance(metadata, TierMetadata):
            worker.submit(metadata.work, self._dispatched)
        finished, failed = worker.answers.take_loaded()
        answer = worker.answers.take_answer()
        return KVConnectorOutput(
            finished_recving=finished,
            invalid_block_ids=failed,
            kv_connector_worker_meta=TierWorkerMetadata(answer) if answer else None,
        )

    def end(self, batch: Batch) -> None:
        """Compute a batch, unless that was done, and tell the scheduler what came of it."""
        if batch.result is None:
            self.model.run(batch)
        outputs = self.scheduler.update_from_output(batch.order, aggregated(batch, self.aggregator))
        for each in itertools.chain.from_iterable(o.outputs for o in outputs.values()):
            self.outputs[each.request_id] += each.new_token_ids
        if self.shape.drafts and not self.shape.asynchronous:
            self._draft(batch)

    def _draft(self, batch: Batch) -> None:
        from vllm.v1.outputs import DraftTokenIds

        running = {request.request_id for request in self.scheduler.running}
        names = [name for name in batch.order.num_scheduled_tokens if name in running]
        drafts = self.model.drafts(names, self.shape.drafts)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


def base_config(model: Path) -> VllmConfig:
    """vLLM's own configuration of an engine for ``model``, without any connector."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(model), dtype="float32", block_size=BLOCK_SIZE, max_model_len=512,
        max_num_seqs=6, max_num_batched_tokens=128, enforce_eager=True,
    )  # fmt: skip
    return arguments.create_engine_config()


def configured(base: VllmConfig, shape: Shape, endpoint: str = NOBODY) -> VllmConfig:
    """``base`` for an engine of ``shape``; nothing of ``base`` is changed."""
    config = copy.copy(base)
    for part in ("scheduler_config", "cache_config", "parallel_config"):
        setattr(config, part, copy.copy(getattr(base, part)))
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.cache_config.num_gpu_blocks = shape.blocks
    config.parallel_config.tensor_parallel_size = shape.workers
    config.parallel_config.world_size = shape.workers
    rank, of = shape.rank
    config.parallel_config.data_parallel_size = of
    config.parallel_config.data_parallel_rank = config.parallel_config.data_parallel_index = rank
    if 0 in shape.windows:
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.block_size = BLOCK_SIZE
    if shape.drafts:
        from vllm.config import SpeculativeConfig

        config.speculative_config = SpeculativeConfig(
            method="ngram", num_speculative_tokens=shape.drafts, prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )  # fmt: skip
    if not shape.stock:
        config.kv_transfer_config = own_transfer_config(endpoint, tiers_of(shape))
    return config


def tiers_of(shape: Shape) -> TierSettings | None:
    """Budgets for the blocks that a shape names."""
    if shape.warm is None:
        return None
    size = page_bytes()
    directory = Path("/nowhere") if shape.cold else None
    return TierSettings(
        shape.warm * size, shape.cold * size, directory,
        prefetch=not shape.plain, spill_all=shape.plain,
    )  # fmt: skip


def cache_of(shape: Shape) -> Any:
    """A group of one layer for each window."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    groups = [
        KVCacheGroupSpec([f"layer{number}"], _spec(window))
        for number, window in enumerate(shape.windows)
    ]
    return KVCacheConfig(shape.blocks, [], groups)


def page_bytes() -> int:
    """One block's bytes on one worker, as its specification says."""
    return int(_spec(None).page_size_bytes)


def _spec(window: int | None) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if window == 0:
        return MambaSpec(
            block_size=BLOCK_SIZE, shapes=((256,),), dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )  # fmt: skip
    fields = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    if window is None:
        return FullAttentionSpec(**fields)
    return SlidingWindowSpec(sliding_window=window, **fields)


def request_maker() -> Callable[..., Request]:
    """Makes vLLM's requests from a name, tokens and a number of tokens to say."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

    def make(name: str, tokens: list[int], output: int, **fields: Any) -> Request:
        params = fields.pop("kv_transfer_params", None)
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra)
        return Request(name, tokens, sampling, None, block_hasher=hasher, **fields)

    return make
