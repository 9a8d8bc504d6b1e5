"""Wires together everything of ours that lives in the scheduler's process."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import vllm

from ...graph.admission import HoldingBounds
from ...graph.wire.advice import EvictionRanking
from ...graph.wire.events import MAX_GROUPS, MAX_NAME, AnyEvent, EngineHello
from ..link.client import AdvisorClient, EngineEnd
from ..link.late import SaltedContents
from ..link.mailbox import Clock
from ..settings import CONNECTOR, TierSettings, engine_settings
from ..tiers.costs import TransferCosts
from ..tiers.jobs import TierAnswer, TierWork
from .core_choice import new_index, new_tap
from .core_index import CoreIndex, CoreTap
from .core_steps import CoreDemand, CoreMeter, CoreSteps, new_demand, new_meter
from .free_queue.arranger import FreeQueueArranger
from .groups import OtherGroups, block_hashing, most_blocks_per_step, observed_group
from .holding.arrivals import LiveSessions
from .holding.holding import Holding, NoHolding
from .holding.queue import HoldingQueue
from .meters import PressingNews
from .observer import ChangeFeed, CoreFeed, EngineObserver
from .reading import engine_ends, engine_layers
from .recall.support import attach_recall
from .sampled.reporter import SampleReporter
from .tiers.bridge import NoTiers, TierCacheBridge
from .tiers.spiller import StepTaken
from .tiers.store import new_bridge

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from .sampled.measuring import Sample

logger = logging.getLogger(__name__)


_EXTRA: Final = "kv_connector_extra_config"
_FETCHERS: Final = (
    "NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector",
    "MoRIIOConnector",
)  # fmt: skip
"""Connectors that read ``do_remote_prefill``. Of others, an engine that only consumes does."""
Told = dict[str, Any] | None  # to the caller of a request that ended: its ``kv_transfer_params``


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a scheduler side meets that is not vLLM; a test passes its own.

    Attributes:
        connect: Makes the client that tells a sidecar of the side; it is not started.
        clock: Monotonic seconds, the clock that rankings are dated in.
        costs: Makes the book of what moving blocks and computing them takes.
    """

    connect: Callable[[EngineEnd], AdvisorClient]
    clock: Clock = time.monotonic
    costs: Callable[[Clock], TransferCosts] = TransferCosts


class SchedulerSide:
    """Everything that lives in the scheduler's process, wired together.

    Args:
        config: The engine's.
        kv_cache: Its groups of layers.
        pool: The live block pool; observed from here on.
        surroundings: Sidecar, clock and costs.
        tiers: Budgets of the colder tiers, where they are asked for.
        manager: vLLM's book of which request holds which blocks.
    """

    attached = True
    holding: Holding | NoHolding = NoHolding()

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        pool: BlockPool,
        surroundings: Surroundings,
        tiers: TierSettings | None = None,
        manager: KVCacheManager | None = None,
    ) -> None:
        self._config, self._pool, self._clock = config, pool, (clock := surroundings.clock)
        self.group = group = observed_group(kv_cache, pool)
        self.index = new_index(kv_cache, pool, group, clock)
        self.arranger = arranger = FreeQueueArranger(
            pool,
            self.index,
            most_blocks_per_step(config, group),
            engine_settings().protect_stale_s,
            clock,
        )
        self.client = surroundings.connect(self)
        self.client.finds, self._emit = self.index.holders, self.client.outbox.emit
        self.bridge = bridge = new_bridge(
            config, kv_cache, pool, group, self.index, tiers, self._emit, clock,
            surroundings.costs, manager, self.hello,
        )  # fmt: skip
        self.client.copies = not isinstance(bridge, NoTiers)
        self._groups = OtherGroups(kv_cache, pool, group)
        self.observer = EngineObserver(
            pool, group, self.index, [arranger, bridge], self._emit, stated=arranger.stated,
            adapted=bridge.adapted, ended=engine_ends(config), gone=arranger.evicted, clock=clock,
            contents=SaltedContents(self.client, group.block_size).of,
            began=engine_layers(config), lacking=self._groups.lacking)  # fmt: skip
        self.sampled = SampleReporter(group, self.observer.running, self._emit).take
        self._prefill = new_meter(self.index, config)
        self._reports = [self._prefill.told_with(self.observer.pressure), *bridge.reports]
        self._demand = new_demand(self.index, group)
        self._news = PressingNews(pool.num_gpu_blocks, self.client.nudge)
        self.tap = new_tap(pool, group, self.index)
        self.tap.freed, self.tap.touched = arranger.freed, arranger.touched
        self.tap.lend, self.tap.renewed = bridge.lend, bridge.renewed
        if not isinstance(bridge, NoTiers):
            arranger.copies_first(bridge.spiller)
        self._is_bare = isinstance(bridge, NoTiers)
        self._recall = attach_recall(config, group, bridge, manager, self.observer.meaning)
        self._changes = self._new_feed()
        self._steps = self._core_steps()
        self.tap.attach()  # last: until here a failure leaves the pool as it was

    def hold_at(
        self, scheduler: Scheduler, holds: Callable[[Request], bool], gone: Callable[[str], None]
    ) -> None:
        """From now on, hold new sessions of ``scheduler`` while there is no room for them.

        Args:
            holds: Asks ``holding`` whether a request is to be held; must not raise.
            gone: Tells ``holding`` of a held request that was removed; must not raise.
        """
        sessions = LiveSessions(
            self._pool, self.group, self.observer.meaning, self.bridge.copied,
            _fetches_prompts(scheduler),
        )  # fmt: skip
        queue = HoldingQueue(scheduler, holds, gone)
        pool, step = self._pool.num_gpu_blocks - 1, queue.step_tokens // self.group.block_size or 1
        bounds = HoldingBounds(pool, engine_settings("hold_max_s").hold_max_s, step)
        queue.queued, queue.unqueued = self.bridge.request_queued, self.bridge.request_unqueued
        advice, clock = self.client.admission, self._clock
        self.holding = Holding(queue, sessions, advice, self._emit, bounds, clock)
        self._reports.append(self.holding.report)
        if self._steps is not None:
            self._steps.watch(self.holding)

    def leave(self, wait_s: float) -> None:
        """Give the engine back to itself; waits at most ``wait_s`` for the client's thread.

        Never raises: an act that fails, as on a record that an error left torn, is logged, and the
        others are done all the same.
        """
        _attempt(self.holding.end)
        _attempt(lambda: self.tap.detach(but_resets=self.bridge.keeps_promises))
        _attempt(self.bridge.drop_copies)  # a reset that was not caught up with yet is, by this
        _attempt(lambda: self.client.close(wait_s))

    def request_queued(self, request: Request) -> None:
        """Note that a request arrived."""
        self.observer.request_queued(request)
        if not self.holding.is_held(request.request_id):
            self.bridge.request_queued(request)

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Say what a load can bring beyond the ``computed_tokens`` in the prefix cache."""
        self._catch_up()
        found = self.bridge.request_looked_up(request, computed_tokens)
        self._demand.looked_up(request, computed_tokens, found[0] or 0)
        self._heed_news()
        self.bridge.foresee(found[0] or 0)
        self.observer.request_looked_up(request, computed_tokens)
        return found

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """Note that a request got blocks; a load fills ``to_load`` tokens of them."""
        self.observer.request_scheduled(request, to_load, self._recall.spliced(request, to_load))
        self.holding.scheduled(request)
        self.bridge.request_scheduled(request, blocks, to_load)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Told:
        """Note that a request ended, and that its blocks are about to be freed."""
        self.observer.request_finished(request, block_ids)
        self.holding.finished(request)
        told = self.bridge.request_finished(request.request_id)
        self._demand.finished(request.request_id)
        if not self.observer.running:
            self._news.at_rest(self._changes.stored)
        return told

    def _new_feed(self) -> ChangeFeed:
        tap, index, observer = self.tap, self.index, self.observer
        if not (isinstance(tap, CoreTap) and isinstance(index, CoreIndex)):
            return ChangeFeed(tap, observer, self._demand)
        index.gone = self.arranger.evicted
        if not isinstance(self.bridge, NoTiers):
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
        steps = CoreSteps(
            index, self.client, self._changes, self.observer, self.arranger, self._news, demand,
            meter, self._arrange, self._emit, self.group.groups_take, self._clock,
        )  # fmt: skip
        steps.watch(self.holding)
        return steps

    def step(self, tokens: int, preempted: Iterable[str] = ()) -> TierWork | None:
        """Report what changed and apply advice; called once per engine step, after its allocations.

        Args:
            tokens: Tokens scheduled in this step.
            preempted: Ids of requests that had to give up their blocks.
        """
        steps = self._steps
        if steps is not None:
            if preempted:
                self.observer.requests_preempted(preempted)
            if self._is_bare:
                if due := steps.step(tokens, 0, 0):
                    steps.finish(due)
                return None
            taken = self._changes.take() if self.bridge.hears or self.tap.was_reset else 0
            fetched = self.bridge.offered(self.client.wanted)
            if due := steps.step(tokens, fetched, taken):
                steps.finish(due, fetched)
            step = StepTaken(tokens, steps.taken, self.arranger.held_back)
            return self.bridge.step(self.client.ranking(), fetched, step)
        observer, demand, arranger = self.observer, self._demand, self.arranger
        self._prefill.stepped(tokens, observer.running, self._clock())
        taken, ranking = self._changes.take(), self.client.ranking()
        self._news.after_step(self._changes.stored)
        observer.requests_preempted(preempted)
        fetched = self.bridge.offered(self.client.wanted)
        arranger.step_ended(taken)
        arranger.expect(*demand.most(len(observer.running), fetched))
        if not arranger.rests(ranking):
            self._arrange(ranking)
        self.holding.step()
        return self.bridge.step(ranking, fetched, StepTaken(tokens, taken, arranger.held_back))

    def step_ended(self) -> None:
        """Note that a step's output arrived."""
        self._catch_up()
        self.bridge.step_ended()

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take what the workers moved until then, and the requests whose loads are over."""
        self.bridge.answered(answer, received)

    @property
    def busy(self) -> bool:
        """Whether only another step can report the end of a transfer, or begin one."""
        return self.bridge.busy

    def drop_copies(self) -> bool:
        """Give up what the colder tiers hold; False while a request waits for some of it."""
        return self.bridge.drop_copies()

    def hello(self) -> EngineHello:
        """See ``EngineEnd``."""
        return EngineHello(
            engine=f"{socket.gethostname()}:{os.getpid()}"[:MAX_NAME],
            model=_model_name(self._config)[:MAX_NAME],
            block_size=self.group.block_size,
            num_blocks=self._pool.num_gpu_blocks,
            version=f"vllm {vllm.__version__}"[:MAX_NAME],
            groups=self._groups.named[:MAX_GROUPS],
            hashing=block_hashing(self._config.cache_config.prefix_caching_hash_algo),
        )

    def resident(self) -> bytes:
        """See ``EngineEnd``."""
        return self.observer.resident()

    def copies(self) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        return self.bridge.copies()

    def held(self) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        return self.holding.held_requests()

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        """See ``EngineEnd``."""
        applied = self.arranger.report(dropped)  # first: what others count is known by that
        pressure, *others = [report() for report in self._reports]
        return [pressure, applied, *others]

    def _heed_news(self) -> None:
        """Arrange the queue before a step allocates, where the last step did not foresee it: advice
        may have come since, as to an idle engine, and a prompt may need more than it took."""
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


def _model_name(config: VllmConfig) -> str:
    model = config.model_config
    return str(model.served_model_name or model.model)


def _attempt(act: Callable[[], object]) -> None:
    try:
        act()
    except Exception as error:  # the type only: a message may quote what it choked on
        logger.warning(
            "kvgraph: %s while it left the engine; what else there is to leave is left",
            type(error).__name__,
            exc_info=logger.isEnabledFor(logging.DEBUG),
        )


# Takes the place of our scheduler side before it exists and after it failed; decides nothing.


class Detached:
    """Answers vLLM as if nothing of ours were there, and completes what vLLM was promised.

    No request may wait for ever. Jobs under way are followed to their end, so that the blocks which
    they fill return to the pool; a load whose orders were never written is given to the workers as
    one that cannot succeed. Resets are followed for good, since vLLM goes on holding blocks back
    for loads of an engine that was given tiers.

    Args:
        bridge: The tiers of the side that failed, if it had any.
    """

    attached = False

    def __init__(self, bridge: TierCacheBridge | NoTiers | None = None) -> None:
        self.bridge = bridge or NoTiers()
        self.bridge.retire()
        self.holding = NoHolding()

    @property
    def busy(self) -> bool:
        """Whether workers still have something to report."""
        return self.bridge.owes

    def hold_at(
        self, scheduler: Scheduler, holds: Callable[[Request], bool], gone: Callable[[str], None]
    ) -> None:
        """Hold no request."""

    def request_queued(self, request: Request) -> None:
        """Do nothing."""

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Say that no load brings anything."""
        return 0, False

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """Note that a request runs, perhaps after a load that it was promised."""
        self.bridge.request_resumed(request.request_id)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Note that a request ended, perhaps before a load that it was promised."""
        self.bridge.promise_ended(request.request_id)

    def step(self, tokens: int, preempted: Iterable[str] = ()) -> TierWork | None:
        """Return the orders that the workers still need."""
        return self.bridge.outstanding()

    def step_ended(self) -> None:
        """Do nothing."""

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take what the workers did, and which loads are over."""
        self.bridge.answered(answer, received)

    def sampled(self, samples: Iterable[Sample]) -> None:
        """Do nothing."""

    def drop_copies(self) -> bool:
        """Allow the reset: nothing is offered any more, and promised loads are no reason to refuse
        it."""
        return True

    def leave(self, wait_s: float) -> None:
        """Do nothing."""
