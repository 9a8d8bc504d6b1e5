"""Connects all of our parts in the scheduler's process."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import vllm

from ...graph.admission import HoldingBounds
from ...graph.wire.advice import EvictionRanking
from ...graph.wire.events import MAX_GROUPS, MAX_NAME, AnyEvent, EngineHello
from ..link.client import AdvisorClient, EngineEnd
from ..link.late import SaltedContents
from ..link.mailbox import Clock
from ..settings import CONNECTOR, TierSettings, engine_settings
from ..tiers.costs import TransferCosts
from ..tiers.jobs import TierWork
from .calls import BlockIds, Calls, Found, calls_of
from .core_choice import new_index, new_tap
from .core_index import CoreIndex, CoreTap
from .core_steps import ARRANGE, DECIDES, CoreDemand, CoreMeter, CoreSteps, new_demand, new_meter
from .free_queue.arranger import FreeQueueArranger
from .groups import OtherGroups, block_hashing, most_blocks_per_step, observed_group
from .holding.arrivals import LiveSessions
from .holding.chunks import PromptChunks
from .holding.holding import Holding
from .holding.queue import HoldingQueue
from .meters import UrgentFlush
from .observer import ChangeFeed, CoreFeed, EngineObserver
from .reading import engine_ends, engine_layers
from .recall.recall import SpanRecall
from .recall.support import new_recall
from .sampled.reporter import SampleReporter
from .tiers.spiller import StepTaken
from .tiers.store import new_bridge, new_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from ..requests.hints import CheckedHints
    from .tiers.bridge import TierCacheBridge

logger = logging.getLogger(__name__)


_EXTRA: Final = "kv_connector_extra_config"
_FETCHERS: Final = (
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector",
    "MoRIIOConnector",
)  # fmt: skip
"""Connectors that read ``do_remote_prefill``; other connectors read it only in consumer engines."""


@dataclass(frozen=True, slots=True)
class SchedulerDependencies:
    """What a scheduler side needs from outside vLLM; tests pass their own. ``connect`` makes the
    client that reports to a sidecar, not started; ``costs`` makes the record of how long moving and
    computing blocks takes.
    """

    connect: Callable[[EngineEnd], AdvisorClient]
    clock: Clock = time.monotonic
    costs: Callable[[Clock], TransferCosts] = TransferCosts


class SchedulerSide:
    """All of our parts in the scheduler's process, connected; ``calls`` lists them. ``bridge`` and
    ``store`` are None without tiers, ``recall`` and ``holding`` when they are off. ``pool`` is
    observed from construction on.
    """

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        pool: BlockPool,
        dependencies: SchedulerDependencies,
        tiers: TierSettings | None = None,
        manager: KVCacheManager | None = None,
    ) -> None:
        self._config, self._pool, self._clock = config, pool, (clock := dependencies.clock)
        self.group = group = observed_group(kv_cache, pool)
        self.index = new_index(kv_cache, pool, group, clock)
        self.arranger = arranger = FreeQueueArranger(
            pool,
            self.index,
            most_blocks_per_step(config, group),
            engine_settings().protect_stale_s,
            clock,
        )
        self.client = dependencies.connect(self)
        self.client.finds, self._emit = self.index.holders, self.client.outbox.emit
        self.holding: Holding | None = None
        self.bridge = bridge = new_bridge(
            config, kv_cache, pool, group, self.index, tiers, self._emit, clock,
            dependencies.costs, manager,
        )  # fmt: skip
        self.store = new_store(config, pool, group, bridge, tiers, self.hello)
        self.recall = new_recall(config, group, bridge, manager, self._meaning)
        self.client.copies = bridge is not None
        self._spans = self.recall if isinstance(self.recall, SpanRecall) else None
        if bridge is not None:
            bridge.may_rest = self.store is None and self._spans is None
        self._groups = OtherGroups(kv_cache, pool, group)
        followers = [each for each in (self._spans, self.store, bridge) if each is not None]
        self.observer = EngineObserver(
            pool, group, self.index, [arranger, *followers], self._emit, stated=arranger.stated,
            named=None if bridge is None else bridge.named, ended=engine_ends(config),
            gone=arranger.evicted, contents=SaltedContents(self.client, group.block_size).of,
            began=engine_layers(config), lacking=self._groups.lacking, clock=clock,
        )  # fmt: skip
        self.sampled = SampleReporter(group, self.observer.running, self._emit).take
        self._prefill = new_meter(self.index, config)
        self._reports = [self._prefill.told_with(self.observer.pressure)]
        self._demand = new_demand(self.index, group)
        self._news = UrgentFlush(pool.num_gpu_blocks, self.client.nudge)
        self.tap = new_tap(pool, group, self.index)
        self.tap.freed, self.tap.touched = arranger.freed, arranger.touched
        if bridge is not None:
            self._reports.append(bridge.ledger.report)
            self.tap.lend, self.tap.renewed = bridge.promises.lend, bridge.promises.renewed
            self.tap.refused = self._give_up_copies
            if bridge.prefetches:
                self.client.ordered = bridge.idle.ordered
            arranger.copies_first(bridge.spiller)
        self._changes = self._new_feed()
        self._steps = self._core_steps()
        self.tap.attach()  # last: until here a failure leaves the pool as it was

    def calls(self) -> Calls:
        """Return the parts that get vLLM's calls, in order, until one of them fails."""
        bridge, store, recall, holding = self.bridge, self.store, self.recall, self.holding
        observer, loader = self.observer, getattr(bridge, "loader", None)
        queued = calls_of("on_new_request", holding) or calls_of("on_new_request", recall, bridge)
        # Last: once a load is ordered, nothing of ours may fail.
        loads = calls_of("update_state_after_alloc", recall) or calls_of(
            "update_state_after_alloc", loader
        )
        return Calls(
            on_new_request=[observer.request_queued, *queued],
            catch_up=[self._catch_up],
            get_num_new_matched_tokens=[
                *calls_of("get_num_new_matched_tokens", store, bridge, recall),
                self._looked_up,
            ],
            update_state_after_alloc=[
                self._scheduled,
                *calls_of("update_state_after_alloc", holding, bridge),
                *loads,
                *calls_of("update_state_after_alloc", store),
            ],
            load_failed=calls_of("load_failed", bridge),
            build_connector_meta=[self.step],
            step_ended=calls_of("step_ended", bridge),
            answered=calls_of("answered", bridge, store),
            sampled=[self.sampled],
            has_pending_push_work=calls_of("has_pending_push_work", bridge, recall, store),
            request_finished=[
                observer.request_finished,
                *calls_of("request_finished", holding, store, bridge, recall),
                self._finished,
            ],
            reset_cache=calls_of("reset_cache", store, bridge, recall),
        )

    def promised_calls(self) -> Calls:
        """Return the parts that complete promised loads after an internal error."""
        return Calls() if self.bridge is None else self.bridge.promised_calls()

    def hold_at(
        self, scheduler: Scheduler, holds: Callable[[Request], bool], gone: Callable[[str], None]
    ) -> None:
        """Hold new sessions of ``scheduler`` from now on while there is no room for them. ``holds``
        asks ``holding`` whether to hold a request; ``gone`` reports a held one that was removed.
        Neither may raise.
        """
        bridge = self.bridge
        sessions = LiveSessions(
            self._pool, self.group, self._meaning,
            None if bridge is None else bridge.ledger.directory.run, _fetches_prompts(scheduler),
        )  # fmt: skip
        queue = HoldingQueue(
            scheduler, holds, gone, calls_of("on_new_request", self.recall, bridge),
            [] if bridge is None else [bridge.line.leave],
        )  # fmt: skip
        pool, step = self._pool.num_gpu_blocks - 1, queue.step_tokens // self.group.block_size or 1
        bounds = HoldingBounds(pool, engine_settings("hold_max_s").hold_max_s, step)
        advice, clock = self.client.admission, self._clock
        behind = int(getattr(self._config, "max_concurrent_batches", 1 + self._prefill.behind)) - 1
        chunks = PromptChunks(scheduler, behind)
        self.holding = Holding(queue, chunks, sessions, advice, self._emit, bounds, clock)
        self._reports.append(self.holding.report)
        if self._steps is not None:
            self._steps.watch(self.holding)

    def leave(self, wait_s: float) -> None:
        """Restore the stock engine; waits at most ``wait_s`` for the client's thread.

        Never raises: an action that fails, as on data that an error left inconsistent, is logged,
        and the others are still done.
        """
        if self.holding is not None:
            _attempt(self.holding.end)
        _attempt(lambda: self.tap.detach(but_resets=self.bridge is not None))
        # A reset that was not caught up with yet is, by this.
        for drop in calls_of("reset_cache", self.store, self.bridge, self.recall):
            _attempt(drop)
        _attempt(lambda: self.client.close(wait_s))

    def _give_up_copies(self) -> None:
        """Take a reset that vLLM refused for one that a trainer asked for: whatever it was, the
        weights may be others by now, and most callers do not look at the answer.
        """
        for drop in calls_of("reset_cache", self.store, self.bridge, self.recall):
            drop()

    def _looked_up(self, request: Request, computed_tokens: int, found: Found) -> Found:
        """Arrange the queue for a load beyond ``computed_tokens``, and for what is computed."""
        to_load = found[0] or 0
        self._demand.looked_up(request, computed_tokens, to_load)
        self._heed_news()
        if self.bridge is not None:
            self.bridge.loader.foresee(to_load)
        self.observer.request_looked_up(request, computed_tokens)
        return found

    def _scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        spliced = 0 if self._spans is None else self._spans.spliced(request, to_load)
        self.observer.request_scheduled(request, to_load, spliced)

    def _finished(self, request: Request, block_ids: BlockIds) -> None:
        self._demand.finished(request.request_id)
        if not self.observer.running:
            self._news.at_rest(self._changes.stored)

    def _meaning(self, request: Request) -> CheckedHints:
        return self.observer.meaning(request)

    def _new_feed(self) -> ChangeFeed:
        tap, index, observer = self.tap, self.index, self.observer
        if not (isinstance(tap, CoreTap) and isinstance(index, CoreIndex)):
            return ChangeFeed(tap, observer, self._demand)
        index.gone = self.arranger.evicted
        if self.bridge is not None:
            observer.hears_evictions = tap.whole = True
            index.core.keep_hashes()
            self.bridge.spiller.scans_with(index.core)
        return CoreFeed(tap, observer, self._demand, index)

    def _core_steps(self) -> CoreSteps | None:
        """What takes the steps of an engine with the compiled core; None: Python does."""
        index, demand, meter = self.index, self._demand, self._prefill
        if not isinstance(index, CoreIndex):
            return None
        assert isinstance(demand, CoreDemand)
        assert isinstance(meter, CoreMeter)
        return CoreSteps(
            index, self.client, self._changes, self.observer, self.arranger, self._news, demand,
            meter, self._arrange, self._emit, self.group.groups_take, self._clock,
        )  # fmt: skip

    def step(self, tokens: int, preempted: Iterable[str] = ()) -> TierWork | None:
        """Report what changed and apply advice; called once per engine step, after its allocations.
        ``tokens`` is the step's token count, ``preempted`` the requests that lost their blocks.
        """
        steps, bridge = self._steps, self.bridge
        if steps is None:
            return self._python_step(tokens, preempted)
        if preempted:
            self.observer.requests_preempted(preempted)
        if bridge is not None:
            return self._tiers_step(steps, bridge, tokens, bool(preempted))
        if due := steps.step(tokens, 0, 0):
            steps.finish(due, tokens)
        return None

    def _python_step(self, tokens: int, preempted: Iterable[str]) -> TierWork | None:
        observer, arranger, bridge = self.observer, self.arranger, self.bridge
        self._prefill.stepped(tokens, observer.running, self._clock())
        taken, ranking = self._changes.take(), self.client.ranking()
        self._news.after_step(self._changes.stored)
        if preempted:
            observer.requests_preempted(preempted)
        fetched = 0 if bridge is None else bridge.offered(self.client.wanted)
        arranger.step_ended(taken)
        arranger.expect(*self._demand.most(len(observer.running), fetched))
        if preempted or not arranger.rests(ranking):
            self._arrange(ranking)
        if self.holding is not None:
            self.holding.step(tokens)
        if bridge is None:
            return None
        return self._moves(bridge, ranking, fetched, StepTaken(tokens, taken, arranger.held_back))

    def _tiers_step(
        self, steps: CoreSteps, bridge: TierCacheBridge, tokens: int, preempted: bool
    ) -> TierWork | None:
        rest, order = bridge.rest, self.client.order
        hears = self._spans is not None or self.tap.was_reset or bridge.hears(steps.core)
        if rest.left >= 0 and tokens and not preempted and order is rest.order and not hears:
            due = steps.step(tokens, 0, 0)
            if not due & DECIDES and rest.passes(tokens, steps.core.taken):
                if due:
                    steps.finish(due, tokens)
                return None
            if fetched := bridge.offered(self.client.wanted):
                self.arranger.expect(*self._demand.most(len(self.observer.running), fetched))
                due |= ARRANGE
        else:
            rest.order = order  # before it is read: what comes meanwhile is another one
            taken = self._changes.take() if hears else 0
            fetched = bridge.offered(self.client.wanted)
            due = steps.step(tokens, fetched, taken)
        if due:
            steps.finish(due, tokens, fetched)
        step = StepTaken(tokens, steps.core.taken, self.arranger.held_back)
        return self._moves(bridge, self.client.ranking(), fetched, step)

    def _moves(
        self,
        bridge: TierCacheBridge,
        ranking: EvictionRanking | None,
        fetched: int,
        step: StepTaken,
    ) -> TierWork:
        if self.store is not None:
            self.store.sharer.step()
        spare = bridge.spill(ranking, fetched, step)
        if spare > 0:
            spare = self.arranger.spare(min(spare, fetched), fetched)
        if self._spans is not None:
            self._spans.copy_due()
        return bridge.fetch(step.tokens, fetched, spare)

    def hello(self) -> EngineHello:
        model = self._config.model_config
        return EngineHello(
            engine=f"{socket.gethostname()}:{os.getpid()}"[:MAX_NAME],
            model=str(model.served_model_name or model.model)[:MAX_NAME],
            block_size=self.group.block_size,
            num_blocks=self._pool.num_gpu_blocks,
            version=f"vllm {vllm.__version__}"[:MAX_NAME],
            groups=self._groups.named[:MAX_GROUPS],
            hashing=block_hashing(self._config.cache_config.prefix_caching_hash_algo),
        )

    def resident(self) -> bytes:
        return self.observer.resident()

    def copies(self) -> list[AnyEvent]:
        return [event for tell in calls_of("copies", self.bridge, self.store) for event in tell()]

    def held(self) -> list[AnyEvent]:
        return [] if self.holding is None else self.holding.held_requests()

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        applied = self.arranger.report(dropped)  # first: what others count is known by that
        pressure, *others = [report() for report in self._reports]
        return [pressure, applied, *others]

    def _heed_news(self) -> None:
        """Arrange the queue before a step allocates, where the last step did not foresee it: advice
        may have come since, as to an idle engine, and a prompt may need more than it took.
        """
        more = self.arranger.expect(*self._demand.most(len(self.observer.running)))
        ranking = self.client.ranking()
        if ranking is None:
            self.arranger.guard_head()
        elif (more or not self.arranger.heeds(ranking)) and not self.arranger.rests(ranking):
            self._arrange(ranking)

    def _arrange(self, ranking: EvictionRanking | None) -> None:
        self.arranger.step(ranking, self.client.remembered(), self.client.linked_since)

    def _catch_up(self) -> None:
        """After a reset, offer and register nothing old: there may be new weights."""
        if self.tap.was_reset:
            self._changes.take()


def _fetches_prompts(scheduler: Scheduler) -> bool:
    """Whether a connector of the user's brings what other engines computed."""
    config = getattr(scheduler.connector, "_kv_transfer_config", None)
    if config is None:
        return False
    return _fetches(config.kv_connector, config.kv_role, config.kv_connector_extra_config)


def _fetches(name: object, role: object, extra: object) -> bool:
    if name == "MultiConnector" and isinstance(extra, Mapping):
        parts = extra.get("connectors")
        return any(
            _fetches(each.get("kv_connector"), each.get("kv_role"), each.get(_EXTRA))
            for each in (parts if isinstance(parts, list) else ())
            if isinstance(each, Mapping)
        )
    # Connectors of caches say kv_both as well, and fetch nothing that a request names.
    roles = ("kv_consumer", "kv_both") if name in _FETCHERS else ("kv_consumer",)
    return name != CONNECTOR and role in roles


def _attempt(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception as error:  # the type only: a message may quote what it choked on
        logger.warning(
            "kvgraph: %s while it left the engine; what else there is to leave is left",
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )
