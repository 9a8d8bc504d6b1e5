"""``StoreTier``: the tier below an engine's other tiers, a store that engines share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ....graph.types import Tier
from ....graph.wire.events import AnyEvent, EngineHello
from ....kernels.errors import StorageError
from ...requests.hints import may_be_shared
from ...settings import StoreSettings, TierSettings
from ...store.sealed import SealedRecords
from ...store.stores import open_store
from ...tiers.costs import TransferCosts
from ...tiers.jobs import TierAnswer
from ...tiers.ledger import TierLedger, copied_events
from ..core_index import CoreIndex
from .bridge import TierCacheBridge
from .sharing import Sharer, StoreLookup
from .worker import OpenRecords, disk_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ....kernels.layout import PagedKv
    from ..calls import BlockIds, Found
    from ..groups import ObservedGroup
    from ..index import BlockIndex
    from ..tap import Changes

logger = logging.getLogger(__name__)


class StoreTier:
    """The shared store below the other tiers; its tier is POOL.

    Blocks of a prompt that pool, memory and disk lack are looked up in the store, once per request,
    and loaded through memory. Blocks of ended requests are written to it. After a reset of the
    prefix cache the weights may no longer be those that records are named by, so this engine
    neither reads nor writes the store from then on.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        bridge: TierCacheBridge,
        settings: StoreSettings,
        workers: int,
        hello: Callable[[], EngineHello],
    ) -> None:
        ledger = bridge.ledger
        self._group, self._ledger, self._hello, self._workers = group, ledger, hello, workers
        self._names: list[str] = []
        self._failed = self._loaded = 0  # when the workers answered last
        self.lookup = _lookup(settings, ledger.clock)
        ledger.reads_store = self.lookup is not None
        allowed, at_end = permits(settings), settings.at_turn_end
        self.sharer = Sharer(pool, group, ledger, bridge.spiller, allowed, at_end)

    def get_num_new_matched_tokens(
        self, request: Request, computed_tokens: int, found: Found
    ) -> Found:
        """Return ``found``, or have vLLM ask again while the store's answer is awaited."""
        if self.lookup is not None and self.lookup.names:
            first = computed_tokens // self._group.block_size
            hashes = self._group.hashes(request, request.num_tokens - 1)[first:]
            if self._waits(self.lookup, request.request_id, hashes):
                return None, False
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, _: int) -> None:
        self._offered(request.request_id)
        self.sharer.request_scheduled(request)

    def request_finished(self, request: Request, _: BlockIds) -> None:
        self._offered(request.request_id)
        if self.lookup is not None:
            self.lookup.forget(request.request_id)
        self.sharer.request_finished(request.request_id)

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take the workers' answers, after the bridge; the first state records' names."""
        self._names += [start.store_name for start in answer.starts]
        if answer.starts and self.lookup is not None and len(self._names) == self._workers:
            self.lookup.names = self._names if all(self._names) else []
            self.lookup.mark(self._hello)
        counts = self._ledger.counts
        if (
            counts.store_failed > self._failed
            and counts.store_loaded == self._loaded
            and self.lookup
        ):
            self.lookup.distrust()
        self._failed, self._loaded = counts.store_failed, counts.store_loaded

    def has_pending_push_work(self) -> bool:
        return self.sharer.busy

    def changed(self, changes: Changes) -> None:
        """Note whether the prefix cache was reset."""
        if changes.then_reset:
            self.reset_cache()

    def reset_cache(self) -> bool:
        self._ledger.reads_store = False
        self.sharer.end()
        if self.lookup is not None:
            self.lookup.end()
            self.lookup = None
        return True

    def copies(self) -> list[AnyEvent]:
        return copied_events(self.sharer.known(), Tier.POOL, self._ledger.block_bytes)

    def _waits(self, lookup: StoreLookup, name: str, hashes: Sequence[bytes]) -> bool:
        """Whether a request waits for the store on blocks that the pool lacks."""
        if not lookup.asked(name):
            missing = hashes[self._ledger.directory.run(hashes) :]
            tokens = len(missing) * self._group.block_size
            if not tokens or not self._ledger.costs.worth_asking(tokens):
                return False
            lookup.ask(name, missing)
        if lookup.waits(name):
            return True
        if (word := lookup.take(name)) is not None:
            self._offer(hashes, *word)
        return False

    def _offer(
        self, hashes: Sequence[bytes], asked: Sequence[bytes], there: Sequence[bytes]
    ) -> None:
        """Let a load find what the store has, with memory to bring it to."""
        directory = self._ledger.directory
        self.sharer.missing(asked[len(there) :])
        self.sharer.found(there)
        missing = [each for each in there if each not in directory]
        directory.in_store.update(missing)
        kept = directory.pinned(hashes)  # else they might be given up for the others
        self._ledger.make_room(len(missing), ())
        directory.unpin_all(filter(None, kept))

    def _offered(self, request_id: str) -> None:
        """Offer no longer what was found for a request: it loads, or does without."""
        if self.lookup is not None and self._ledger.directory.in_store:
            there = self.lookup.there(request_id)
            self._ledger.directory.in_store.difference_update(there)


def permits(settings: StoreSettings) -> Callable[[Request], bool]:
    """Return a test of whether a request's blocks may leave this engine. They may not with an
    adapter, which may be trained further under its name; with a cache salt, unless the operator
    allows it; or if the caller forbids it.
    """

    def permitted(request: Request) -> bool:
        salt_permits = settings.salted or not request.cache_salt
        alone = request.lora_request is None
        return salt_permits and alone and may_be_shared(request.kv_transfer_params)

    return permitted


def _lookup(settings: StoreSettings, clock: Callable[[], float]) -> StoreLookup | None:
    try:
        return StoreLookup(open_store(settings, adds=False), clock)
    except StorageError as error:
        logger.warning("kvgraph: no shared store: %s", error)
        return None


def reason_to_refuse(
    config: VllmConfig, kv_cache: KVCacheConfig, group: ObservedGroup
) -> str | None:
    """Return why this engine's blocks cannot have copies; None if they can."""
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
) -> TierCacheBridge | None:
    """Make an engine's bridge, if tiers are asked for and possible."""
    if settings is None:
        return None
    assert manager is not None, "vLLM binds it before the pool"
    if reason := reason_to_refuse(config, kv_cache, group):
        logger.warning("kvgraph: no tiers in this engine: %s", reason)
        return None
    if settings.prefetch and getattr(pool, "enable_kv_cache_events", False):
        # An event holds the block's tokens, which only a request knows. Without it, routers that
        # follow these events drop what is stored behind the block, for want of its parent.
        logger.info("kvgraph: nothing is prefetched: this engine publishes KV events")
        settings = replace(settings, prefetch=False)
    layers = kv_cache.kv_cache_groups[0]
    block_bytes = len(layers.layer_names) * layers.kv_cache_spec.page_size_bytes
    workers = config.parallel_config.world_size
    compiled = isinstance(index, CoreIndex)
    ledger = TierLedger(
        block_bytes, workers, emit, clock, costs(clock), settings.spill_all, compiled
    )
    return TierCacheBridge(pool, group, index, settings, ledger, emit, workers, manager)


