"""The router before engines without kvgraph, beside cache-aware routing, in the lab."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from kvgraph.advisor.fleet.pools import PoolShadows, PromptPrefix
from kvgraph.advisor.fleet.router import Holdings
from kvgraph.advisor.replay.fleet_traffic import Signals
from kvgraph.advisor.replay.plan import FleetRouting
from kvgraph.advisor.replay.reader import infer_sessions
from kvgraph.advisor.replay.recorded_sessions import Session, read_sessions
from kvgraph.advisor.replay.simulator import Instance, LruOrder, PrefixAffinity, Router, simulate
from kvgraph.advisor.replay.trace import Trace

from ..figures import Figures
from ..recorded.agents_requests import SESSIONS
from ..recorded.lab_fleets import fleet


class StockFleet(NamedTuple):
    """Recorded agents, and the engines that serve them; ``half`` of the sessions: 0 or 1."""

    users: int
    hours: float
    engines: int
    blocks: int
    half: int


FLEETS: Final = (
    StockFleet(25, 1.0, 4, 250, 0),
    StockFleet(25, 1.0, 4, 250, 1),
    StockFleet(40, 1.0, 8, 250, 0),
    StockFleet(40, 1.0, 8, 250, 1),
    StockFleet(40, 1.0, 4, 500, 0),
    StockFleet(60, 1.0, 8, 400, 1),
    StockFleet(30, 1.5, 3, 500, 0),
)


def add_stock_engines(figures: Figures, say: Callable[[str], None]) -> None:
    """Add what the router finds beyond cache-aware routing, with sessions named and unnamed."""
    parts = _halves()
    named, inferred = [], []
    for each in FLEETS:
        sessions, name = parts[each.half], f"{each.users} users"
        trace = fleet(name, sessions, each.users, each.hours, Signals.NONE)
        nameless = replace(
            trace, session=infer_sessions(trace.chains(), trace.full.tolist(), trace.num_blocks)
        )
        stock = _found(trace, each, PrefixAffinity(trace, below=False))
        named.append(_found(trace, each, MemoryRouting(trace)) - stock)
        inferred.append(_found(nameless, each, MemoryRouting(nameless)) - stock)
        say(f"{each}: {stock:.1f} %, {named[-1]:+.1f} points, {inferred[-1]:+.1f} with no names")
    figures.add("stock_engines_points", named, "points", "> 0")
    figures.add("stock_engines_points_nothing_said", inferred, "points", "> 0")


def _halves() -> tuple[list[Session], list[Session]]:
    """Two halves of the sessions that ship, each drawn at random."""
    order = sorted(read_sessions(SESSIONS), key=lambda session: session.name)
    random.Random(1).shuffle(order)
    middle = len(order) // 2
    return order[:middle], order[middle:]


class MemoryRouting(FleetRouting):
    """Routes as the proxy does where engines have no graph: by shadows of their pools."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._pools = PoolShadows()

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        engine = super().__call__(request, instances)
        chain = self._links(self._chains[request])
        self._pools.sent(chain, engine, int(self.router.board.pool[engine]))
        return engine

    def _holdings(self, request: int, instances: Sequence[Instance]) -> Holdings:
        chain = self._links(self._chains[request][: self._limits[request]])
        return self._pools.holdings(chain, len(instances))

    def _links(self, chain: Sequence[int]) -> list[PromptPrefix]:
        return [PromptPrefix(block, self._size * at) for at, block in enumerate(chain, start=1)]


def _found(trace: Trace, size: StockFleet, router: Router) -> float:
    """Percent of the prompt's blocks that are found in the engines' pools."""
    pools = [Instance(size.blocks, LruOrder()) for _ in range(size.engines)]
    hits = simulate(trace, pools, router=router).hits.sum()
    return float(100 * hits / max(1, trace.prompt_blocks))
