"""The lab's fleets: the seed's workload, recorded agents and conversations, in eight arms each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvgraph.advisor.replay.trace import Trace

from ..figures import Figures
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

SEED_SIZE: Final = FleetSize(8, 550)
OTHER_SEEDS: Final = (2, 3, 4, 5)
PAIRS: Final = ("AB", "AC", "BC")
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
    pair = max(found[arm].share for arm in PAIRS)
    figures.add(f"{name}all_over_best_pair", 100 * (every - pair), "points", "" if name else "> 0")
