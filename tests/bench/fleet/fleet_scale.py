"""What the router's decisions cost, and how even they leave the engines."""

from __future__ import annotations

import random
import time
import tracemalloc
from typing import Final

import numpy as np
from kvgraph.advisor.fleet.board import EngineBoard, Speed
from kvgraph.advisor.fleet.router import FleetRouter, Holdings, Reason, RoutingRequest
from kvgraph.advisor.replay.plan import FleetRouting
from kvgraph.advisor.replay.simulator import Instance, LruOrder, simulate
from kvgraph.advisor.replay.trace import Trace

from ..figures import Figures, quantile
from ..lab.seed_workload import FleetSize

RATE: Final = 1000.0
"""Decisions per second."""
DECISIONS: Final = 20_000
_SHARED: Final = 4096  # tokens of a prefix that all prompts share; chosen


def add_times(figures: Figures, sessions: int) -> None:
    few, _ = _decisions(3, 10_000)
    many, memory = _decisions(1000, sessions)
    figures.add("route_p99_ms", quantile(few, 99), "ms", "< 2, at 1,000/s")
    figures.add("route_p99_ms_1000_engines", quantile(many, 99), "ms", "< 5")
    figures.add("sessions_known", sessions, "sessions")
    figures.add("bytes_per_session", memory / sessions, "B")


def _decisions(engines: int, sessions: int) -> tuple[list[float], int]:
    """Milliseconds of each decision, at ``RATE``; and bytes that the sessions' homes take."""
    rng = random.Random(1)
    board = EngineBoard()
    for number in range(engines):
        board.add(f"#{number}", Speed(pool_tokens=500_000))
    router = FleetRouter(board)
    tracemalloc.start()
    for session in range(sessions):
        router.homes.settle(f"session {session}", rng.randrange(engines), 20_000, 0.0)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    pool = np.zeros(engines, dtype=np.int64)
    samples, begin = [], time.perf_counter()
    for number in range(DECISIONS):
        time.sleep(max(0.0, begin + number / RATE - time.perf_counter()))
        wanted = RoutingRequest(
            f"session {rng.randrange(int(1.3 * sessions))}", rng.randrange(2000, 40_000)
        )
        start = time.perf_counter()
        pool[:] = _SHARED
        choice = router.route(wanted, Holdings(pool, pool), number / RATE)
        samples.append(1e3 * (time.perf_counter() - start))
        router.computed(choice)
    return samples, memory


def add_imbalance(figures: Figures, trace: Trace, size: FleetSize, tokens_per_s: float) -> None:
    """Play recorded agents where prompts wait for each other: is any engine's queue longer?"""
    routing = FleetRouting(trace, tokens_per_s=tokens_per_s)
    pools = [Instance(size.blocks, LruOrder()) for _ in range(size.engines)]
    simulate(trace, pools, router=routing)
    assert routing.queues is not None
    waited = routing.queues.waited(size.engines)
    counts = routing.router.counts
    later = sum(counts.values()) - counts[Reason.NEW]
    kept = later - counts[Reason.HOME_FORGOT]
    figures.add("imbalance", float(waited.max() / waited.mean()), "× the mean", "≤ 1.3")
    figures.add("stickiness", counts[Reason.HOME] / max(1, kept), "whose home has KV", "≥ 0.95")
    figures.add("home_forgot", counts[Reason.HOME_FORGOT] / max(1, later), "of later turns")
