"""``TierCacheBridge``: decides what moves between the engine's pool, host memory and disk, and
when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from ....graph.messages.advice import EvictionRanking
from ....graph.messages.events import AnyEvent, TierReport
from ....graph.types import Keys
from ...tiers.budget import TierSettings
from ...tiers.jobs import TierAnswer, TierWork, WorkerStart
from ...tiers.ledger import TierLedger
from .loader import Loader
from .prefetcher import Prefetcher
from .spiller import Spiller

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ..observe.index import BlockIndex
    from ..observe.observer import ObservedGroup

_LOOKUPS_IN_VAIN: Final = 64  # before the workers have told what their disks hold


class TierCacheBridge:
    """The tiers of one engine: the pool is HOT, copies in memory are WARM, copies on disk COLD.

    Lives in the scheduler's process, on its thread. It decides and records; ``TierWork`` carries
    the decisions to the workers, and their ``TierAnswer``, one or more steps later, makes the
    results visible.

    Args:
        pool: The live block pool.
        group: The observed KV cache group.
        index: Which block holds which key.
        settings: Budgets of one worker.
        ledger: Where copies are recorded.
        emit: Takes each event for the sidecar; must not wait.
        workers: How many workers answer.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        settings: TierSettings,
        ledger: TierLedger,
        emit: Callable[[AnyEvent], None],
        workers: int,
    ) -> None:
        self.ledger = ledger
        self._group = group
        self._settings = settings
        self._loader = Loader(group, ledger)
        self._spiller = Spiller(pool, group.index, ledger, settings.spill_all)
        self._prefetcher = Prefetcher(pool, group, index, ledger, emit)
        self._needs: dict[str, int] = {}  # request that waits → blocks
        self._found: dict[str, int] = {}  # and how many of them the pool held when it last asked
        self._workers = workers
        self._starts: list[WorkerStart] = []
        self._patience = _LOOKUPS_IN_VAIN if settings.cold_bytes else 0

    # Requests -----------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        """Note that a request waits for blocks in vLLM's queue; a held request needs none yet."""
        self._needs[request.request_id] = 1 + request.num_tokens // self._group.block_size

    def unqueued(self, request_id: str) -> None:
        """Note that a request which waited for blocks is held after all."""
        self._needs.pop(request_id, None)

    def lookup(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Return what a load can bring of a request's tokens; see ``Loader.lookup``."""
        if self._patience and len(self._starts) < self._workers:
            self._patience -= 1
            return None, False  # the first requests after a start are the ones to find the disk
        # The last token is always computed: its logits are what the request wants.
        hashes = self._group.hashes(request, request.num_tokens - 1)
        first = self._found[request.request_id] = computed_tokens // self._group.block_size
        return self._loader.lookup(request.request_id, hashes[first:], first)

    def allocated(self, request: Request, block_ids: Sequence[int], tokens: int) -> None:
        """Note that a request was given blocks; a load fills ``tokens`` tokens of them."""
        self._needs.pop(request.request_id, None)
        if found := self._found.pop(request.request_id, 0):
            hashes = self._group.hashes(request, found * self._group.block_size)
            self._prefetcher.hit(hashes)
            self.ledger.directory.used(hashes)
        self._loader.allocated(request, block_ids, tokens)

    def finished(self, request_id: str) -> None:
        """Note that a request ended."""
        self._needs.pop(request_id, None)
        self._found.pop(request_id, None)
        self._loader.finished(request_id)

    # Steps --------------------------------------------------------------------------------------

    def step(self, ranking: EvictionRanking | None, wanted: Keys | None, tokens: int) -> TierWork:
        """Decide, after a step's allocations, what the workers shall do.

        Args:
            ranking: The latest advice; None without any.
            wanted: Keys that the sidecar suggests to bring back, best first.
            tokens: Tokens scheduled in this step.
        """
        ledger = self.ledger
        ledger.costs.step_began(tokens)
        taken = 1 + tokens // self._group.block_size + self._loader.take_begun()
        suggested = wanted if self._settings.prefetch else None
        more = self._prefetcher.offered(suggested) if suggested is not None else 0
        spare = self._spiller.step(ranking, taken, more, idle=not tokens)
        if more:
            self._prefetcher.step(spare, sum(self._needs.values()))
        return self.outstanding()

    def outstanding(self) -> TierWork:
        """Take the orders that the workers were not given yet."""
        ledger = self.ledger
        directory = ledger.directory
        return TierWork(
            ledger.book.take(),
            directory.take_released(),
            directory.take_erased(),
            directory.take_cleared(),
        )

    def step_ended(self) -> None:
        """Note that a step's output arrived."""
        self.ledger.costs.step_ended()

    def answered(self, answer: TierAnswer) -> None:
        """Take what the workers did."""
        for start in answer.starts:
            self._started(start)
        failure: Exception | None = None
        for done in answer.done:
            try:
                self.ledger.book.answer(done)
            except Exception as error:  # the others' blocks must come back all the same
                failure = error
        if failure is not None:
            raise failure

    @property
    def busy(self) -> bool:
        """Whether the engine must go on stepping to learn the end of a job.

        A write to the disk does not count: no request waits for it, and a disk may hang.
        """
        return self.ledger.book.pressing > 0

    @property
    def borrowed(self) -> list[KVCacheBlock]:
        """Blocks of the pool that prefetches are filling; always the same list."""
        return self._prefetcher.held

    def copied(self, hashes: Sequence[bytes]) -> int:
        """How many of ``hashes``, from the first on, can be brought back."""
        return self.ledger.directory.run(hashes)

    @property
    def loading(self) -> bool:
        """Whether requests wait for a load."""
        return self._loader.under_way > 0

    # What happened to the pool ------------------------------------------------------------------

    def adapted(self, keys: Sequence[int]) -> None:
        """Note that the engine cached ``keys``, which a LoRA adapter computed."""
        self.ledger.adapted.update(keys)

    def evicted(self, keys: Sequence[int]) -> None:
        """Note that the engine evicted ``keys``."""
        self._spiller.evicted(keys)
        self._prefetcher.evicted(keys)

    def clear(self) -> None:
        """Drop all copies: the prefix cache was reset, perhaps for new weights."""
        self._prefetcher.clear()
        self.drop_copies()

    def drop_copies(self) -> None:
        """Give up what the colder tiers hold."""
        self.ledger.clear()

    # For the sidecar, from the client's thread --------------------------------------------------

    def report(self) -> TierReport:
        """Return levels and counters as an event."""
        return self.ledger.report()

    def copies(self) -> list[AnyEvent]:
        """Return every copy."""
        return self.ledger.all_copies()

    def _started(self, start: WorkerStart) -> None:
        if len(self._starts) < self._workers:
            self._starts.append(start)
            if len(self._starts) == self._workers:
                self.ledger.started(self._starts)


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
    settings: TierSettings,
    emit: Callable[[AnyEvent], None],
) -> TierCacheBridge:
    """Make the bridge of an engine that ``reason_to_refuse`` accepts."""
    layers = kv_cache.kv_cache_groups[0]
    block_bytes = len(layers.layer_names) * layers.kv_cache_spec.page_size_bytes
    workers = config.parallel_config.world_size
    ledger = TierLedger(block_bytes, workers, emit, time.monotonic, settings.spill_all)
    return TierCacheBridge(pool, group, index, settings, ledger, emit, workers)
