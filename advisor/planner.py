"""``GraphEvictionAdvisor``: ranks each engine's blocks twice a second, as an immutable ranking."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from ..graph.kvcache_graph import KVCacheGraph
from ..graph.logs.evictions import NO_TERMS, TermsAtRanking
from ..graph.ranking.order import front_terms
from ..graph.ranking.policy import View
from ..graph.types import NO_ROW, Keys
from ..graph.wire.advice import PRESSING_SHARE, AdmissionAdvice, EvictionRanking
from .admission import Admission
from .config.sections import PrefetchConfig
from .process.process import RateLimitedLog


class PrefetchOrder(NamedTuple):
    """Copies that an engine should load ahead of use, best first, as of ``ts``."""

    ts: float
    keys: Keys


class PrefetchOrders:
    """One prefetch order per engine. Unless said otherwise, callers hold the graph's lock."""

    def __init__(
        self, graph: KVCacheGraph, bounds: PrefetchConfig, clock: Callable[[], float]
    ) -> None:
        self._graph = graph
        self._clock = clock
        self._versions: dict[str, int] = {}  # the graph's, when each engine's order was made
        self.bounds = bounds  # of each order; may be replaced
        self.due: list[int] = []  # rows of sessions that were expected back at the last `find_due`
        # Engine → order, replaced whole by one assignment; read it from any thread.
        self.latest: Mapping[str, PrefetchOrder] = MappingProxyType({})

    def cannot_wait(self, seconds: float) -> bool:
        """Return whether another session is due back within ``seconds``. Takes no lock."""
        tables, within_s = self._graph.tables, min(seconds, self._graph.rules.horizon_s)
        if not self.bounds.enabled or tables.sessions.soonest >= self._clock() + within_s:
            return False
        return any(reports.tiers for reports in list(tables.reports.values()))

    def find_due(self, _: str = "") -> None:
        """Find the sessions of any engine that are expected back soon; see ``due``."""
        sessions = self._graph.tables.sessions
        sessions.soonest = math.inf
        self.due = sessions.soon(self._graph.rules.horizon_s, self._clock()).tolist()

    def made(self, engine: str) -> PrefetchOrder:
        """Return an engine's prefetch order. The last one is returned again if it was empty,
        nothing has changed on the engine since, and no session is due.
        """
        # With a session due it is computed even for an unchanged graph: its return comes closer.
        version, before = self._graph.changes.of(engine), self.latest.get(engine)
        idle = before is not None and not len(before.keys) and not self.due
        if before is not None and idle and self._versions.get(engine) == version:
            return before
        self._versions[engine] = version
        limit = self.bounds.max_blocks if self.bounds.enabled else 0
        return PrefetchOrder(self._clock(), self._graph.prefetch_order(engine, limit))

    def keep(self, orders: dict[str, PrefetchOrder]) -> None:
        """Publish ``orders``, and forget those of all other engines."""
        self._versions = {each: self._versions[each] for each in orders.keys() & self._versions}
        self.latest = MappingProxyType(orders)


logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# Even an unchanged graph is ranked again after this time, since hints expire. Age alone lowers all
# blocks by the same amount and reorders nothing.
RERANK_AFTER_S: Final = 10.0
# While nothing changes, a round only says that advice still holds: every second interval, and once
# a second at least. Chosen; engines ignore advice that is 2 s old.
_QUIET: Final = 2.0
_QUIET_S: Final = 1.0
_TELL_EVERY_S: Final = 0.1  # between publications in a round of many engines; chosen
_ROOMY: Final = 0.25  # blank share of a pool above which no ranking is needed; chosen
_REST: Final = 4.0  # seconds of rest per second of ranking; chosen
_ORDERS_APART_S: Final = 0.02  # least seconds of rest after making orders only; chosen
# Seconds of rest per second of ranking while rankings and orders are all empty, at most
# `_LONGEST_REST_S`: a fortieth of a core. Chosen; docs/results.md shows the cost.
_LONG_REST: Final = 39.0
_LONGEST_REST_S: Final = 0.6  # chosen: empty advice is hardly older than other advice


