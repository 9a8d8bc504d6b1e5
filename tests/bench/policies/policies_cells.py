"""What `kvgraph bench policies` plays: hit rates of arms on traces at capacities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ...advisor.replay.engine.instance import Instance
from ...advisor.replay.engine.simulator import simulate
from ...advisor.replay.lab.arms import Settings, run_arm
from ...advisor.replay.lab.cells import run_cells
from ...advisor.replay.orders.graph_order import GraphOrder
from ...advisor.replay.traces.trace import Trace
from .policies_nonsense import NONSENSE

NONSENSE_ARM: Final = "nonsense:"
QUICK_ARMS: Final = ("lru", "belady")
"""Arms that take no time; the others start first."""


class Cell(NamedTuple):
    """One simulation."""

    trace: str
    arm: str
    capacity: int


class Rates:
    """Prompt blocks matched by prefix / all prompt blocks, by cell."""

    def __init__(self, rates: Mapping[Cell, float]) -> None:
        self.rates = dict(rates)

    def points(self, cell: Cell) -> float:
        """What an arm finds more than LRU, in percent of the prompt."""
        return 100 * (self.rates[cell] - self.rates[cell._replace(arm="lru")])

    def gap(self, trace: str, arm: str, capacities: Sequence[int]) -> float:
        """The share of the way from LRU to Belady that an arm goes, mean over capacities."""
        shares = []
        for capacity in capacities:
            cell = Cell(trace, arm, capacity)
            lru, bound = (self.rates[cell._replace(arm=name)] for name in ("lru", "belady"))
            shares.append((self.rates[cell] - lru) / max(bound - lru, 1e-9))
        return sum(shares) / len(shares)


def play(
    traces: Mapping[str, Trace],
    cells: Sequence[Cell],
    processes: int,
    progress: Callable[[int, int], None],
) -> Rates:
    """Run every cell once, and LRU and Belady wherever something else is run.

    Args:
        progress: Told how many of the cells are done.
    """
    bounds = {cell._replace(arm=arm) for cell in cells for arm in QUICK_ARMS}
    every = sorted({*cells, *bounds}, key=lambda cell: (cell.arm in QUICK_ARMS, cell))
    found: dict[Cell, float] = {}
    for done, (cell, rate) in enumerate(run_cells(hit_rate, traces, every, processes), start=1):
        found[cell] = rate
        progress(done, len(every))
    return Rates(found)


def hit_rate(traces: Mapping[str, Trace], cell: Cell) -> float:
    """Prompt blocks matched by prefix / all prompt blocks."""
    trace, settings = traces[cell.trace], Settings()
    if cell.arm.startswith(NONSENSE_ARM):
        policy = NONSENSE[cell.arm.removeprefix(NONSENSE_ARM)]()
        order = GraphOrder(trace, policy, planning=settings.planning)
        hits = simulate(trace, [Instance(cell.capacity, order)]).hits
    else:
        hits = run_arm(cell.arm, trace, cell.capacity, settings)
    return float(hits.sum() / max(1, trace.prompt_blocks))
