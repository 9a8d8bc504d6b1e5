"""``kvgraph bench fleet``."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from kvgraph.advisor.fleet.board import EngineBoard, Speed
from kvgraph.advisor.fleet.router import FleetRouter, Holdings, Reason, RoutingRequest
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.plan import FleetRouting
from kvgraph.advisor.replay.reader import load_trace
from kvgraph.advisor.replay.simulator import Instance, LruOrder, simulate
from kvgraph.advisor.replay.trace import AGENTS_SERVICE, Trace
from rich.console import Console

from ..figures import Figures, keep_raw, measured_now, quantile
from ..lab.seed_workload import (
    NOTHING,
    SEED_FACTS,
    FleetArm,
    FleetFound,
    FleetSize,
    compare_arms,
    endless,
    run_fleet,
    seed_workload,
    workload_facts,
)
from ..policies.policies_fleets import CONVERSATIONS, default_sessions, fleet, sessions_in
from .fleet_kills import add_kills
from .fleet_latency import add_latency
from .fleet_routers import add_routers
from .fleet_stock import add_stock_engines
from .fleet_store import add_store

SEED_SIZE: Final = FleetSize(8, 550)
OTHER_SEEDS: Final = (2, 3, 4, 5)
_PAIRS: Final = ("AB", "AC", "BC")
LEVERS: Final = {"A": FleetArm(home=True), "B": FleetArm(store=True), "C": FleetArm(lifecycle=True)}
TARGETS: Final = {"A": "≥ 3", "B": "≥ 6", "C": "≥ 5"}
"""For the seed's workload, in points."""


def add_generator(figures: Figures) -> dict[str, Any]:
    """How far the generator's figures are from the seed's; returns them."""
    facts = {seed: workload_facts(seed_workload(seed), 8, 550) for seed in (1, *OTHER_SEEDS)}
    errors = {seed: each.errors(SEED_FACTS) for seed, each in facts.items()}
    figures.add("generator_error", max(errors[1].values()), "of the figure", "≤ 0.05, each of 11")
    others = [max(errors[seed].values()) for seed in OTHER_SEEDS]
    figures.add("generator_error_other_seeds", others, "of the figure")
    return {str(seed): each for seed, each in errors.items()}


def add_other_seeds(figures: Figures) -> None:
    """What each lever, and all of them, find on workloads of other seeds: a thousand requests are
    few.
    """
    traces = [seed_workload(seed) for seed in OTHER_SEEDS]
    base = [run_fleet(trace, SEED_SIZE, NOTHING).share for trace in traces]
    for name, arm in LEVERS.items():
        points = [
            100 * (run_fleet(trace, SEED_SIZE, arm).share - stock)
            for trace, stock in zip(traces, base, strict=True)
        ]
        figures.add(f"{name.lower()}_points_other_seeds", points, "points", TARGETS[name])
    every = FleetArm(home=True, store=True, lifecycle=True)
    shares = [run_fleet(trace, SEED_SIZE, every).share / endless(trace) for trace in traces]
    figures.add("all_share_of_infinite_other_seeds", shares, "of it", "≥ 0.97")


def add_arms(
    figures: Figures,
    trace: Trace,
    size: FleetSize,
    name: str,
    processes: int,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Play all arms on a trace called ``name`` in figures (empty: the seed's workload, for which
    targets are set); returns what each arm found, and what an endless cache finds.
    """
    found = compare_arms(trace, size, processes=processes, progress=progress)
    most = endless(trace)
    _add(figures, found, most, name)
    rates = {arm: [row.pool, row.store] for arm, row in found.items()}
    return {"requests": len(trace), "endless": most, "arms": rates}


def _add(figures: Figures, found: dict[str, FleetFound], most: float, name: str) -> None:
    targets = TARGETS if not name else {}
    base = found["none"].share
    for arm in "ABC":
        points = 100 * (found[arm].share - base)
        figures.add(f"{name}{arm.lower()}_points", points, "points", targets.get(arm, ""))
    every = found["ABC"].share
    figures.add(f"{name}all_share_of_infinite", every / most, "of it", "" if name else "≥ 0.97")
    pair = max(found[arm].share for arm in _PAIRS)
    figures.add(f"{name}all_over_best_pair", 100 * (every - pair), "points", "" if name else "> 0")


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


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is played: recorded agents of so many ``users`` for ``hours``, and the fleets that
    serve them and ``share`` of the ``conversations``; ``sessions`` that the router of 1,000 engines
    knows, ``requests`` sent through the proxy, and ``moves`` of sessions by way of a store.
    """

    users: int
    hours: float
    agents: FleetSize
    conversations: FleetSize
    share: float
    sessions: int
    requests: int
    moves: int


FULL: Final = Scale(40, 3.0, FleetSize(8, 250), FleetSize(8, 1250), 1.0, 1_000_000, 2000, 8)
QUICK: Final = Scale(25, 1.0, FleetSize(4, 250), FleetSize(4, 1000), 0.2, 100_000, 200, 3)


PARTS: Final = ("all", "lab", "stock", "store", "kills", "routers")


def run(
    progress: bool,
    quick: bool = False,
    processes: int = 2,
    raw: Path | None = None,
    part: str = "all",
) -> Figures:
    """Measure every figure, or a short version (``quick``), whose figures are no claims. ``raw``:
    where all that each arm found, and each kill did, goes as JSON. ``part``: ``store``, ``kills``
    and ``routers`` on real engines; ``stock``: the router before engines without kvgraph; ``lab``:
    all others. Raises BenchError: there are no recorded sessions, no vLLM to start, or no
    Mooncake.
    """
    scale, figures = QUICK if quick else FULL, Figures("fleet")
    console = Console(stderr=True, quiet=not progress)

    facts: dict[str, Any] = {}

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if part in ("all", "store"):
        add_store(figures, scale.moves, say)
    if part in ("all", "kills"):
        facts["kills"] = add_kills(figures, say)
    if part in ("all", "routers"):
        facts["routers"] = add_routers(figures, say)
    if part in ("all", "stock"):
        add_stock_engines(figures, say)
    if part in ("all", "lab"):
        facts.update(_add_lab(figures, scale, progress, processes))
    if raw is not None:
        record = {**measured_now(), **figures.as_dict(), **facts}
        keep_raw(raw, record)
    return figures


def _add_lab(figures: Figures, scale: Scale, progress: bool, processes: int) -> dict[str, Any]:
    console = Console(stderr=True, quiet=not progress)
    facts: dict[str, Any] = {"generator": add_generator(figures)}
    add_other_seeds(figures)
    add_times(figures, scale.sessions)
    add_latency(figures, scale.requests)
    agents = _agents(scale)
    add_imbalance(figures, agents, scale.agents, AGENTS_SERVICE.prefill_tokens_per_s)
    plays = [("", seed_workload(), SEED_SIZE), ("agents_", agents, scale.agents)]
    if CONVERSATIONS.exists():
        conversations = load_trace(CONVERSATIONS).head(scale.share)
        plays.append(("mooncake_", conversations, scale.conversations))
    for name, trace, size in plays:
        say = _told(console, trace.name)
        facts[name or "seed"] = add_arms(figures, trace, size, name, processes, say)
    return facts


def _agents(scale: Scale) -> Trace:
    sessions = sessions_in(default_sessions(), lambda files: None)
    return fleet(f"{scale.users} users", sessions, scale.users, scale.hours, Signals.ALL)


def _told(console: Console, name: str) -> Callable[[int, int], None]:
    return lambda done, total: console.print(f"{name}: {done} of {total} arms")
