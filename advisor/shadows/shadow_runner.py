"""``ShadowRunner``: a thread that feeds engines' requests to shadows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.ranking.formulas import ClassicPolicy, LruPolicy
from ...graph.ranking.policy import Policy
from ...graph.ranking.view import View
from ..policies.lifecycle import LifecyclePolicy
from ..policies.trust import Trust
from ..process.notices import Notices
from .ceiling import Ceiling, Walked, ceiling
from .other_weights import OtherWeights
from .shadow_pools import Guarding
from .shadow_set import ShadowSet

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5  # as often as the planner ranks
# Of a core, over so many seconds: once it is used up, shadows do less. Chosen.
_SHARE_OF_A_CORE: Final = 0.02
_JUDGED_OVER_S: Final = 10.0
_RANK_AT_LEAST_EVERY_S: Final = 64.0  # chosen
_CEILING_EVERY_S: Final = 60.0
_CEILINGS_SHARE: Final = 1 / 60  # of a core, for all ceilings; chosen
_ASKED_LATELY_S: Final = 120.0  # a ceiling is worked out only while somebody looks


class ShadowRunner:
    """Shadows of all engines; see ``ShadowSet``.

    Args:
        graph: The graph that the engines tell.
        clock: Monotonic seconds, the graph's clock.
        cpu: Seconds of a processor core that the calling thread has used.

    Attributes:
        sets: engine → its shadows; read it under ``lock``.
        otherwise: Weights that are not in force and have a shadow, if any.
        rank_every_s: Seconds between rankings of policies' shadows.
        spent_s: Of a processor core, by the last tick; its ceilings, which have a share of their
            own, are not counted.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        clock: Callable[[], float],
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._graph = graph
        self._clock, self._cpu = clock, cpu
        self._notices = Notices(logger, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-shadows", daemon=True)
        self._spent, self._judged = 0.0, clock()
        self.spent_s = 0.0
        self.rank_every_s = INTERVAL_S
        self._next_ranking = clock()
        self._next_ceiling = clock()
        self._looked = float("-inf")
        self._stirred: set[str] = set()  # engines with requests since they were ranked
        self.lock = threading.Lock()
        self.otherwise: OtherWeights | None = None
        self.sets: dict[str, ShadowSet] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def looked(self) -> None:
        """Note that the results are being looked at."""
        self._looked = self._clock()

    def remembered(self, engine: str) -> tuple[list[Walked], int]:
        """The requests of an engine that are remembered, and the pool that its shadows have."""
        with self.lock:
            shadows = self.sets.get(engine)
            return ([], 0) if shadows is None else shadows.remembered()

    def weigh_otherwise(self, weights: OtherWeights) -> None:
        """Follow other weights from now on, instead of those that were followed before."""
        with self._graph.lock, self.lock:
            self.otherwise = weights
            for engine, shadows in self.sets.items():
                if (column := self._graph.tables.engines.get(engine)) is not None:
                    shadows.weigh_otherwise(weights, self._view(column))

    def weigh_alike(self) -> None:
        """Follow no other weights any more."""
        with self._graph.lock, self.lock:
            self.otherwise = None
            for shadows in self.sets.values():
                shadows.weigh_alike()

    def tick(self) -> None:
        """Take what happened since the last tick, and rank again."""
        began = self._cpu()
        with self._graph.lock:
            heard = self._graph.tables.history.listen()
            names = {column: name for name, column in self._graph.tables.engines.items()}
            self._keep_sets()
        with self.lock:
            for each in heard:
                name = names.get(each.engine, "")
                if (shadows := self.sets.get(name)) is not None:
                    shadows.hear(each)
                    self._stirred.add(name)
        self._rank()
        self.spent_s = self._cpu() - began
        self._spent += self.spent_s
        self._judge()
        self._look_ahead()

    def _rank(self) -> None:
        """Rank the sets of engines that were asked for something, if it is time to."""
        now = self._clock()
        if now < self._next_ranking:
            return
        self._next_ranking = now + self.rank_every_s
        stirred, self._stirred = self._stirred, set()
        for engine in stirred & self.sets.keys():
            if (column := self._graph.tables.engines.get(engine)) is not None:
                self._in_slices(self.sets[engine].ranking(self._view(column)))

    def _in_slices(self, work: Iterator[None]) -> None:
        """Do all of ``work``, with the locks held for one slice at a time."""
        over = False
        while not over:
            with self._graph.lock, self.lock:
                over = next(work, True) is not None

    def _keep_sets(self) -> None:
        """Keep one set per engine that reported the size of its pool; a new one if that changes."""
        tables = self._graph.tables
        kept = dict[str, ShadowSet]()
        for engine, column in tables.engines.items():
            blocks = tables.pool_blocks.get(column, 0) - 1  # vLLM keeps one for itself
            if blocks < 1:
                continue
            copies = self._copies(column)
            before = self.sets.get(engine)
            if before is None or (before.blocks, before.copies) != (blocks, copies):
                before = ShadowSet(blocks, self._policies(), copies, _guarding(self._graph, column))
                before.hold_what_is_there(self._view(column))
                if self.otherwise is not None:
                    before.weigh_otherwise(self.otherwise, self._view(column))
            kept[engine] = before
        with self.lock:
            self.sets = kept

    def _copies(self, column: int) -> int:
        """How many copies fit into an engine's colder tiers."""
        tiers = self._graph.tables.words[column].tiers
        return 0 if tiers is None else tiers.warm_capacity + tiers.cold_capacity

    def _policies(self) -> list[Policy]:
        """The live policy (where that is LRU: the default from its prior) and the classic one."""
        live = self._graph.policy
        others: list[Policy] = [ClassicPolicy()]
        if isinstance(live, LruPolicy):
            return [LifecyclePolicy(), *others]
        return [live, *(each for each in others if each.name != live.name)]

    def _view(self, column: int) -> View:
        return View(self._graph.tables, self._graph.rules, column, self._graph.clock())

    def _look_ahead(self) -> None:
        """Compute Belady's hits of the window, while the results are looked at: once a minute, or
        less often where that would take more than its share of a core."""
        now = self._clock()
        if now - self._looked > _ASKED_LATELY_S:
            with self.lock:
                for shadows in self.sets.values():  # whoever looks next is told of what is new
                    shadows.belady, shadows.beside_belady = Ceiling(), {}
            return
        if now < self._next_ceiling:
            return
        began = self._cpu()
        for shadows in list(self.sets.values()):
            with self.lock:
                window, capacity = shadows.remembered()
                beside = shadows.beside(window)
            found = ceiling(window, capacity + shadows.copies)
            with self.lock:
                shadows.belady, shadows.beside_belady = found, beside
        took_s = self._cpu() - began
        self._next_ceiling = now + max(_CEILING_EVERY_S, took_s / _CEILINGS_SHARE)

    def _judge(self) -> None:
        """Do less if this takes more of a core than allowed: at once, since one tick may take all
        that it has for long."""
        now = self._clock()
        too_much = self._spent > _SHARE_OF_A_CORE * _JUDGED_OVER_S
        if too_much:
            self._do_less()
        if too_much or now - self._judged >= _JUDGED_OVER_S:
            self._spent, self._judged = 0.0, now

    def _do_less(self) -> None:
        """Rank half as often; where that is seldom enough, follow half as many sessions.

        In this order, since a ranking that is a minute old finds nearly what a fresh one does, and
        half of the sessions often find something else than all of them (``kvgraph bench
        dashboard``).
        """
        if self.sets and self.rank_every_s < _RANK_AT_LEAST_EVERY_S:
            self.rank_every_s *= 2
            logger.info(
                "shadows are ranked every %g s from now on: they took too long",
                self.rank_every_s,
            )
            return
        with self.lock:
            halved = [engine for engine, each in self.sets.items() if each.halve()]
        if halved:
            logger.info("policies' shadows follow half as many sessions: they took too long")

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            try:
                self.tick()
            except Exception as error:
                self._notices.warn("shadows", "shadows failed (%s)", type(error).__name__)
                logger.debug("shadows failed", exc_info=True)


def _guarding(graph: KVCacheGraph, column: int) -> Guarding:
    """What the live guard thinks of the policy, for shadows to begin with."""

    def trust(blocks: int) -> Trust | None:
        referee = graph.referee
        guarded = referee is not None and referee.yields
        return Trust(blocks, referee.trusts(column)) if referee and guarded else None

    return trust
