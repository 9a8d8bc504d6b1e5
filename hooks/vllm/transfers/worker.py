"""A worker's end of the connector: its shard of the cache, and the mover that serves it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...tiers.answers import Answers
from ...tiers.budget import TierSettings
from ...tiers.host_memory import share_of
from ...tiers.jobs import TierAnswer, TierWork, WorkerStart

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ....kernels.layout.layout import PagedKv
    from ....kernels.maths.rope import Rope
    from ...tiers.disk_orphans import DiskSweep
    from ...tiers.lanes.record_lane import Records
    from ...tiers.mover import TierMover

logger = logging.getLogger(__name__)

OpenRecords = Callable[["VllmConfig", "PagedKv"], "tuple[Records, str] | None"]
"""Opens the shared store's records of one worker's shard, and says what they are called."""


@dataclass
class TierMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, sent from the scheduler to its workers by vLLM."""

    work: TierWork


@dataclass
class TierWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' answers, sent back by vLLM."""

    answer: TierAnswer

    def aggregate(self, other: TierWorkerMetadata) -> TierWorkerMetadata:
        """Join both workers' answers; ``JobBook`` counts until the last."""
        return TierWorkerMetadata(self.answer + other.answer)


class WorkerSide:
    """Moves this worker's shard as ordered; answers what cannot be done as failed.

    Args:
        config: The engine's configuration.
        settings: Budgets of one worker.
        open_records: Opens the shard's records in the shared store, if there is one.

    Attributes:
        mover: Moves the shard's blocks; None before there is a cache, and where that failed.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: TierSettings,
        open_records: OpenRecords | None = None,
    ) -> None:
        self._config = config
        self._open_records = open_records
        self._settings = settings
        self.mover: TierMover | None = None
        self._answers = Answers(WorkerStart())
        self._failed_blocks: set[int] = set()
        self._sweep: DiskSweep | None = None

    def register(self, views: dict[str, Any]) -> None:
        """Take vLLM's cache, one view per layer. Memory is committed when the first copies come."""
        try:
            self.serve(described(views, self._config))
        except Exception as error:
            logger.warning(
                "kvgraph: no tiers on this worker (%s: %s); blocks are computed again",
                type(error).__name__,
                error,
            )

    def serve(self, cache: PagedKv) -> None:
        """Begin with this shard, with memory and disk anew; those of before must be closed.

        Raises:
            Exception: There is no memory, no disk, or no way to move this cache.
        """
        self.mover = self._new_mover(cache)
        self._answers = self.mover.answers

    def submit(self, work: TierWork) -> None:
        """Begin a step's work."""
        if self.mover is not None:
            self.mover.submit(work)
        else:
            self._answers.refuse(work)

    def take_finished(self) -> set[str]:
        """Take the requests whose loads ended; their failed blocks are kept for ``take_failed``."""
        if self.mover is not None:
            self.mover.give_up_on_overdue()
        finished, self._failed_blocks = self._answers.take_loaded()
        return finished

    def take_failed(self) -> set[int]:
        """Return the failed blocks of the requests that ``take_finished`` named last."""
        return self._failed_blocks

    def take_answer(self) -> TierAnswer:
        """Take what was done since the last call."""
        return self._answers.take_answer()

    def close(self) -> None:
        """Release memory and disk."""
        if self._sweep is not None:
            self._sweep.close()
        if self.mover is not None:
            self.mover.close()

    def _new_mover(self, cache: PagedKv) -> TierMover:
        from ....kernels import ops
        from ....kernels.store.arena import Arena
        from ...tiers.mover import TierMover
        from .disk_file import new_sweep, open_disk

        given = granted_bytes(self._settings)
        if cache.memory.is_cuda:
            logger.info("kvgraph: page-locking %.1f GiB of host memory for copies", given / 2**30)
        arena = Arena.for_cache(cache.layout, given)
        ops.prepare(cache, arena.kv)  # compiled and measured now, where it holds up no request
        disk = open_disk(self._config, self._settings, cache, arena.record_bytes)
        self._sweep = new_sweep(disk) if disk is not None else None
        store = self._open_records(self._config, cache) if self._open_records else None
        mover = TierMover(
            cache, arena, disk, hash_bytes(self._config), rope=rope_of(self._config), store=store
        )
        logger.info(
            "kvgraph: tiers on: %d blocks of %d bytes in host memory%s",
            arena.capacity,
            arena.record_bytes,
            f", {disk.capacity} on disk" if disk is not None else "",
        )
        return mover


def rope_of(config: VllmConfig) -> Rope | None:
    """How keys of this model are moved to other positions; None where they cannot be."""
    from ....kernels.errors import RopeError
    from ....kernels.maths.rope import rope_from_config

    model = config.model_config
    try:
        return rope_from_config(model.hf_config, model.max_model_len)
    except RopeError:
        return None


def granted_bytes(settings: TierSettings) -> int:
    """Bytes of host memory for one worker's copies: what was asked for, or its share of what there
    is; says so if that is less."""
    given = share_of(settings.warm_bytes, settings.sharers)
    if given < settings.warm_bytes:
        logger.warning(
            "kvgraph: %.1f GiB of host memory for copies instead of the %.1f asked for: there "
            "is no more for each of the %d workers that share this machine or container",
            given / 2**30,
            settings.warm_bytes / 2**30,
            settings.sharers,
        )
    return given


def described(views: dict[str, Any], config: VllmConfig) -> PagedKv:
    """Describe the engine's cache as one paged memory.

    Raises:
        LayoutError: Its layout is not known.
    """
    from vllm.platforms import current_platform

    from ....kernels.layout import engines

    ordered = sorted(views.values(), key=lambda view: int(view.storage_offset()))
    _, _, tokens, cell = ordered[0].shape
    on_cpu = current_platform.is_cpu()
    isa = engines.cpu_isa(ordered[0].dtype, tokens, cell // 2) if on_cpu else None
    mla, whole = config.model_config.use_mla, config.cache_config.block_size
    return engines.from_views(ordered, isa=isa, mla=mla, tokens=whole)


def hash_bytes(config: VllmConfig) -> int:
    """Return the length of the engine's block hashes, in bytes."""
    from vllm.utils.hashing import get_hash_fn_by_name

    return len(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)(None))
