"""The KV connector that observes a vLLM scheduler and arranges its free queue.

It transfers no KV. vLLM offers connectors the calls that matter here: the live block pool, each
request's first scheduling and its end, and one call a step, after the step's allocations.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ...graph.events import AdviceApplied, AnyEvent, EngineHello
from ..client import AdvisorClient
from .eviction import FreeQueueArranger
from .guard import guarded
from .index import BlockIndex
from .logs import log_where_vllm_logs
from .observer import EngineObserver, ObservedGroup
from .settings import ENDPOINT_KEY, SIDECAR_VARIABLE
from .tagging import MAX_NAME
from .tap import PoolTap

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# The same empty object every step. It is vLLM's class, so that a worker that unpickles it does
# not have to import anything of ours.
_NOTHING_TO_DO: Final = KVConnectorMetadata()


class SchedulerSide:
    """Everything that lives in the scheduler's process, wired together."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, pool: BlockPool, endpoint: str):
        group = observed_group(kv_cache, pool)
        self._config = config
        self._pool = pool
        self._group = group
        self.index = BlockIndex(pool)
        self.arranger = FreeQueueArranger(pool, self.index, most_blocks_per_step(config, group))
        self.client = AdvisorClient(endpoint, self)
        self.tap = PoolTap(pool, group.index)
        self.observer = EngineObserver(pool, group, self.index, self.arranger, self.client.emit)

    def step(self) -> None:
        """Once an engine step, after its allocations: tell what changed, apply advice."""
        self.observer.blocks_changed(self.tap.take())
        self.arranger.step(self.client.ranking())

    def hello(self) -> EngineHello:
        """See ``EngineEnd``."""
        model = self._config.model_config
        return EngineHello(
            engine=f"{socket.gethostname()}:{os.getpid()}"[:MAX_NAME],
            model=str(model.served_model_name or model.model)[:MAX_NAME],
            block_size=self._group.block_size,
            num_blocks=self._pool.num_gpu_blocks,
            version=f"vllm {vllm.__version__}"[:MAX_NAME],
        )

    def resident(self) -> bytes:
        """See ``EngineEnd``."""
        return self.observer.resident()

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        arranger = self.arranger
        applied = AdviceApplied(
            epoch=arranger.epoch,
            moved=arranger.moved,
            recycled=arranger.recycled,
            stale=arranger.stale,
            protected_evicted=arranger.protected_evicted,
            dropped=dropped,
        )
        return [self.observer.pressure(), applied]


class KvGraphConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Observes; loads and saves nothing. In a worker it does nothing at all."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._side: SchedulerSide | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed over, so a preempted request may finish as in stock vLLM."""
        return False

    # The scheduler's calls ----------------------------------------------------------------------

    @guarded(None)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Start observing ``gpu_block_pool``."""
        if self.role is not KVConnectorRole.SCHEDULER or not gpu_block_pool.enable_caching:
            return
        endpoint = self._kv_transfer_config.get_from_extra_config(
            ENDPOINT_KEY, os.environ.get(SIDECAR_VARIABLE)
        )
        if not endpoint:
            return
        log_where_vllm_logs()  # the engine core is a process of its own
        side = SchedulerSide(self._vllm_config, self._kv_cache_config, gpu_block_pool, endpoint)
        self._side = side
        side.client.start()

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        """Count a waiting request."""
        if self._side is not None:
            self._side.observer.request_queued(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing to load; note how much of the prompt the prefix cache held."""
        if self._side is not None:
            self._side.observer.request_looked_up(request, num_computed_tokens)
        return 0, False

    @guarded(None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request was given blocks."""
        if self._side is not None:
            self._side.observer.request_scheduled(request)

    @guarded(_NOTHING_TO_DO)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """After the step's allocations and before the next ones: arrange the free queue."""
        if self._side is not None:
            self._side.step()
        return _NOTHING_TO_DO

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are freed right after, as in stock vLLM."""
        if self._side is not None:
            self._side.observer.request_finished(request, block_ids)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for an engine with one KV cache group (as part of a MultiConnector)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool:
        """There is no cache of ours to reset."""
        return True

    def shutdown(self) -> None:
        """Stop observing."""
        self._detach(wait_s=1.0)

    # A worker's calls: none does anything -------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def disable(self, where: str, error: Exception) -> None:
        """Leave the engine to itself after an error of ours; see ``Guarded``."""
        if self._side is not None or where == "bind_gpu_block_pool":
            # The type only: a message may quote what it choked on.
            logger.warning(
                "kvgraph: disabled after %s in %s; the engine goes on as stock vLLM",
                type(error).__name__,
                where,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        self._detach(wait_s=0.0)

    def _detach(self, wait_s: float) -> None:
        side, self._side = self._side, None
        if side is not None:
            side.tap.detach()
            side.client.close(wait_s)


def observed_group(kv_cache: KVCacheConfig, pool: BlockPool) -> ObservedGroup:
    """The group whose prefix reaches furthest back: the first with full attention.

    Hybrid models keep several groups under the same hashes; a sliding-window group drops blocks
    that the others still hold, so following more than one would contradict itself.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = kv_cache.kv_cache_groups
    full = (i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, FullAttentionSpec))
    index = next(full, 0)
    size = groups[index].kv_cache_spec.block_size if len(groups) > 1 else pool.hash_block_size
    return ObservedGroup(index, size, pool.hash_block_size)


def most_blocks_per_step(config: VllmConfig, group: ObservedGroup) -> int:
    """An upper bound of what one step allocates: every batched token new, each request a tail."""
    scheduler = config.scheduler_config
    return int(scheduler.max_num_batched_tokens) // group.block_size + int(scheduler.max_num_seqs)
