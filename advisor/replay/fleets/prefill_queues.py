"""Simulated queues before engines that prefill one request after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...fleet.fleet_router import Choice


class PrefillQueues:
    """Tells when each engine is done with a prompt, and how much waited before each over time.

    Args:
        tokens_per_s: Prompt tokens that an engine computes per second.
        computed: Told of each choice whose prompt was computed.
    """

    def __init__(self, tokens_per_s: float, computed: Callable[[Choice], None]) -> None:
        self._rate = tokens_per_s
        self._computed = computed
        self._free_at: dict[int, float] = {}
        self._ends: list[tuple[float, int, Choice]] = []
        self._number = 0
        self._waited: dict[int, float] = {}  # token-seconds

    def advance(self, now: float) -> None:
        """Finish all that is done by ``now``."""
        while self._ends and self._ends[0][0] <= now:
            self._computed(heapq.heappop(self._ends)[2])

    def add(self, choice: Choice, now: float) -> None:
        """Queue a prompt where it was sent."""
        start = max(now, self._free_at.get(choice.engine, 0.0))
        end = start + choice.tokens / self._rate
        self._free_at[choice.engine] = end
        waited = self._waited.get(choice.engine, 0.0)
        self._waited[choice.engine] = waited + choice.tokens * (end - now)
        self._number += 1
        heapq.heappush(self._ends, (end, self._number, choice))

    def waited(self, engines: int) -> npt.NDArray[np.float64]:
        """float64 ``[engines]``: tokens queued or running at each, summed over seconds."""
        return np.array([self._waited.get(engine, 0.0) for engine in range(engines)])
