"""What engines find together with a home for each session (A), a shared store (B), an order that
knows when sessions return (C), and all of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....graph.ranking.profile import ScoreProfile
from ...policies.registry import new_policy
from ..engine.instance import HostTier, Instance
from ..engine.routers import PrefixAffinity
from ..engine.simulator import Router, simulate
from ..fast.bounds import infinite_hits
from ..lab.arms import BY_DEFAULT, HINTS, Settings, new_orders
from ..lab.cells import run_cells
from ..orders.graph_order import GraphOrder
from ..orders.orders import EvictionOrder, LruOrder
from ..orders.simulated_sidecar import SimulatedSidecar
from ..traces.trace import Trace
from .fleet_routing import FleetRouting, MemoryRouting

RESERVED: Final = 200 / 550
"""Share of each pool that A keeps for sessions with several turns: the seed's."""
STORE_FACTOR: Final = 1.0
"""Blocks of the shared store for each block of all pools together; chosen."""


@dataclass(frozen=True, slots=True)
class FleetArm:
    """Which of the three levers are pulled; without any: cache-aware routing above LRU.

    Attributes:
        blind: Engines have no graph: they evict as stock ones do, and the router goes by what it
            sent where.
    """

    home: bool = False
    store: bool = False
    lifecycle: bool = False
    blind: bool = False

    @property
    def name(self) -> str:
        """``A``, ``BC`` …; ``none``."""
        levers = zip("ABC", (self.home, self.store, self.lifecycle), strict=True)
        name = "".join(letter for letter, pulled in levers if pulled) or "none"
        return f"{name}, blind" if self.blind else name


NOTHING: Final = FleetArm()
ARMS: Final = (
    NOTHING,
    FleetArm(home=True),
    FleetArm(store=True),
    FleetArm(lifecycle=True),
    FleetArm(home=True, store=True),
    FleetArm(home=True, lifecycle=True),
    FleetArm(store=True, lifecycle=True),
    FleetArm(home=True, store=True, lifecycle=True),
    FleetArm(home=True, blind=True),
)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """Engines and the blocks of each one's pool."""

    engines: int = 8
    blocks: int = 550


@dataclass(frozen=True, slots=True)
class FleetFound:
    """Shares of a trace's prompt blocks: found in pools, loaded from the shared store."""

    pool: float
    store: float

    @property
    def share(self) -> float:
        """Found in either."""
        return self.pool + self.store


def compare_arms(
    trace: Trace,
    size: FleetSize,
    arms: Sequence[FleetArm] = ARMS,
    *,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, FleetFound]:
    """What each arm finds, by its name."""
    slow_first = sorted(arms, key=lambda arm: not (arm.lifecycle or arm.home))
    found: dict[str, FleetFound] = {}
    for done, (arm, row) in enumerate(run_cells(_run, (trace, size), slow_first, processes)):
        found[arm.name] = row
        progress(done + 1, len(arms))
    return {arm.name: found[arm.name] for arm in arms}


def run_fleet(trace: Trace, size: FleetSize, arm: FleetArm) -> FleetFound:
    """Replay a trace through a fleet; requests take no time."""
    store = None
    if arm.store:
        blocks = round(STORE_FACTOR * size.engines * size.blocks)
        store = HostTier(blocks, plain=not arm.lifecycle, selective=arm.lifecycle)
    orders = _orders(trace, size.engines, arm)
    pools = [Instance(size.blocks, order, host=store) for order in orders]
    outcome = simulate(trace, pools, router=_router(trace, arm, store))
    total = max(1, trace.prompt_blocks)
    return FleetFound(float(outcome.hits.sum() / total), float(outcome.warmed.sum() / total))


def endless(trace: Trace) -> float:
    """The share that a cache finds which forgets nothing and is everywhere."""
    return float(infinite_hits(trace).sum() / max(1, trace.prompt_blocks))


def _run(shared: tuple[Trace, FleetSize], arm: FleetArm) -> FleetFound:
    return run_fleet(*shared, arm)


def _router(trace: Trace, arm: FleetArm, store: HostTier | None) -> Router:
    if arm.blind:
        return MemoryRouting(trace)
    return FleetRouting(trace, store) if arm.home else PrefixAffinity(trace, below=False)


def _orders(trace: Trace, engines: int, arm: FleetArm) -> Sequence[EvictionOrder]:
    """One for each engine; where advice is needed, one sidecar advises all of them."""
    rules = replace(ScoreProfile(), reserved=RESERVED if arm.home else 0.0)
    if arm.lifecycle:
        return new_orders(BY_DEFAULT + HINTS, trace, Settings(profile=rules), engines)
    if not arm.home or arm.blind:
        return [LruOrder() for _ in range(engines)]
    sidecar = SimulatedSidecar(trace, new_policy("lru", None), rules=rules)
    return [GraphOrder(sidecar) for _ in range(engines)]
