"""``GraphEvictionAdvisor``: every half second, one immutable opinion per engine."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from ..graph.advice import EvictionRanking
from ..graph.kvcache_graph import KVCacheGraph
from ..graph.scoring import ScoreProfile
from .notices import Notices

logger = logging.getLogger(__name__)

RERANK_AFTER_S: Final = 10.0
"""Even an unchanged graph is ranked again after this long: a tool's expected return passes, a
CO_ATTEND edge fades. Age alone moves all blocks by the same amount and reorders nothing."""


class _Basis(NamedTuple):
    """What a ranking was made of."""

    version: int
    profile: ScoreProfile
    at: float

    def is_as_good_as(self, before: _Basis) -> bool:
        """Whether ranking again now would say what was said ``before``."""
        unchanged = self.version == before.version and self.profile is before.profile
        return unchanged and self.at - before.at < RERANK_AFTER_S


class GraphEvictionAdvisor:
    """Ranks each live engine's blocks on a thread of its own.

    Args:
        graph: Read under its lock, one engine at a time, so that ingest waits for one ranking at
            most.
        engines: The ids of the engines whose residency is known for sure.
        wake: Called after each round, from this object's thread.

    Attributes:
        latest: engine → ranking, replaced whole by one assignment; read it from any thread.
    """

    def __init__(
        self,
        graph: KVCacheGraph,
        engines: Callable[[], Sequence[str]],
        *,
        interval_s: float,
        max_ranked: int,
        clock: Callable[[], float],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._graph = graph
        self._engines = engines
        self._interval_s = interval_s
        self._max_ranked = max_ranked
        self._clock = clock
        self._wake = wake
        self._bases: dict[str, _Basis] = {}
        self._epoch = 0
        self._notices = Notices(logger, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-planner", daemon=True)
        self.latest: Mapping[str, EvictionRanking] = MappingProxyType({})
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Start the ranking thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the ranking thread and wait for it."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def tick(self) -> None:
        """Rank every live engine once and publish the result to ``latest``."""
        rankings = {}
        for engine in self._engines():
            ranking = self._try_engine(engine)
            if ranking is not None:
                rankings[engine] = ranking
        self._bases = {engine: self._bases[engine] for engine in rankings}
        self.latest = MappingProxyType(rankings)

    def _try_engine(self, engine: str) -> EvictionRanking | None:
        """A fresh opinion; after a failure the one of before, which goes stale meanwhile."""
        try:
            with self._graph.lock:
                return self._opinion(engine)
        except Exception as error:
            self.counters["failed"] += 1
            self._notices.warn("rank", "ranking failed (%s)", type(error).__name__)
            logger.debug("ranking failed", exc_info=True)
            return self.latest.get(engine)

    def _opinion(self, engine: str) -> EvictionRanking:
        now = self._clock()
        basis = _Basis(self._graph.version, self._graph.profile, now)
        previous, before = self.latest.get(engine), self._bases.get(engine)
        if previous and before and basis.is_as_good_as(before):
            self.counters["redated"] += 1
            return replace(previous, ts=now)
        ranking = self._graph.rank(engine, self._max_ranked)
        self._epoch += 1
        self._bases[engine] = basis
        self.counters["ranked"] += 1
        return EvictionRanking(
            self._epoch, now, ranking.order, ranking.protected, ranking.spill_first
        )

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.tick()
            self._wake()
