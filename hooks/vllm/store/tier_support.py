"""Which engines can have tiers; makes the tiers of one that can, with or without a store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....graph.messages.events import AnyEvent, EngineHello
from ...tiers.budget import TierSettings
from ...tiers.costs import TransferCosts
from ...tiers.ledger import TierLedger
from ..transfers.bridge import TierCacheBridge
from ..transfers.no_tiers import NoTiers
from ..transfers.worker import OpenRecords

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ..observe.group import ObservedGroup
    from ..pool.index import BlockIndex

logger = logging.getLogger(__name__)


def reason_to_refuse(
    config: VllmConfig, kv_cache: KVCacheConfig, group: ObservedGroup
) -> str | None:
    """Why this engine's blocks cannot have copies; None if they can."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups, parallel = kv_cache.kv_cache_groups, config.parallel_config
    if len(groups) != 1:
        return f"a hybrid model with {len(groups)} KV cache groups; supported: one group"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        return f"KV cache of {type(spec).__name__}; supported: full attention"
    if group.scale != 1:
        return "blocks are hashed in parts (hash_block_size is not block_size)"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits blocks between workers"
    return None


def new_bridge(
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    pool: BlockPool,
    group: ObservedGroup,
    index: BlockIndex,
    settings: TierSettings | None,
    emit: Callable[[AnyEvent], None],
    clock: Callable[[], float],
    costs: Callable[[Callable[[], float]], TransferCosts],
    manager: KVCacheManager | None,
    hello: Callable[[], EngineHello],
) -> TierCacheBridge | NoTiers:
    """Make an engine's bridge, if tiers are asked for and possible."""
    if settings is None:
        return NoTiers()
    if reason := reason_to_refuse(config, kv_cache, group):
        logger.warning("kvgraph: no tiers in this engine: %s", reason)
        return NoTiers()
    layers = kv_cache.kv_cache_groups[0]
    block_bytes = len(layers.layer_names) * layers.kv_cache_spec.page_size_bytes
    workers = config.parallel_config.world_size
    ledger = TierLedger(block_bytes, workers, emit, clock, costs(clock), settings.spill_all)
    by_priority = config.scheduler_config.policy == "priority"
    if settings.store is not None:
        from .store_bridge import StoreBridge  # asked for, or never imported

        return StoreBridge(
            pool, group, index, settings, ledger, emit, workers, manager, by_priority, hello
        )
    return TierCacheBridge(
        pool, group, index, settings, ledger, emit, workers, manager, by_priority
    )


def records_opener(settings: TierSettings) -> OpenRecords | None:
    """Return what opens a worker's records in the shared store; None where there is no store."""
    store = settings.store
    if store is None:
        return None
    from .worker_store import open_records  # asked for, or never imported

    return lambda config, cache: open_records(config, store, cache)
