"""Replays a trace through simulated engines."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..traces.duration import ServiceModel
from ..traces.trace import Ints, Trace
from .instance import Admission, Instance

Router = Callable[[int, Sequence[Instance]], int]
"""``(request, instances) → instance number``."""


@dataclass(frozen=True, slots=True)
class Load:
    """Time passes while requests run.

    Attributes:
        service: How long they take, where the trace is not asked or does not say.
        max_running: How many run at once in one instance.
        as_recorded: Whether the trace is asked how long they took.
    """

    service: ServiceModel = field(default_factory=ServiceModel)
    max_running: int = 256
    as_recorded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What each request found, in blocks, and how long it waited.

    Attributes:
        hits: int32 ``[requests]``, prompt blocks matched in an engine's pool.
        warmed: int32 ``[requests]``, prompt blocks loaded from the tier below.
        waited: float64 ``[requests]``, seconds from arrival to being scheduled.
        refused: Requests too large for an instance; they hit nothing.
    """

    hits: Ints
    warmed: Ints
    waited: npt.NDArray[np.float64]
    refused: int


def simulate(
    trace: Trace,
    instances: Sequence[Instance],
    *,
    router: Router = lambda request, instances: 0,
    load: Load | None = None,
    progress: Callable[[int], None] = lambda requests: None,
) -> Outcome:
    """Serve every request of ``trace``; deterministic.

    Args:
        load: None serves requests one after the other in no time: the setting in which hit rates
            of different policies are compared, since all of them see the same order of events.
        progress: Told the number of requests served, now and then.
    """
    run = _Run(trace, instances, load)
    for request, at in enumerate(trace.at.tolist()):
        run.finish_until(at)
        run.arrive(request, router(request, instances), at)
        if request % 500 == 0:
            progress(request)
    run.finish_until(float("inf"))
    progress(len(trace))
    return Outcome(run.hits, run.warmed, run.waited, run.refused)


class _Run:
    """The state of one simulation."""

    def __init__(self, trace: Trace, instances: Sequence[Instance], load: Load | None) -> None:
        self.hits = np.zeros(len(trace), dtype=np.int32)
        self.warmed = np.zeros(len(trace), dtype=np.int32)
        self.waited = np.zeros(len(trace))
        self.refused = 0
        self._trace = trace
        self._instances = instances
        self._load = load
        self._chains = trace.chains()
        self._limits = trace.matchable.tolist()
        self._at = trace.at.tolist()
        self._input, self._output = trace.input_tokens.tolist(), trace.output_tokens.tolist()
        self._recorded_s: list[float] = []  # by request; NaN: not known
        if load is not None and load.as_recorded and trace.said is not None:
            self._recorded_s = trace.said.seconds.tolist()
        self._ends: list[tuple[float, int, int]] = []  # (time, request, instance)
        self._waiting: list[deque[int]] = [deque() for _ in instances]

    def arrive(self, request: int, where: int, now: float) -> None:
        if len(self._chains[request]) + self._unhashed(request) > self._instances[where].capacity:
            self.refused += 1
            return
        self._waiting[where].append(request)
        self._schedule(where, now)

    def finish_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            at, request, where = heapq.heappop(self._ends)
            self._instances[where].finish(request, self._chains[request], at)
            self._schedule(where, at)

    def _schedule(self, where: int, now: float) -> None:
        """Admit from the head of the queue, as long as the next request fits."""
        line, instance = self._waiting[where], self._instances[where]
        while line and not (self._load and instance.running >= self._load.max_running):
            request = line[0]
            chain, limit = self._chains[request], self._limits[request]
            admission = instance.admit(request, chain, limit, self._unhashed(request), now)
            if admission is None:
                return
            line.popleft()
            self._note(request, admission, now)
            self._run(request, where, admission, now)

    def _run(self, request: int, where: int, admission: Admission, now: float) -> None:
        if self._load is None:
            self._instances[where].finish(request, self._chains[request], now)
            return
        seconds = self._seconds(request, admission, self._load.service)
        heapq.heappush(self._ends, (now + seconds, request, where))

    def _seconds(self, request: int, admission: Admission, service: ServiceModel) -> float:
        if self._recorded_s and not math.isnan(self._recorded_s[request]):
            return self._recorded_s[request]
        found = (admission.hit + admission.warmed) * self._trace.block_size
        return service.seconds(max(1, self._input[request] - found), self._output[request])

    def _note(self, request: int, admission: Admission, now: float) -> None:
        self.hits[request] = admission.hit
        self.warmed[request] = admission.warmed
        self.waited[request] = now - self._at[request]

    def _unhashed(self, request: int) -> int:
        """Blocks for output that the trace knows no hashes of, while the request runs."""
        if self._load is None:
            return 0
        tokens = self._input[request] + self._output[request]
        unhashed: int = max(0, -(-tokens // self._trace.block_size) - len(self._chains[request]))
        return unhashed