class _Basis(NamedTuple):
    """The state that a ranking was computed from."""

    version: int
    due: list[int]  # sessions that are expected back now
    at: float

    def is_as_good_as(self, before: _Basis) -> bool:
        """Whether ranking again now would give the same as ranking from ``before``."""
        unchanged = self.version == before.version and self.due == before.due
        return unchanged and self.at - before.at < RERANK_AFTER_S


class GraphEvictionAdvisor:
    """Ranks each live engine's blocks and copies, on its own thread."""

    def __init__(
        self,
        # read under its lock, one engine at a time; what is ranked is copied first, so that ingest
        # does not wait for rankings
        graph: KVCacheGraph,
        # returns the ids of engines whose residency is known for sure, each with how many of its
        # batches the graph has applied
        engines: Callable[[], Mapping[str, int]],
        *,
        interval_s: float,
        max_ranked: int,
        prefetch: PrefetchConfig,
        clock: Callable[[], float],
        # called after each round, from this object's thread
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._graph = graph
        self._engines = engines
        self._heard: Mapping[str, int] = {}  # what ``engines`` said at the start of this round
        self._interval_s = interval_s
        self._max_ranked = max_ranked
        self.orders = PrefetchOrders(graph, prefetch, clock)
        self._clock = clock
        self._wake = wake
        self._admission = Admission()
        self._bases: dict[str, _Basis] = {}
        self._epoch = 0
        self._log = RateLimitedLog(logger, clock)
        self._ranked_at: dict[str, int] = {}  # each engine's turnover at its last ranking
        self._protected_seen = 0  # of what the graph counts, when it was last ranked
        self._stopping = False
        self._rank_now = False  # it was called for more than what to bring back
        self._quiet_since: int | None = None  # changes, ever, at a round in which nothing was new
        self._call = threading.Event()
        self._urgent = threading.Event()  # ends a long rest
        self._thread = threading.Thread(target=self._run, name="kvgraph-planner", daemon=True)
        # Replaced whole by one assignment; read them from any thread.
        self.latest: Mapping[str, EvictionRanking] = MappingProxyType({})
        self.admissions: Mapping[str, AdmissionAdvice] = MappingProxyType({})
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._urgent.set()
        self._call.set()
        if self._thread.is_alive():
            self._thread.join()

    def applied(self, engine: str | None = None, *, intended: bool = False) -> None:
        """Note that events of this engine (None: of any) changed the graph, and rank at once
        whatever cannot wait for the interval.

        That is: a change that a person ``intended``; the first protected blocks; an engine of whose
        pool more than ``PRESSING_SHARE`` was turned over since its last ranking. If only a session
        is expected back before the next round, prefetch orders are renewed and nothing is ranked.
        """
        if intended or self._is_first_protected():
            self._rank_now = True
            self._urgent.set()
            self._call.set()
        elif self._is_pressing(engine):
            self._rank_now = True
            self._call.set()
        elif self.orders.cannot_wait(self._interval_s):
            self._urgent.set()
            self._call.set()
        elif self._quiet_since not in (None, self._graph.changes.total):
            self._call.set()

    def _is_pressing(self, engine: str | None) -> bool:
        ranked_at = self._ranked_at
        for each in list(ranked_at) if engine is None else [engine]:  # its thread adds engines
            now, pool = self._graph.tables.turnover(each)
            before = ranked_at.get(each, now)
            if pool and now - before >= PRESSING_SHARE * pool:
                return True
        return False

    def _is_first_protected(self) -> bool:
        if self._graph.counters["blocks_protected"] == self._protected_seen:
            return False
        return not any(len(ranking.protected) for ranking in self.latest.values())

    def tick(self) -> None:
        """Advise every live engine once; see ``latest``, ``orders`` and ``admissions``."""
        self._heard = self._engines()  # first: a ranking knows at least what it says it does
        self._protected_seen = self._graph.counters["blocks_protected"]
        self._try(self._locked(self._forget_gone))
        self.order()
        rankings, admissions = dict[str, EvictionRanking](), dict[str, AdmissionAdvice]()
        told = self._clock()
        for engine in self._heard:
            if self._clock() - told >= _TELL_EVERY_S:  # not only when the last of many is ranked
                told = self._clock()
                self._tell({**self.latest, **rankings}, {**self.admissions, **admissions})
                self._wake()
            if ranking := self._try(self._opinion, engine) or self.latest.get(engine):
                rankings[engine] = ranking
            advice = self._try(self._locked(self._admit), engine)
            if advice := advice or self.admissions.get(engine):
                admissions[engine] = advice
        self._bases = {engine: self._bases[engine] for engine in rankings}
        self._ranked_at = {engine: self._ranked_at[engine] for engine in rankings}
        self._tell(rankings, admissions)

    def _tell(
        self, rankings: dict[str, EvictionRanking], admissions: dict[str, AdmissionAdvice]
    ) -> None:
        self.latest, self.admissions = MappingProxyType(rankings), MappingProxyType(admissions)

    def order(self) -> None:
        """Renew the prefetch orders of the last round's engines, and do nothing else."""
        self._try(self._locked(self.orders.find_due))
        orders, before = {}, self.orders.latest
        for engine in self._heard:
            if order := self._try(self._locked(self.orders.made), engine) or before.get(engine):
                orders[engine] = order
        self.orders.keep(orders)

    def _forget_gone(self, _: str) -> None:
        """Drop admission state of engines that are gone, before their columns are reused."""
        self._admission.forget_all_but(set(self._graph.tables.engines.values()))

    def _try(
        self, advise: Callable[[str], _T | None], engine: str = "", what: str = "ranking"
    ) -> _T | None:
        """Run one kind of advice; None after an error: the previous advice stays, and expires."""
        try:
            return advise(engine)
        except Exception as error:
            self.counters["failed"] += 1
            self._log.failed(what, f"{what} failed", error)
            return None

    def _locked(self, advise: Callable[[str], _T]) -> Callable[[str], _T]:
        def locked(engine: str) -> _T:
            with self._graph.lock:
                return advise(engine)

        return locked

    def _admit(self, engine: str) -> AdmissionAdvice | None:
        """Advice on admission, in every round: live contexts change without block events."""
        tables = self._graph.tables
        column = tables.engines.get(engine)
        if column is None:
            return None
        version = self._graph.changes.total
        advice = self._admission.advise(tables, column, self._clock(), version)
        return replace(advice, heard=self._heard[engine])

    def _opinion(self, engine: str) -> EvictionRanking | None:
        with self._graph.lock:
            if self._graph.tables.is_listing(engine):
                return None
            now = self._clock()
            basis = _Basis(self._graph.changes.of(engine), self.orders.due, now)
            turned = self._graph.tables.turnover(engine)[0]
        previous, before = self.latest.get(engine), self._bases.get(engine)
        if previous and before and basis.is_as_good_as(before):
            self.counters["redated"] += 1
            return replace(previous, ts=now, heard=self._heard[engine])
        self._epoch += 1
        ranked, heard = self._ranked(engine), self._heard[engine]
        ranking = replace(ranked, epoch=self._epoch, ts=now, heard=heard)
        self._ranked_at[engine] = turned
        self.counters["ranked"] += 1
        with self._graph.lock:
            _note(self._graph, engine, ranking, self._log)
        self._bases[engine] = basis  # last: after an error the next round ranks anew
        return ranking

    def _ranked(self, engine: str) -> EvictionRanking:
        """Rank an engine; an empty ranking for one with room, which evicts nothing for long."""
        with self._graph.lock:
            has_room = _has_room(self._graph, engine, self._protected_seen)
        if not has_room:
            return self._graph.rank(engine, self._max_ranked)
        self.counters["roomy"] += 1
        return self._graph.rank(engine, 0)

    def _run(self) -> None:
        ended = self._clock()
        due = ended + self._interval_s
        while not self._stopping:
            called = self._call.wait(max(0.0, due - self._clock()))
            self._call.clear()
            self._urgent.clear()
            if self._stopping:
                return
            began = self._clock()
            if called:
                self._quiet_since = None
                due = min(due, max(began, ended + self._interval_s))
            if called and not self._rank_now and began < due:
                self.order()
                self.counters["ordered_alone"] += 1
                self._wake()
                self._rest(self._clock() - began, _ORDERS_APART_S)
                continue
            self._rank_now, self._quiet_since = False, None
            before, changes = self._worked(), self._graph.changes.total
            self._try(lambda _: self.tick(), what="a round of ranking")
            self._wake()
            ended = self._clock()
            if self._worked() != before:
                self._rest(ended - began)
                due = ended + self._interval_s
            else:  # nothing changed: it was hardly work
                due = ended + max(self._interval_s, min(_QUIET * self._interval_s, _QUIET_S))
                self._quiet_since = changes

    def _worked(self) -> int:
        """How often engines were ranked, or should have been."""
        return self.counters["ranked"] + self.counters["failed"]

    def _rest(self, took_s: float, least_s: float = 0.0) -> None:
        """Rest after each ranking, however fast engines evict; longer while no advice is in use."""
        rest_s = max(least_s, min(_REST * took_s, self._interval_s))
        time.sleep(rest_s)
        if not _tell_anything(self.latest.values(), self.orders.latest.values()):
            self._urgent.wait(min(_LONG_REST * took_s, _LONGEST_REST_S) - rest_s)


def _note(graph: KVCacheGraph, engine: str, ranking: EvictionRanking, log: RateLimitedLog) -> None:
    column = graph.tables.engines.get(engine)
    if column is None:
        return
    history, terms = graph.tables.history, None
    if history.wants_terms(column, ranking.ts):
        view = View(graph.tables, graph.rules, column, ranking.ts)
        terms = _terms(graph, view, ranking, log)
    history.ranked(column, ranking, graph.rules.protected_layers, terms)


def _terms(
    graph: KVCacheGraph, view: View, ranking: EvictionRanking, log: RateLimitedLog
) -> TermsAtRanking:
    """The score's terms of a ranking's first blocks; none where a custom policy fails."""
    try:
        return TermsAtRanking.of(front_terms(view, graph.policy, graph.referee, ranking))
    except Exception as error:
        log.once(
            "terms",
            "the policy %s does not tell the terms of its scores (%s: %s): evictions are logged "
            "without them",
            graph.policy.name, type(error).__name__, error,
        )  # fmt: skip
        return NO_TERMS


def _has_room(graph: KVCacheGraph, engine: str, protected: int) -> bool:
    """Whether an engine without tiers has many blank blocks, and no block is ``protected``."""
    tables = graph.tables
    reports = tables.reports.get(tables.engines.get(engine, NO_ROW))
    if reports is None or reports.pressure is None or reports.tiers is not None or protected:
        return False
    pressure = reports.pressure
    least = _ROOMY * pressure.total_blocks
    if pressure.free_blocks - pressure.cached_blocks <= least:  # as nearly always
        return False
    # Pressure was reported up to half a second ago: what was stored since counts as well.
    return pressure.total_blocks - graph.resident_count(engine) > least


def _tell_anything(rankings: Iterable[EvictionRanking], orders: Iterable[PrefetchOrder]) -> bool:
    told = (len(r.order) + len(r.protected) + len(r.spill_first) for r in rankings)
    return any(told) or any(len(order.keys) for order in orders)
