"""``PrefetchOrders``: which copies each engine should bring back, as of the last look."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.types import Keys
from ..config.sections import PrefetchConfig


class PrefetchOrder(NamedTuple):
    """Copies that an engine should bring back, best first, as of ``ts``."""

    ts: float
    keys: Keys


class PrefetchOrders:
    """One order per engine. Whoever calls holds the graph's lock where that is said.

    Args:
        graph: Whose copies and sessions are meant.
        bounds: Of each order; assign others to ``bounds`` to change them.
        clock: Monotonic seconds.

    Attributes:
        bounds: See above.
        due: Rows of sessions that were expected back at the last look.
        latest: engine → order, replaced whole by one assignment; read it from any thread.
    """

    def __init__(
        self, graph: KVCacheGraph, bounds: PrefetchConfig, clock: Callable[[], float]
    ) -> None:
        self._graph = graph
        self._clock = clock
        self._versions: dict[str, int] = {}  # the graph's, when each engine's order was made
        self.bounds = bounds
        self.due: list[int] = []
        self.latest: Mapping[str, PrefetchOrder] = MappingProxyType({})

    def cannot_wait(self, seconds: float) -> bool:
        """Whether a session that began to wait since the last look is due, and back within
        ``seconds``, as somebody said or as pauses before say; without the lock.

        False where no engine has tiers.
        """
        tables, within_s = self._graph.tables, min(seconds, self._graph.rules.horizon_s)
        if not self.bounds.enabled or tables.sessions.soonest >= self._clock() + within_s:
            return False
        return any(words.tiers is not None for words in list(tables.words.values()))

    def look(self, _: str = "") -> None:
        """Note which sessions of any engine are expected back now; with the lock."""
        sessions = self._graph.tables.sessions
        sessions.soonest = math.inf
        self.due = sessions.soon(self._graph.rules.horizon_s, self._clock()).tolist()

    def made(self, engine: str) -> PrefetchOrder:
        """What to bring back; with the lock. Computed at every look while a session is due or
        something is wanted, even for an unchanged graph: expected returns come closer as time
        passes."""
        version, before = self._graph.changes.of(engine), self.latest.get(engine)
        idle = before is not None and not len(before.keys) and not self.due
        if before is not None and idle and self._versions.get(engine) == version:
            return before
        self._versions[engine] = version
        limit = self.bounds.max_blocks if self.bounds.enabled else 0
        return PrefetchOrder(self._clock(), self._graph.prefetch_order(engine, limit))

    def keep(self, orders: dict[str, PrefetchOrder]) -> None:
        """Have ``orders`` count, and forget all other engines'."""
        self._versions = {each: self._versions[each] for each in orders.keys() & self._versions}
        self.latest = MappingProxyType(orders)
