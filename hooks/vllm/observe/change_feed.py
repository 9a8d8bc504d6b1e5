"""``ChangeFeed``: hands on what a pool cached and evicted."""

from __future__ import annotations

from ..pool.tap import PoolTap
from .observer import EngineObserver
from .prompt_demand import PromptDemand


class ChangeFeed:
    """Hands a pool's changes to those who follow them.

    Args:
        tap: Notes them.
        observer: Reports them.
        demand: Learns what was computed.
    """

    def __init__(self, tap: PoolTap, observer: EngineObserver, demand: PromptDemand) -> None:
        self._tap = tap
        self._observer = observer
        self._demand = demand

    def take(self) -> int:
        """Hand on what changed since the last call; returns how many blocks were evicted, since a
        reset if there was one."""
        evicted = 0
        for changes in self._tap.take():
            evicted = self._observer.blocks_changed(changes)
            self._demand.cached(changes.cached)
            if changes.then_reset:
                evicted = 0
        return evicted
