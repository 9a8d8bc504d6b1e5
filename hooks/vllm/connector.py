"""The KV connector that observes a vLLM scheduler, arranges its free queue, and keeps its tiers.

vLLM offers connectors the calls that matter here: the live block pool, each request's lookup, its
first scheduling and its end, and one call a step, after the step's allocations. KV is moved only
where the engine was given memory for it; without, the workers have no connector at all.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from ..tiers.budget import TierSettings
from ..tiers.jobs import TierAnswer
from .barrier import guarded
from .logs import log_where_vllm_logs
from .scheduler import SchedulerSide
from .settings import ENDPOINT_KEY, SIDECAR_VARIABLE, TIERS_KEY
from .shapes import reason_to_leave_alone
from .transfers.rescue import Rescue
from .transfers.worker import TierMetadata, TierWorkerMetadata, WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# The same empty object every step. It is vLLM's class, so that a worker that unpickles it does
# not have to import anything of ours.
_NOTHING_TO_DO: Final = KVConnectorMetadata()


class KvGraphConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Observes; with tiers, also spills, loads and prefetches."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._side: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._rescue = Rescue()
        tiers = self._kv_transfer_config.get_from_extra_config(TIERS_KEY, None)
        self._tiers = TierSettings.from_plain(tiers) if tiers is not None else None
        if role is KVConnectorRole.WORKER and self._tiers is not None:
            log_where_vllm_logs()  # a worker is a process of its own
            self._worker = WorkerSide(vllm_config, self._tiers)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing is handed over, so a preempted request may finish as in stock vLLM."""
        return False

    @property
    def has_workers(self) -> bool:
        """Whether vLLM's workers have a connector too."""
        return bool(self._kv_transfer_config.is_kv_transfer_instance)

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
        if reason := reason_to_leave_alone(self._kv_cache_config):
            logger.warning("kvgraph: not attached: %s", reason)
            return
        side = SchedulerSide(
            self._vllm_config, self._kv_cache_config, gpu_block_pool, endpoint, self._tiers,
            self._kv_cache_manager,
        )  # fmt: skip
        self._side = side
        side.client.start()

    def bind_scheduler(self, scheduler: Scheduler) -> None:
        """Hold new sessions of ``scheduler`` while there is no room for them.

        Raises:
            TypeError: It is no scheduler that this can be done with.
        """
        if self._side is not None:
            self._side.hold_at(scheduler, self.holds, self.holds_no_longer)

    @guarded(False)
    def holds(self, request: Request) -> bool:
        """Whether a new request is to be held."""
        holding = self._side.holding if self._side is not None else None
        return holding is not None and holding.arrived(request)

    @guarded(None)
    def holds_no_longer(self, request_id: str) -> None:
        """A held request's client went away."""
        if self._side is not None and self._side.holding is not None:
            self._side.holding.removed(request_id)

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        """Count a waiting request."""
        if self._side is not None:
            self._side.request_queued(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What a load can bring; note how much of the prompt the prefix cache held."""
        if self._side is None:
            return 0, False
        return self._side.request_looked_up(request, num_computed_tokens)

    @guarded(None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request was given blocks; ``num_external_tokens`` of them are to be loaded."""
        if self._side is None:
            self._rescue.scheduled(request.request_id)
            return
        try:
            self._side.request_scheduled(request, blocks, num_external_tokens)
        except Exception:
            if num_external_tokens and self._tiers is not None:  # else it is the user's own load
                self._rescue.fail_load(self._side, request, blocks)
            raise

    @guarded(_NOTHING_TO_DO)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """After the step's allocations and before the next ones: arrange the free queue."""
        if self._side is not None:
            work = self._side.step(
                scheduler_output.total_num_scheduled_tokens,
                getattr(scheduler_output, "preempted_req_ids", None) or (),
            )
        else:
            work = self._rescue.work()
        return TierMetadata(work) if work else _NOTHING_TO_DO

    @guarded(None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step's output arrived: what the workers moved becomes visible."""
        metadata = connector_output.kv_connector_worker_meta
        answer = metadata.answer if metadata is not None else TierAnswer()
        received, side = connector_output.finished_recving or (), self._side
        if side is None:
            self._rescue.answered(answer, received)
            return
        try:
            side.step_ended()
        except Exception:
            side.drop_copies()  # perhaps of old weights: a reset may have failed here
            raise
        finally:  # said once: unheard, the blocks of these jobs would never come back
            side.answered(answer, received)

    @guarded(False)
    def has_pending_push_work(self) -> bool:
        """Whether transfers are under way whose end only another step can tell."""
        return self._side.busy if self._side is not None else self._rescue.busy

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are freed right after, as in stock vLLM."""
        if self._side is not None:
            self._side.request_finished(request, block_ids)
        else:
            self._rescue.finished(request.request_id)
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for an engine with one KV cache group (beside the user's connector)."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(False)
    def reset_cache(self) -> bool:
        """Give up all copies; False while a load of one of them is under way."""
        return self._side.drop_copies() if self._side is not None else True

    def shutdown(self) -> None:
        """Stop observing."""
        self._detach(wait_s=1.0)
        if self._worker is not None:
            self._worker.close()

    # A worker's calls ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The paged memory that blocks move out of and into."""
        if self._worker is not None:
            self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's transfers; none waits for another."""
        if self._worker is not None and isinstance(self._connector_metadata, TierMetadata):
            self._worker.submit(self._connector_metadata.work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads ended, well or not."""
        return None, self._worker.take_finished() or None if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of those requests that hold nothing: vLLM computes them."""
        return self._worker.take_failed() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> TierWorkerMetadata | None:
        """What was moved since the last step."""
        answer = self._worker.take_answer() if self._worker is not None else None
        return TierWorkerMetadata(answer) if answer else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request waits for its load as a whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save: blocks are copied when they are about to go."""

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
            self._rescue.adopt(side)
            side.client.close(wait_s)
