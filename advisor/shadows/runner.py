"""``ShadowRunner``: a thread that feeds engines' requests to simulated pools."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.compiled import core
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.logs.history import ReplayedWalk, StepSums
from ...graph.ranking.formulas import ClassicPolicy, LruPolicy
from ...graph.ranking.policy import Policy, View
from ...graph.tables.columns import grown
from ...graph.types import Keys, Rows
from ..policies.evidence import PolicySelector
from ..policies.lifecycle import LifecyclePolicy
from ..policies.shadow import newest_resident
from ..process.process import RateLimitedLog
from .ceiling import Ceiling, CeilingShare, RequestWindow, WindowRequest, ceiling
from .pools import (
    CAPACITIES,
    OTHERWISE,
    FoundCounts,
    Guarding,
    LruPool,
    OtherWeights,
    PolicyPool,
    for_all,
    in_sample,
    lru_pool,
    otherwise_pool,
    policy_pool,
    policy_pools,
    size_of,
)

# The sessions that simulated pools follow: a share of them, chosen by a hash of their names.

LEAST: Final = 1 / 64  # the smallest share of sessions; chosen
_SPAN: Final = 1 << 32
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing
_UPPER: Final = np.uint64(32)


class SessionSample:
    """A share of sessions, and of the blocks that they walk.

    A session in a smaller sample is in all larger ones: when the share is halved, earlier counts
    stay valid for the remaining sessions. Each session has a number below ``2 ** 32``, and is
    followed if that number is below the share of ``2 ** 32``.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self.sessions: set[str] = set()
        self._walked: Keys = np.zeros(0, dtype=np.uint64)  # by row: the block that it was then
        # By row: the least place of a session that walked it.
        self._least: npt.NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)

    def has(self, session: str) -> bool:
        """Return whether a session is followed; ``session`` is its tenant's and its own name."""
        place = _place(session)
        if place >= self.share * _SPAN:
            return False
        if len(self.sessions) < 1 << 16:
            self.sessions.add(f"{place:08x}")
        return True

    def walked(self, session: str, rows: Rows, keys: Keys) -> None:
        self._note(rows, keys, np.full(len(rows), _place(session), dtype=np.uint32))

    def seeded(self, rows: Rows, keys: Keys) -> None:
        """Note blocks whose sessions are unknown, as if each belonged to a session of its own."""
        self._note(rows, keys, ((keys * _MULTIPLIER) >> _UPPER).astype(np.uint32))

    def part_of(self, rows: Rows, keys: Keys) -> float:
        """Return the share of these blocks that sessions of the sample walked.

        A prefix that many sessions share is nearly complete in any sample; so this share, and not
        the share of sessions, determines the pool size for the sample.
        """
        if self.share == 1.0 or not len(rows):
            return self.share
        known = rows < len(self._walked)
        rows, keys = rows[known], keys[known]
        ours = (self._walked[rows] == keys) & (self._least[rows] < self.share * _SPAN)
        return float(np.count_nonzero(ours) / len(known))

    def halve(self) -> bool:
        """Follow half as many sessions from now on; returns False if there are none left to
        halve.
        """
        if self.share <= LEAST:
            return False
        self.share /= 2
        self.sessions.clear()
        return True

    def _note(self, rows: Rows, keys: Keys, places: npt.NDArray[np.uint32]) -> None:
        if len(rows) and int(rows.max()) >= len(self._walked):
            size = int(rows.max()) * 5 // 4 + 1
            self._walked, self._least = grown(self._walked, size), grown(self._least, size)
        least, known = self._least[rows], self._walked[rows] == keys
        if known.all() and (least <= places).all():
            return  # as of every end of a request, but for its answer
        self._least[rows] = np.where(known, np.minimum(least, places), places)
        self._walked[rows] = keys


@lru_cache(maxsize=1 << 12)
def _place(session: str) -> int:
    digest = hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little")


# One engine's simulated pools: what each would have found, request by request.

STEP_S: Final = 10.0  # chosen
_STEPS: Final = 1440  # four hours, as for prompt tokens
_ROUNDING: Final = 1e-6  # blocks
_COUNTED: Final = ("tokens", "asked", "ours", "sampled")


