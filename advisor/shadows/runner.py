"""``ShadowRunner``: a thread that feeds engines' requests to simulated pools."""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ...graph.compiled import core
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.logs.history import ReplayedWalk, StepSums
from ...graph.ranking.formulas import ClassicPolicy, LruPolicy
from ...graph.ranking.policy import Policy, View
from ...graph.tables.blocks import UNPLACED
from ..policies.evidence import PolicySelector
from ..policies.lifecycle import LifecyclePolicy
from ..policies.shadow import newest_resident
from ..process.process import RateLimitedLog
from .ceiling import Ceiling, FoundOf, RequestWindow, WindowRequest, ceiling
from .pools import (
    CAPACITIES,
    OTHERWISE,
    FoundCounts,
    Guarding,
    LruPool,
    OtherWeights,
    PolicyPool,
    lru_pool,
    policy_pool,
    policy_pools,
    size_of,
)

# One engine's shadows: what each would have found, request by request.

STEP_S: Final = 10.0  # chosen
_STEPS: Final = 1440  # of these: four hours, as of the tokens of prompts
_COUNTED: Final = ("tokens", "asked", "ours")
_MOST_SESSIONS: Final = 1 << 16  # that are counted; chosen


class ShadowSet:
    """All shadows of one engine. ``asked``, ``ours``: blocks that were asked for, and what the live
    pool found.
    """

    def __init__(
        self,
        blocks: int,  # the live pool's size
        policies: Sequence[Policy],  # those that rank shadows, the live one first
        copies: int = 0,  # that fit into the engine's colder tiers
        guard: Guarding = lambda blocks: None,  # sees to it that LRU ranks where it finds more
        # whether policies' shadows follow from the start; LRU's, which rank nothing, always do. See
        # `wake`
        awake: bool = True,
    ) -> None:
        self.blocks, self.copies, self._guard = blocks, copies, guard
        self.awake = awake
        self.lru = [lru_pool(blocks, capacity) for capacity in CAPACITIES]
        if copies:
            both = blocks + copies
            self.lru.append(LruPool("lru + tiers", both / blocks, both, has_tiers=True))
        self.otherwise: PolicyPool | None = None
        self._begin(policies)
        self._stack = core.LruStack([each.blocks for each in self.lru])
        self.window = RequestWindow()
        self.asked = self.ours = 0
        self.unordered = (
            0  # blocks listed in no order: see the guard's; LRU's pools may err by them
        )
        self.block_size = 0  # tokens; 0 before any request
        self.belady = Ceiling()
        self.beside_belady: dict[str, FoundOf] = {}  # what others found of the same requests
        names = [each.name for each in self.pools]
        self.steps = StepSums((*_COUNTED, *names, OTHERWISE), STEP_S, _STEPS)

    def _begin(self, policies: Sequence[Policy]) -> None:
        self.sessions: set[int] = set()  # hashes of names: which policies' pools followed
        self._uses = core.RankedPools()  # what all policies' pools follow
        guard, (*sizes, largest) = self._guard, self.lru
        self.ranked = policy_pools(sizes if self.copies else self.lru, policies, guard, self._uses)
        if self.copies:
            self.ranked += [
                policy_pool(largest, f"{each.name} + tiers", each, guard, self._uses)
                for each in policies[:1]
            ]
        if not self.awake:
            for each in self.ranked:
                each.since = math.inf

    def wake(self, policies: Sequence[Policy], view: View) -> None:
        """Make policies' simulated pools follow requests from now on, with the live pool's
        contents.
        """
        self.awake = True
        self._begin(policies)
        rows = newest_resident(view.tables, view.engine)
        keys = view.blocks.keys[rows]
        self._uses.use(rows, keys)
        for each in self.ranked:
            each.since, each.before = view.now, FoundCounts(self.asked, self.ours)
        self.window.begin()
        self.belady, self.beside_belady = Ceiling(), {}

    def sleep(self, policies: Sequence[Policy]) -> None:
        """Make policies' simulated pools follow nothing until ``wake``, and free their memory."""
        self.awake = False
        self.weigh_alike()
        self._begin(policies)

    @property
    def pools(self) -> list[LruPool | PolicyPool]:
        """All shadows, those of LRU first, and last that of other weights."""
        return [*self._lasting, *([] if self.otherwise is None else [self.otherwise])]

    @property
    def _lasting(self) -> list[LruPool | PolicyPool]:
        return [*self.lru, *self.ranked]

    @property
    def of_policies(self) -> list[PolicyPool]:
        return [*self.ranked, *([] if self.otherwise is None else [self.otherwise])]

    def hear(self, walk: ReplayedWalk) -> None:
        """Follow a request that began or ended."""
        if self.awake and len(self.sessions) < _MOST_SESSIONS:
            self.sessions.add(hash(walk.session))
        if walk.found >= 0:
            self._count(walk)
        else:
            self.window.answered(walk.keys[walk.reach :])
        self._stack.use(walk.rows, walk.keys)
        if self.awake:
            self._uses.use(walk.rows, walk.keys)

    def _count(self, walk: ReplayedWalk) -> None:
        """Count what a request that began would have found in each pool."""
        before = self.counts()
        blocks, ours = len(walk.rows), min(walk.found + walk.loaded, walk.reach)
        self.block_size = walk.size
        self.asked, self.ours = self.asked + blocks, self.ours + ours
        prompt = walk.rows[: walk.reach], walk.keys[: walk.reach]
        by_lru = self._stack.found(*prompt)
        if self.unordered > 0:  # an engine that LRU ranks finds itself what LRU finds
            self.unordered -= blocks - by_lru[0]
            held, each = min(walk.found, walk.reach), zip(self.lru, by_lru, strict=True)
            by_lru = [max(n, held) if pool.blocks >= self.blocks else n for pool, n in each]
        beside = dict(zip((each.name for each in self.lru), by_lru, strict=True))
        ranked, there = self.of_policies, self._uses.found(*prompt) if self.awake else None
        by_policies = [
            0 if there is None else each.finds(there, beside[each.beside.name], blocks)
            for each in ranked
        ]
        found = [*by_lru, *by_policies]
        pools, within = self.pools, self.blocks + self.copies
        pairs = list(zip(pools, found, strict=True))
        most = max(ours, *(hits for pool, hits in pairs if size_of(pool) <= within))
        self.window.add(walk.keys, walk.reach, ours, most, before)
        for pool, hits in pairs:
            pool.found += hits
        self.steps.add([walk.tokens, blocks, ours, *found], walk.at)

    def rate(self, pool: LruPool | PolicyPool) -> float | None:
        """The share of the blocks asked for that a shadow would have found; None before any."""
        asked = self.asked_of(pool)
        return pool.found / asked if asked else None

    def asked_of(self, pool: LruPool | PolicyPool) -> int:
        """Blocks that were asked for while a shadow followed, of which it found ``found``."""
        if isinstance(pool, LruPool):
            return self.asked
        return self.heard_by(pool).asked if self.awake else 0

    def heard_by(self, pool: PolicyPool) -> FoundCounts:
        return FoundCounts(self.asked, self.ours).since(pool.before)

    def counts(self) -> array[int]:
        """What was counted so far: of all, of pools under LRU, and of those that policies rank."""
        return array("q", (self.asked, self.ours, *(each.found for each in self._lasting)))

    def beside(self, window: Sequence[WindowRequest]) -> dict[str, FoundOf]:
        """What each shadow that has followed all of these last requests found of them, by name."""
        first = next((each.counts for each in window if each.counts is not None), None)
        if first is None:
            return {}
        asked, _, *found = (now - then for now, then in zip(self.counts(), first, strict=True))
        known = self._lasting if self.awake else self.lru
        return {pool.name: FoundOf(asked, hits) for pool, hits in zip(known, found, strict=False)}

    @property
    def is_bounded(self) -> bool:
        """Whether the ceiling is known, and of the same requests as all others: it stands above who
        has no more room.
        """
        within = self.blocks + self.copies
        beside = (self.beside_belady.get(x.name) for x in self.pools if size_of(x) <= within)
        asked, hits, ours = self.belady
        most = max([ours, *(each.found for each in beside if each is not None)])
        return asked > 0 and self.otherwise is None and hits >= most

    def remembered(self) -> tuple[list[WindowRequest], int]:
        return self.window.taken(), self.blocks

    def hold_what_is_there(self, view: View, before: float) -> None:
        """Fill all simulated pools with what the live pool held at that time, the most recently
        used on top.
        """
        rows = newest_resident(view.tables, view.engine)
        rows = rows[view.blocks.created[rows] < before]
        keys = view.blocks.keys[rows]
        self._stack.use(rows, keys)
        self.unordered = int((view.blocks.depth[rows] >= UNPLACED).sum())
        if self.awake:
            self._uses.use(rows, keys)

    def weigh_otherwise(self, weights: OtherWeights, view: View) -> None:
        """Follow other weights from now on, in a pool with the live pool's contents; replaces any
        other weights followed before.
        """
        lru = self.lru[0]
        self.weigh_alike()
        self.otherwise = PolicyPool(
            OTHERWISE, OTHERWISE, weights.whole_scores, lru, self._guard(lru.blocks), self._uses
        )
        self.otherwise.since, self.otherwise.before = view.now, FoundCounts(self.asked, self.ours)
        held = newest_resident(view.tables, view.engine)[: lru.blocks]
        self.otherwise.start(held, view.blocks.keys[held])

    def weigh_alike(self) -> None:
        """Stop following other weights."""
        if self.otherwise is not None:
            self.otherwise.leave()
            self.otherwise = None

    def ranking(self, view: View) -> Iterator[None]:
        """Rank what each policy's shadow holds again, shadow by shadow."""
        for each in self.of_policies:
            each.rank(view)
            yield


logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5  # as often as the planner ranks
# Share of a core, over this many seconds: once it is used up, simulated pools do less. Chosen.
_SHARE_OF_A_CORE: Final = 0.02
_JUDGED_OVER_S: Final = 10.0
_RANK_AT_LEAST_EVERY_S: Final = 1024.0  # chosen
_CEILING_EVERY_S: Final = 60.0
_CEILINGS_SHARE: Final = 1 / 60  # of a core, for all ceilings; chosen
_ASKED_LATELY_S: Final = 120.0  # a ceiling is computed only while a client requests it
_FOLLOWED_S: Final = 600.0  # after the last request for it, policies' pools still follow; chosen


class ShadowRunner:
    """The simulated pools of all engines; see ``ShadowSet``."""

    def __init__(
        self,
        graph: KVCacheGraph,  # the graph that the engines tell
        clock: Callable[[], float],  # monotonic seconds, the graph's clock
        # seconds of a processor core that the calling thread has used
        cpu: Callable[[], float] = time.thread_time,
        *,
        # whether policies' shadows follow although nobody looks: what they find while nobody does,
        # nobody asks for
        always: bool = False,
    ) -> None:
        self._graph, self._always = graph, always
        self._clock, self._cpu = clock, cpu
        self._notices = RateLimitedLog(logger, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-shadows", daemon=True)
        self._spent, self._judged = 0.0, clock()
        # Of a processor core, by the last tick; its ceilings, which have a share of their own, are
        # not counted.
        self.spent_s = 0.0
        self.rank_every_s = INTERVAL_S  # seconds between rankings of policies' shadows
        self._next_ranking = clock()
        self._next_ceiling = clock()
        self._looked = float("-inf")
        self._stirred: set[str] = set()  # engines with requests since they were ranked
        self.lock = threading.Lock()
        # Weights that are not in force and have a shadow, if any.
        self.otherwise: OtherWeights | None = None
        self.sets: dict[str, ShadowSet] = {}  # engine → its shadows; read it under ``lock``

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def looked(self) -> None:
        self._looked = self._clock()

    def remembered(self, engine: str) -> tuple[list[WindowRequest], int]:
        with self.lock:
            shadows = self.sets.get(engine)
            return ([], 0) if shadows is None else shadows.remembered()

    def weigh_otherwise(self, weights: OtherWeights) -> None:
        self.looked()
        with self._graph.lock, self.lock:
            self.otherwise = weights
            self._wake_or_sleep()
            for engine, shadows in self.sets.items():
                if (column := self._graph.tables.engines.get(engine)) is not None:
                    shadows.weigh_otherwise(weights, self._view(column))

    def weigh_alike(self) -> None:
        with self._graph.lock, self.lock:
            self.otherwise = None
            for shadows in self.sets.values():
                shadows.weigh_alike()

    def tick(self) -> bool:
        """Process everything since the last tick, and rank again; returns whether there was
        anything.
        """
        began = self._cpu()
        with self._graph.lock:
            heard = self._graph.tables.history.listen()
            names = {column: name for name, column in self._graph.tables.engines.items()}
            self._keep_sets(heard)
        with self.lock:
            for each in heard:
                name = names.get(each.engine, "")
                if (shadows := self.sets.get(name)) is not None:
                    shadows.hear(each)
                    self._stirred.add(name)
        if any(each.awake != self._is_watched() for each in self.sets.values()):
            with self._graph.lock, self.lock:
                self._wake_or_sleep()
        self._rank()
        self.spent_s = self._cpu() - began
        self._spent += self.spent_s
        self._judge()
        self._look_ahead()
        return bool(heard)

    def _rank(self) -> None:
        """Rank the sets of engines that were asked for something, if it is time to."""
        now = self._clock()
        if now < self._next_ranking:
            return
        self._next_ranking = now + self.rank_every_s
        stirred, self._stirred = self._stirred, set()
        for engine in stirred & self.sets.keys():
            if (
                self.sets[engine].awake
                and (column := self._graph.tables.engines.get(engine)) is not None
            ):
                self._in_slices(self.sets[engine].ranking(self._view(column)))

    def _in_slices(self, work: Iterator[None]) -> None:
        """Do all of ``work``, with the locks held for one slice at a time."""
        over = False
        while not over:
            with self._graph.lock, self.lock:
                over = next(work, True) is not None

    def _keep_sets(self, heard: Sequence[ReplayedWalk]) -> None:
        """Keep one set per engine that reported the size of its pool; a new one if that changes,
        which is still to hear these.
        """
        tables = self._graph.tables
        kept = dict[str, ShadowSet]()
        for engine, column in tables.engines.items():
            blocks = tables.usable_blocks(column)
            if blocks < 1:
                continue
            copies = self._copies(column)
            before = self.sets.get(engine)
            if before is None or (before.blocks, before.copies) != (blocks, copies):
                guard, awake = _guarding(self._graph, column), self._is_watched()
                before = ShadowSet(blocks, self._policies(), copies, guard, awake)
                # what these brought is not there yet
                first = min((x.at for x in heard if x.engine == column), default=math.inf)
                before.hold_what_is_there(self._view(column), first)
                if self.otherwise is not None and awake:
                    before.weigh_otherwise(self.otherwise, self._view(column))
            kept[engine] = before
        with self.lock:
            self.sets = kept

    def _is_watched(self) -> bool:
        return self._always or self._clock() - self._looked <= _FOLLOWED_S

    def _wake_or_sleep(self) -> None:
        """Have policies' shadows follow while somebody looks, and else not; with both locks."""
        watched, engines = self._is_watched(), self._graph.tables.engines
        for engine, shadows in self.sets.items():
            if shadows.awake == watched or (column := engines.get(engine)) is None:
                continue
            if not watched:
                shadows.sleep(self._policies())
                continue
            self.rank_every_s = INTERVAL_S
            shadows.wake(self._policies(), self._view(column))
            if self.otherwise is not None:
                shadows.weigh_otherwise(self.otherwise, self._view(column))

    def _copies(self, column: int) -> int:
        """How many copies fit into an engine's colder tiers."""
        tiers = self._graph.tables.reports[column].tiers
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
        less often where that would take more than its share of a core.
        """
        now = self._clock()
        if now - self._looked > _ASKED_LATELY_S:
            with self.lock:
                for shadows in self.sets.values():  # the next reader gets figures from now on
                    shadows.belady, shadows.beside_belady = Ceiling(), {}
            return
        if now < self._next_ceiling:
            return
        began = self._cpu()
        for shadows in list(self.sets.values()):
            with self.lock:
                window, capacity = shadows.window.since_begun(), shadows.blocks
                beside = shadows.beside(window)
            found = ceiling(window, capacity + shadows.copies)
            with self.lock:
                shadows.belady, shadows.beside_belady = found, beside
        took_s = self._cpu() - began
        self._next_ceiling = now + max(_CEILING_EVERY_S, took_s / _CEILINGS_SHARE)

    def _judge(self) -> None:
        """Do less if this takes more of a core than allowed: at once, since one tick may take all
        that it has for long.
        """
        now = self._clock()
        too_much = self._spent > _SHARE_OF_A_CORE * _JUDGED_OVER_S
        if too_much:
            self._do_less()
        if too_much or now - self._judged >= _JUDGED_OVER_S:
            self._spent, self._judged = 0.0, now

    def _do_less(self) -> None:
        """Rank half as often: a ranking that is a minute old finds nearly what a fresh one does."""
        if self._is_watched() and self.sets and self.rank_every_s < _RANK_AT_LEAST_EVERY_S:
            self.rank_every_s *= 2
            logger.info(
                "shadows are ranked every %g s from now on: they took too long", self.rank_every_s
            )

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._stopping.wait(pause_s):
            try:
                pause_s = INTERVAL_S if self.tick() else 2 * INTERVAL_S
            except Exception as error:
                self._notices.warn("shadows", "shadows failed (%s)", type(error).__name__)
                logger.debug("shadows failed", exc_info=True)


def _guarding(graph: KVCacheGraph, column: int) -> Guarding:
    """What the live guard thinks of the policy, for shadows to begin with."""

    def selector(blocks: int) -> PolicySelector | None:
        referee = graph.referee
        guarded = referee is not None and referee.yields
        return PolicySelector(blocks, referee.trusts(column)) if referee and guarded else None

    return selector
