"""The KV connector that observes a vLLM scheduler, arranges its free queue, and manages its tiers.
It moves KV only if the engine was given memory for tiers; otherwise workers have no connector.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from ...graph.wire.events import MAX_NAME
from ..link.client import AdvisorClient, ClientOptions
from ..settings import ENDPOINT_KEY, TIERS_KEY, TierSettings, engine_settings
from ..threads import Once, log_where_vllm_logs
from ..tiers.jobs import TierAnswer
from .calls import Calls, Found, Told
from .sampled.measuring import split_samples
from .scheduler import SchedulerDependencies, SchedulerSide
from .shapes import reason_to_leave_alone
from .tiers.idle import follow_loops
from .tiers.store import records_opener
from .tiers.weights import follow_worker_calls
from .tiers.worker import TierMetadata, TierWorkerMetadata, WorkerSide, wanted_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class WorkerCalls(KVConnectorBase_V1):  # type: ignore[misc]
    """The half of a connector that a worker calls; ``worker`` moves its blocks if the engine has
    tiers, and is None otherwise.
    """

    worker: WorkerSide | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the paged memory that blocks are copied from and to."""
        if self.worker is not None:
            self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's transfers; none waits for another."""
        if self.worker is not None and isinstance(self._connector_metadata, TierMetadata):
            self.worker.submit(self._connector_metadata.work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads ended, whether they succeeded or failed."""
        return None, (self.worker.take_finished() or None) if self.worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose load failed, of requests in ``get_finished``; vLLM computes them."""
        return self.worker.take_failed() if self.worker is not None else set()

    def build_connector_worker_meta(self) -> TierWorkerMetadata | None:
        answer = self.worker.take_answer() if self.worker is not None else None
        return TierWorkerMetadata(answer) if answer else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request waits for its whole load, not layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: blocks are copied when they are about to be evicted."""

    def wait_for_save(self) -> None:
        """Does nothing."""


Method = TypeVar("Method", bound=Callable[..., Any])


class Guarded(Protocol):
    """An object that switches itself off when one of its ``guarded`` methods raises."""

    def disable(self, where: str, error: Exception) -> None:
        """Stop observing after ``error`` in ``where``; must not raise."""


def guarded(default: Any) -> Callable[[Method], Method]:
    """Decorate a method of a ``Guarded``: an exception disables it and returns ``default``."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.disable(method.__name__, error)
                return default

        return cast(Method, call)

    return decorate


logger = logging.getLogger(__name__)

# The same empty object every step. It is vLLM's class, so that a worker that unpickles it does
# not have to import anything of ours.
_NOTHING_TO_DO: Final = KVConnectorMetadata()


class KvGraphConnector(WorkerCalls, SupportsHMA):  # type: ignore[misc]
    """Observes an engine; with tiers, also spills, loads and prefetches.

    Attributes:
        side: Our part of the scheduler's process; None before a pool is bound, and after an
            internal error.
        calls: The parts that get vLLM's calls; after an error, only those that complete promised
            loads.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.side: SchedulerSide | None = None
        self.calls, self._once = Calls(), Once(logger)
        tiers = self._kv_transfer_config.get_from_extra_config(TIERS_KEY, None)
        self._tiers = TierSettings.from_plain(tiers) if tiers else None
        if role is KVConnectorRole.WORKER and self._tiers:
            log_where_vllm_logs()  # a worker is a process of its own
            self.worker = WorkerSide(vllm_config, self._tiers, records_opener(self._tiers))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Request a layout with all layers of a block contiguous, if tiers move blocks on a GPU."""
        return wanted_layout(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: no KV is handed over, so a preempted request may end as in stock vLLM."""
        return False

    @property
    def has_workers(self) -> bool:
        return bool(self._kv_transfer_config.is_kv_transfer_instance)

    # The scheduler's calls ----------------------------------------------------------------------

    @guarded(None)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self.role is not KVConnectorRole.SCHEDULER or not gpu_block_pool.enable_caching:
            return
        settings = engine_settings("protect_stale_s")
        extra = self._kv_transfer_config.get_from_extra_config
        endpoint = extra(ENDPOINT_KEY, settings.sidecar)
        if not endpoint:
            return
        log_where_vllm_logs()  # the engine core is a process of its own
        if reason := reason_to_leave_alone(self._kv_cache_config):
            logger.warning("kvgraph: not attached: %s", reason)
            return
        options = ClientOptions(protect_stale_s=settings.protect_stale_s)
        side = self.attach(
            gpu_block_pool, SchedulerDependencies(lambda end: AdvisorClient(endpoint, end, options))
        )
        if self._tiers:
            follow_worker_calls()
        if self._tiers and self._tiers.prefetch:
            follow_loops()
        side.client.start()

    def attach(self, pool: BlockPool, dependencies: SchedulerDependencies) -> SchedulerSide:
        """Observe ``pool`` from now on; the caller starts the client."""
        self.side = side = SchedulerSide(
            self._vllm_config, self._kv_cache_config, pool, dependencies, self._tiers,
            self._kv_cache_manager,
        )  # fmt: skip
        self.calls = side.calls()
        return side

    def detach(self, wait_s: float) -> None:
        """Stop acting on the engine, but still complete the loads that vLLM was promised."""
        side, self.side = self.side, None
        if side is not None:
            self.calls = side.promised_calls()
            side.leave(wait_s)

    def bind_scheduler(self, scheduler: Scheduler) -> None:
        """Hold new sessions while there is no room. Raises TypeError if a scheduler forbids it."""
        if self.side is not None:
            self.side.hold_at(scheduler, self.holds, self.holds_no_longer)
            self.calls = self.side.calls()

    def bind_loop(self, loop: EngineCoreProc) -> None:
        """Let prefetches wake ``loop``, the engine's core loop, which is about to start."""
        if self.side is not None and self.side.bridge is not None:
            self.side.bridge.idle.bind(loop)

    @guarded(False)
    def holds(self, request: Request) -> bool:
        side = self.side
        return side is not None and side.holding is not None and side.holding.arrived(request)

    @guarded(None)
    def holds_no_longer(self, request_id: str) -> None:
        """Forget a held request whose client disconnected."""
        if self.side is not None and self.side.holding is not None:
            self.side.holding.removed(request_id)

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        for note in self.calls.on_new_request:
            note(request)

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Found:
        """Return how many tokens a load can bring; note what the prefix cache held."""
        found: Found = 0, False
        for catch_up in self.calls.catch_up:
            catch_up()
        for look_up in self.calls.get_num_new_matched_tokens:
            found = look_up(request, num_computed_tokens, found)
        return found

    @guarded(None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note that a request has blocks, ``num_external_tokens`` of which a load will fill."""
        calls = self.calls
        try:
            for note in calls.update_state_after_alloc:
                note(request, blocks, num_external_tokens)
        except Exception:
            if num_external_tokens:
                for fail in calls.load_failed:
                    fail(request, blocks)
            raise

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Arrange the free queue, after this step's allocations and before the next step's."""
        try:  # as ``guarded`` does, which costs one more call in each step
            work = None
            for step in self.calls.build_connector_meta:
                work = step(
                    scheduler_output.total_num_scheduled_tokens,
                    getattr(scheduler_output, "preempted_req_ids", None) or (),
                )
            return TierMetadata(work) if work else _NOTHING_TO_DO
        except Exception as error:
            self.disable("build_connector_meta", error)
            return _NOTHING_TO_DO

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Make finished transfers visible, when a step's output arrives."""
        try:  # as above
            metadata = connector_output.kv_connector_worker_meta
            received = connector_output.finished_recving
            if metadata is not None or received:
                self._take_output(metadata, received or ())
            else:  # nothing was moved, as in nearly all steps
                for note in self.calls.catch_up:
                    note()
                for note in self.calls.step_ended:
                    note()
        except Exception as error:
            self.disable("update_connector_output", error)

    def _take_output(
        self, metadata: KVConnectorWorkerMetadata | None, received: Iterable[str]
    ) -> None:
        answered, samples = split_samples(metadata)
        answer = answered.answer if answered else TierAnswer()
        calls = self.calls
        try:
            for note in (*calls.catch_up, *calls.step_ended):
                note()
        except Exception:
            for drop in calls.reset_cache:  # perhaps of old weights: a reset may have failed here
                drop()
            raise
        finally:  # said once: unheard, the blocks of these jobs would never come back
            for take in calls.answered:
                take(answer, received)
        for report in calls.sampled:
            report(samples)

    @guarded(False)
    def has_pending_push_work(self) -> bool:
        """Return whether another step is needed to report or begin a transfer."""
        for has_work in self.calls.has_pending_push_work:  # noqa: SIM110  # asked in every step
            if has_work():
                return True
        return False

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended; its blocks are freed right after, as in stock vLLM."""
        told: Told = None
        for note in self.calls.request_finished:
            told = note(request, block_ids) or told
        return False, told

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(False)
    def reset_cache(self) -> bool:
        """Drop all copies; returns False while one of them is being loaded."""
        dropped = [drop() for drop in self.calls.reset_cache]
        return all(dropped)

    @guarded(None)
    def weights_changed(self, by: str) -> None:
        """Drop all copies, and keep later ones inside this process: after the call ``by``, the
        weights may no longer match the model's files.
        """
        if self.calls.reset_cache:
            self._once.warn(
                "weights",
                "kvgraph: %r was called and may have changed this engine's weights: "
                "copies are given up, and no disk or shared store is used from now on",
                by[:MAX_NAME],
            )
            self.reset_cache()

    def shutdown(self) -> None:
        try:
            self.detach(wait_s=1.0)
        finally:
            if self.worker is not None:
                self.worker.close()

    def disable(self, where: str, error: Exception) -> None:
        """Stop acting on the engine after an internal error; see ``Guarded``."""
        if self.side is not None or where == "bind_gpu_block_pool":
            # The type only: a message may quote what it choked on.
            logger.warning(
                "kvgraph: disabled after %s in %s; the engine goes on as stock vLLM",
                type(error).__name__,
                where,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        with contextlib.suppress(Exception):  # the last barrier: what fails to leave said so itself
            self.detach(wait_s=0.0)