def new_store(
    config: VllmConfig,
    pool: BlockPool,
    group: ObservedGroup,
    bridge: TierCacheBridge | None,
    settings: TierSettings | None,
    hello: Callable[[], EngineHello],
) -> StoreTier | None:
    if bridge is None or settings is None or settings.store is None:
        return None
    workers = config.parallel_config.world_size
    return StoreTier(pool, group, bridge, settings.store, workers, hello)


def records_opener(settings: TierSettings) -> OpenRecords | None:
    """Return a function that opens a worker's records in the shared store; None without a store."""
    store = settings.store
    if store is None:
        return None

    return lambda config, cache: open_records(config, store, cache)


_NAME_DIGITS: Final = 32  # 128 bits, for all models that ever share a store; chosen


def open_records(
    config: VllmConfig, settings: StoreSettings, cache: PagedKv
) -> tuple[SealedRecords, str] | None:
    """Open this worker's store; returns records and name, or None with the reason logged."""
    try:
        name = records_name(config, cache)
        records = SealedRecords(open_store(settings), name)
    except StorageError as error:
        logger.warning("kvgraph: no shared store: %s", error)
        return None
    logger.info("kvgraph: what is computed is shared in %s", settings.place)
    return records, name


def records_name(config: VllmConfig, cache: PagedKv) -> str:
    """Return the name that every worker on any machine gives to records with the same bytes. It
    covers the model, its weights, and this worker's share of a block: its rank among those of one
    engine, and the layout of its cache. Raises StorageError if the weights cannot be told from
    others.
    """
    whole = repr((disk_identity(config), config.parallel_config.rank, cache.layout.record(1)))
    return hashlib.sha256(whole.encode()).hexdigest()[:_NAME_DIGITS]
