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
SILENT_S: Final = 5.0
"""After which a run's name is free for another; chosen: ten times as long as between two words."""


class CacheRuns:
    """The latest steps of the latest runs; any thread may call it.

    Args:
        wall: Unix seconds.
        clock: Monotonic seconds.
    """

    def __init__(
        self, wall: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._clock = wall, clock
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, tuple[CacheSteps, float]] = OrderedDict()  # and when told of

    def shown(self, steps: int) -> Caches:
        """The last ``steps`` of all runs; who told something last comes first."""
        with self._lock:
            runs = [run for run, _ in reversed(self._runs.values())]
        return Caches(at=self._wall(), runs=[run.latest(steps) for run in runs])

    def note(self, told: CacheSteps) -> CacheNoted:
        """Put steps behind those of the same run; what was told already does not count again."""
        now = self._clock()
        with self._lock:
            known, heard_at = self._runs.get(told.run, (None, 0.0))
            if known is None:
                run = told
            elif known.started == told.started:
                run = told.behind(known).latest(MOST_STEPS)
            elif now - heard_at < SILENT_S:
                return CacheNoted(at=self._wall(), taken=False, steps=len(known.at))
            else:
                run = told
            self._runs[told.run] = run, now
            self._runs.move_to_end(told.run)
            while len(self._runs) > MOST_RUNS:
                self._runs.popitem(last=False)
        return CacheNoted(at=self._wall(), taken=True, steps=len(run.at))
