"""``CacheRuns``: the sidecar's memory of what caches that follow confidence held."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ...dashboards.answers.caches import MOST_STEPS, CacheNoted, Caches, CacheSteps

MOST_RUNS: Final = 16
"""Beyond it, who was silent for longest is forgotten; chosen: what a page can show."""


class CacheRuns:
    """The latest steps of the latest runs; any thread may call it.

    Args:
        wall: Unix seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, CacheSteps] = OrderedDict()

    def shown(self, steps: int) -> Caches:
        """The last ``steps`` of all runs; who told something last comes first."""
        with self._lock:
            runs = [*reversed(self._runs.values())]
        return Caches(at=self._wall(), runs=[run.latest(steps) for run in runs])

    def note(self, told: CacheSteps) -> CacheNoted:
        """Put steps behind those of the same run; what was told already does not count again."""
        with self._lock:
            known = self._runs.pop(told.run, None)
            run = told
            if known is not None and known.started > told.started:
                run = known  # another process has the name by now
            elif known is not None and known.started == told.started:
                run = told.behind(known).latest(MOST_STEPS)
            self._runs[told.run] = run
            while len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
        return CacheNoted(at=self._wall(), steps=len(run.at))
