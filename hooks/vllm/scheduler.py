"""Everything of ours that lives in the scheduler's process, wired together."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import vllm

from ...graph.messages.advice import HOLD_MAX_S, PRESSING_SHARE, EvictionRanking
from ...graph.messages.events import AdviceApplied, AnyEvent, EngineHello
from ...graph.waiting.holding_rule import HoldingBounds
from ..client import AdvisorClient, ClientOptions
from ..tiers.budget import TierSettings
from ..tiers.jobs import TierAnswer, TierWork
from .free_queue.arranger import FreeQueueArranger
from .holding.arrivals import LiveSessions
from .holding.holding import Holding
from .holding.holding_queue import HoldingQueue
from .observe.index import BlockIndex
from .observe.observer import EngineObserver, EvictionListener, ObservedGroup
from .observe.tags import MAX_NAME
from .observe.tap import PoolTap
from .settings import hold_max_s, protect_stale_s
from .shapes import is_full_attention
from .transfers.bridge import TierCacheBridge, new_bridge, reason_to_refuse
from .transfers.promises import Promises

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SchedulerSide:
    """Everything that lives in the scheduler's process, wired together."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        pool: BlockPool,
        endpoint: str,
        tiers: TierSettings | None = None,
        manager: KVCacheManager | None = None,
    ) -> None:
        group = observed_group(kv_cache, pool)
        self._config = config
        self._pool = pool
        self.group = group
        self.index = BlockIndex(pool)
        protect_s = protect_stale_s()
        self.arranger = FreeQueueArranger(
            pool, self.index, most_blocks_per_step(config, group), protect_s
        )
        self.client = AdvisorClient(endpoint, self, ClientOptions(protect_stale_s=protect_s))
        self.tap = PoolTap(pool, group.index)
        self.bridge = self._new_bridge(kv_cache, tiers) if tiers is not None else None
        self.promises: Promises | None = None
        self.holding: Holding | None = None
        listeners: list[EvictionListener] = [self.arranger]
        if self.bridge is not None:
            listeners.append(self.bridge)
            self.tap.lend = self.bridge.borrowed.copy
            if manager is not None:
                self.promises = Promises(pool, manager)
                self.tap.lend, self.tap.renewed = self.promises.lend, self.promises.renewed
        adapted = [self.bridge.adapted] if self.bridge is not None else []
        self.observer = EngineObserver(
            pool, group, self.index, listeners, self.client.emit, self.arranger.stated, *adapted
        )
        self._told_of = 0
        self._pressing = max(1, int(PRESSING_SHARE * pool.num_gpu_blocks))
        self.tap.freed = self.arranger.freed
        self.tap.attach()  # last: until here a failure leaves the pool as it was

    def hold_at(
        self,
        scheduler: Scheduler,
        holds: Callable[[Request], bool],
        gone: Callable[[str], None],
    ) -> None:
        """From now on, hold new sessions of ``scheduler`` while there is no room for them.

        Args:
            holds: Asks ``holding`` whether a request is to be held; must not raise.
            gone: Tells ``holding`` of a held request that was removed; must not raise.
        """
        sessions = LiveSessions(self._pool, self.group, self.observer.meaning, self._copied)
        bounds = HoldingBounds(self._pool.num_gpu_blocks - 1, hold_max_s(HOLD_MAX_S))
        queue = HoldingQueue(scheduler, holds, gone)
        client = self.client
        self.holding = Holding(queue, sessions, client.admission, client.emit, bounds)
        if self.bridge is not None:
            queue.queued, queue.unqueued = self.bridge.queued, self.bridge.unqueued

    # Requests -----------------------------------------------------------------------------------

    def request_queued(self, request: Request) -> None:
        """A request arrived."""
        self.observer.request_queued(request)
        if self.bridge is None:
            return
        if self.holding is None or not self.holding.queue.is_held(request.request_id):
            self.bridge.queued(request)

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """The prefix cache holds ``computed_tokens``: what more can a load bring?"""
        self._catch_up()
        self._heed_news()
        self.observer.request_looked_up(request, computed_tokens)
        if self.bridge is None:
            return 0, False
        return self.bridge.lookup(request, computed_tokens)

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """A request got blocks, ``to_load`` tokens of which a load is to fill."""
        self.observer.request_scheduled(request, to_load)
        if self.holding is not None:
            self.holding.scheduled(request)
        if self.promises is not None:
            if to_load:
                self.promises.made(request)
            else:
                self.promises.scheduled(request.request_id)
        if self.bridge is not None:  # last: once a load is ordered, nothing of ours may fail
            ids = blocks.get_block_ids()[self.group.index]
            self.bridge.allocated(request, ids, to_load)

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """A request ended; its blocks are about to be freed."""
        self.observer.request_finished(request, block_ids)
        if self.holding is not None:
            self.holding.finished(request)
        if self.bridge is not None:
            self.bridge.finished(request.request_id)
        if self.promises is not None:
            self.promises.finished(request.request_id)

    # Steps --------------------------------------------------------------------------------------

    def step(self, tokens: int, preempted: Iterable[str] = ()) -> TierWork | None:
        """Once an engine step, after its allocations: tell what changed, apply advice.

        Args:
            tokens: Scheduled in this step.
            preempted: Ids of requests that had to give up their blocks.
        """
        self.observer.blocks_changed(self.tap.take())
        self.observer.requests_preempted(preempted)
        if self.observer.stored - self._told_of >= self._pressing:
            self._told_of = self.observer.stored
            self.client.nudge()
        ranking = self.client.ranking()
        self._arrange(ranking)
        if self.holding is not None:
            self.holding.step()
        if self.bridge is None:
            return None
        return self.bridge.step(ranking, self.client.wanted(), tokens)

    def step_ended(self) -> None:
        """A step's output arrived."""
        self._catch_up()
        if self.bridge is not None:
            self.bridge.step_ended()

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """What the workers moved until then, and requests whose loads are over."""
        try:
            if self.bridge is not None:
                self.bridge.answered(answer)
        finally:
            if self.promises is not None:
                self.promises.received(received)

    @property
    def busy(self) -> bool:
        """Whether transfers are under way whose end only another step can tell."""
        return self.bridge is not None and self.bridge.busy

    def drop_copies(self) -> bool:
        """Give up what the colder tiers hold; False while a request waits for some of it."""
        if self.bridge is None:
            return True
        self.bridge.drop_copies()
        return not self.promises.binding if self.promises is not None else not self.bridge.loading

    # For the client, on its thread --------------------------------------------------------------

    def hello(self) -> EngineHello:
        """See ``EngineEnd``."""
        model = self._config.model_config
        return EngineHello(
            engine=f"{socket.gethostname()}:{os.getpid()}"[:MAX_NAME],
            model=str(model.served_model_name or model.model)[:MAX_NAME],
            block_size=self.group.block_size,
            num_blocks=self._pool.num_gpu_blocks,
            version=f"vllm {vllm.__version__}"[:MAX_NAME],
        )

    def resident(self) -> bytes:
        """See ``EngineEnd``."""
        return self.observer.resident()

    def copies(self) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        return self.bridge.copies() if self.bridge is not None else []

    def held(self) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        return self.holding.told() if self.holding is not None else []

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        applied = _applied(self.arranger, dropped)
        tiers = [self.bridge.report()] if self.bridge is not None else []
        holding = [self.holding.report()] if self.holding is not None else []
        return [self.observer.pressure(), applied, *tiers, *holding]

    def _copied(self, hashes: Sequence[bytes]) -> int:
        return self.bridge.copied(hashes) if self.bridge is not None else 0

    def _heed_news(self) -> None:
        """Apply advice that came since the last step: an idle engine takes none, and allocates."""
        ranking = self.client.ranking()
        if ranking is not None and not self.arranger.heeds(ranking):
            self._arrange(ranking)

    def _arrange(self, ranking: EvictionRanking | None) -> None:
        self.arranger.step(ranking, self.client.remembered(), self.client.linked_since)

    def _catch_up(self) -> None:
        """After a reset there may be new weights: nothing old is offered or registered any more."""
        if self.tap.was_reset:
            self.observer.blocks_changed(self.tap.take())

    def _new_bridge(self, kv_cache: KVCacheConfig, tiers: TierSettings) -> TierCacheBridge | None:
        if reason := reason_to_refuse(self._config, kv_cache, self.group):
            logger.warning("kvgraph: no tiers in this engine: %s", reason)
            return None
        return new_bridge(
            self._config, kv_cache, self._pool, self.group, self.index, tiers, self.client.emit
        )


def _applied(arranger: FreeQueueArranger, dropped: int) -> AdviceApplied:
    return AdviceApplied(
        epoch=arranger.epoch,
        moved=arranger.moved,
        recycled=arranger.recycled,
        stale=arranger.stale,
        protected_evicted=arranger.protected_evicted,
        dropped=dropped,
    )


def observed_group(kv_cache: KVCacheConfig, pool: BlockPool) -> ObservedGroup:
    """The group whose prefix reaches furthest back: the first with full attention.

    Hybrid models keep several groups under the same hashes; a sliding-window group drops blocks
    that the others still hold, so following more than one would contradict itself.
    """
    groups = kv_cache.kv_cache_groups
    full = (i for i, group in enumerate(groups) if is_full_attention(group.kv_cache_spec))
    index = next(full, 0)
    size = groups[index].kv_cache_spec.block_size if len(groups) > 1 else pool.hash_block_size
    return ObservedGroup(index, size, pool.hash_block_size)


def most_blocks_per_step(config: VllmConfig, group: ObservedGroup) -> int:
    """An upper bound of what one step allocates: every batched token new, each request a tail."""
    scheduler = config.scheduler_config
    return int(scheduler.max_num_batched_tokens) // group.block_size + int(scheduler.max_num_seqs)