class ShadowSet:
    """All simulated pools of one engine. ``asked``, ``ours``: blocks requested by all sessions, and
    those that the live pool found; ``sampled``: blocks requested by sessions of the sample.
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
        self.asked = self.ours = self.sampled = 0
        self.block_size = 0  # tokens; 0 before any request
        self.belady = Ceiling()
        self.beside_belady: dict[str, CeilingShare] = {}  # what others found of the same requests
        controls = [in_sample(each.name) for each in self.lru]
        names = [each.name for each in self.pools]
        self.steps = StepSums((*_COUNTED, *controls, *names, OTHERWISE), STEP_S, _STEPS)

    def _begin(self, policies: Sequence[Policy]) -> None:
        self.sample = SessionSample()
        self._uses = core.RankedPools()  # of the sample: what all policies' pools follow
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
        self.sample.seeded(rows, keys)
        for each in self.ranked:
            each.since, each.before = view.now, self._counted(each.beside)
        self.window.begin()
        self.belady, self.beside_belady = Ceiling(), {}

    def sleep(self, policies: Sequence[Policy]) -> None:
        """Make policies' simulated pools follow nothing until ``wake``, and free their memory."""
        self.awake = False
        self.weigh_alike()
        self._begin(policies)

    @property
    def pools(self) -> list[LruPool | PolicyPool]:
        """Return all simulated pools, LRU's first, and the one of other weights last."""
        return [*self.lru, *self.of_policies]

    @property
    def of_policies(self) -> list[PolicyPool]:
        return [*self.ranked, *([] if self.otherwise is None else [self.otherwise])]

    def hear(self, walk: ReplayedWalk) -> None:
        """Follow a request that started or ended."""
        followed = self.awake and self.sample.has(walk.session)
        if followed:
            new = slice(0 if walk.found >= 0 else walk.reach, None)  # its start told the others
            self.sample.walked(walk.session, walk.rows[new], walk.keys[new])
        if walk.found >= 0:
            self._count(walk, followed)
        else:
            self.window.answered(walk.keys[walk.reach :])
        self._stack.use(walk.rows, walk.keys)
        if followed:
            self._uses.use(walk.rows, walk.keys)

    def _count(self, walk: ReplayedWalk, followed: bool) -> None:
        """Count what a request that began would have found in each pool."""
        before = self.counts()
        ours = min(walk.found + walk.loaded, walk.reach)
        blocks, sampled = len(walk.rows), len(walk.rows) if followed else 0
        self.block_size = walk.size
        self.asked, self.ours = self.asked + blocks, self.ours + ours
        self.sampled += sampled
        prompt = walk.rows[: walk.reach], walk.keys[: walk.reach]
        of_all = self._stack.found(*prompt)
        of_sample = of_all if followed else [0] * len(self.lru)
        by_lru = dict(zip((each.name for each in self.lru), of_all, strict=True))
        ranked = self.of_policies
        of_policies = [0] * len(ranked)
        if followed:
            there = self._uses.found(*prompt)
            of_policies = [
                each.pool.found(there, by_lru[each.beside.name], blocks) for each in ranked
            ]
        within = self.blocks + self.copies
        pools = zip(self.pools, (*of_all, *of_policies), strict=True)
        most = max(ours, *(hits for pool, hits in pools if size_of(pool) <= within))
        self.window.add(walk.keys, walk.reach, ours, most, before)
        for lru, found, in_it in zip(self.lru, of_all, of_sample, strict=True):
            lru.found, lru.sampled_found = lru.found + found, lru.sampled_found + in_it
        for each, found in zip(ranked, of_policies, strict=True):
            each.found += found
        counts = [walk.tokens, blocks, ours, sampled, *of_sample, *of_all, *of_policies]
        self.steps.add(counts, walk.at)

    def rate(self, pool: LruPool | PolicyPool) -> float | None:
        """Return the share of all sessions' blocks that a pool would have found; None before
        any.
        """
        if isinstance(pool, LruPool):
            return pool.found / self.asked if self.asked else None
        if not self.awake:
            return None
        heard = self.heard_by(pool)
        return for_all(pool.found, heard.control, heard.sampled, heard.known, heard.asked)

    def asked_of(self, pool: LruPool | PolicyPool) -> int:
        """Return the blocks requested in what a pool followed, of which it found ``found``."""
        return self.asked if isinstance(pool, LruPool) else self.heard_by(pool).sampled

    def heard_by(self, pool: PolicyPool) -> FoundCounts:
        return self._counted(pool.beside).since(pool.before)

    def _counted(self, lru: LruPool) -> FoundCounts:
        return FoundCounts(self.asked, self.ours, self.sampled, lru.found, lru.sampled_found)

    def counts(self) -> array[int]:
        """Return the counts so far: of all requests, of pools under LRU, and of pools that policies
        rank.
        """
        of_lru = (count for each in self.lru for count in (each.found, each.sampled_found))
        of_policies = (each.found for each in self.ranked)
        return array("q", (self.asked, self.ours, self.sampled, *of_lru, *of_policies))

    def beside(self, window: Sequence[WindowRequest]) -> dict[str, CeilingShare]:
        """Return, by name, how many blocks of these last requests were found by each pool that
        followed all of them.
        """
        first = next((each.counts for each in window if each.counts is not None), None)
        if first is None:
            return {}
        since = [now - before for now, before in zip(self.counts(), first, strict=True)]
        asked, _, sampled = since[:3]
        of_lru, of_policies = since[3 : 3 + 2 * len(self.lru)], since[3 + 2 * len(self.lru) :]
        by_lru = {
            each.name: (of_lru[2 * at], of_lru[2 * at + 1]) for at, each in enumerate(self.lru)
        }
        found = {
            name: CeilingShare(asked, known, known / asked if asked else None)
            for name, (known, _) in by_lru.items()
        }
        for pool, hits in zip(self.ranked, of_policies, strict=True):
            if not self.awake:
                continue
            known, control = by_lru[pool.beside.name]
            share = for_all(hits, control, sampled, known, asked)
            found[pool.name] = CeilingShare(sampled, hits, share)
        return found

    @property
    def is_bounded(self) -> bool:
        """Whether the ceiling is known, and for the same requests as all others, so that no pool
        without more room exceeds it. A sample is an estimate, and may exceed it while there are few
        requests.
        """
        within = self.blocks + self.copies
        beside = (self.beside_belady.get(x.name) for x in self.pools if size_of(x) <= within)
        shares = [each.share or 0.0 for each in beside if each is not None]
        asked, hits, ours = self.belady
        most = max([ours, *(share * asked for share in shares)])
        is_above = hits >= most - _ROUNDING
        return asked > 0 and self.otherwise is None and is_above

    def remembered(self) -> tuple[list[WindowRequest], int]:
        return self.window.taken(), self.blocks

    def hold_what_is_there(self, view: View) -> None:
        """Fill all simulated pools with the live pool's contents, the most recently used on top."""
        rows = newest_resident(view.tables, view.engine)
        keys = view.blocks.keys[rows]
        self._stack.use(rows, keys)
        if self.awake:
            self._uses.use(rows, keys)
            self.sample.seeded(rows, keys)

    def weigh_otherwise(self, weights: OtherWeights, view: View) -> None:
        """Follow other weights from now on, in a pool with the live pool's contents; replaces any
        other weights followed before.
        """
        lru = self.lru[0]
        self.weigh_alike()
        begun = self._counted(lru)
        self.otherwise = otherwise_pool(lru, weights, self._guard, self._uses, view, begun)
        held = newest_resident(view.tables, view.engine)[: lru.blocks]
        self.otherwise.pool.start(held, view.blocks.keys[held])

    def weigh_alike(self) -> None:
        """Stop following other weights."""
        if self.otherwise is not None:
            self.otherwise.pool.leave()
            self.otherwise = None

    def ranking(self, view: View) -> Iterator[None]:
        """Rank again what each policy's simulated pool holds, and resize it to what the sample now
        requests; one pool at a time.
        """
        blocks = view.blocks
        resident = blocks.holding(view.engine).rows
        part = self.sample.part_of(resident, blocks.keys[resident])
        for each in self.of_policies:
            each.pool.resize(max(1, round(self.blocks * each.capacity * part)))
            each.rank(view)
            yield


logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.5  # as often as the planner ranks
# Share of a core, over this many seconds: once it is used up, simulated pools do less. Chosen.
_SHARE_OF_A_CORE: Final = 0.02
_JUDGED_OVER_S: Final = 10.0
_RANK_AT_LEAST_EVERY_S: Final = 64.0  # chosen
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

    def tick(self) -> None:
        """Process everything since the last tick, and rank again."""
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
        if any(each.awake != self._is_watched() for each in self.sets.values()):
            with self._graph.lock, self.lock:
                self._wake_or_sleep()
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
                guard, awake = _guarding(self._graph, column), self._is_watched()
                before = ShadowSet(blocks, self._policies(), copies, guard, awake)
                before.hold_what_is_there(self._view(column))
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
        """Rank half as often; where that is seldom enough, follow half as many sessions."""
        # In this order, since a ranking that is a minute old finds nearly what a fresh one does,
        # and half of the sessions often find something else than all of them (``kvgraph bench
        # dashboard``).
        if self._is_watched() and self.sets and self.rank_every_s < _RANK_AT_LEAST_EVERY_S:
            self.rank_every_s *= 2
            logger.info(
                "shadows are ranked every %g s from now on: they took too long", self.rank_every_s
            )
            return
        with self.lock:
            awake = [each for each in self.sets.values() if each.awake]
            halved = [each for each in awake if each.sample.halve()]
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

    def selector(blocks: int) -> PolicySelector | None:
        referee = graph.referee
        guarded = referee is not None and referee.yields
        return PolicySelector(blocks, referee.trusts(column)) if referee and guarded else None

    return selector
