"""Hit rates of many arms at many capacities: the lab's table."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from .arms import HINTS, Settings, graph_policies, run_arm
from .trace import Trace


@dataclass(frozen=True, slots=True)
class HitTable:
    """What a replay found.

    Attributes:
        rates: arm → capacity in blocks → prompt blocks matched by prefix / all prompt blocks.
        seconds: How long the whole table took.
    """

    trace: Trace
    capacities: tuple[int, ...]
    rates: dict[str, dict[int, float]]
    seconds: float
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """``{"trace", "blocks", "policies": {arm: {capacity: rate}}, "seconds"}``."""
        return {
            "trace": self.trace.name,
            "requests": len(self.trace),
            "blocks": self.trace.prompt_blocks,
            "distinct_blocks": self.trace.num_blocks,
            "block_size": self.trace.block_size,
            "policies": {
                arm: {str(capacity): round(rate, 6) for capacity, rate in row.items()}
                for arm, row in self.rates.items()
            },
            "notes": self.notes,
            "seconds": round(self.seconds, 2),
        }

    def way(self, arm: str, capacity: int) -> float | None:
        """How far ``arm`` is on the way from LRU (0) to Belady (1); None where there is none."""
        lru, bound = (self.rates.get(name, {}).get(capacity) for name in ("lru", "belady"))
        if lru is None or bound is None or bound - lru < 1e-9:
            return None
        return (self.rates[arm][capacity] - lru) / (bound - lru)


def hit_table(
    trace: Trace,
    arms: Sequence[str],
    capacities: Sequence[int],
    settings: Settings,
    *,
    processes: int = 2,
    progress: Callable[[int, int], None] = lambda done, cells: None,
) -> HitTable:
    """Run every arm at every capacity, in ``processes`` processes (1: in this one).

    Args:
        progress: Told how many of the cells are done.
    """
    began = time.perf_counter()
    # Graph policies take the longest: start with them, so that no process ends alone with one.
    cells = sorted(itertools.product(arms, capacities), key=lambda cell: not _is_slow(cell[0]))
    found: dict[tuple[str, int], float] = {}
    run = _in_processes if processes > 1 and len(cells) > 1 else _in_turn
    for done, (cell, rate) in enumerate(run(trace, cells, settings, processes), start=1):
        found[cell] = rate
        progress(done, len(cells))
    rates = {arm: {c: found[arm, c] for c in capacities} for arm in arms}
    seconds = time.perf_counter() - began
    return HitTable(trace, tuple(capacities), rates, seconds, _equal_columns(rates))


def hit_rate(trace: Trace, arm: str, capacity: int, settings: Settings) -> float:
    """Prompt blocks matched by prefix / all prompt blocks."""
    return float(run_arm(arm, trace, capacity, settings).sum() / max(1, trace.prompt_blocks))


Cell = tuple[str, int]


def _in_turn(trace: Trace, cells: Sequence[Cell], settings: Settings, processes: int) -> Any:
    for cell in cells:
        yield cell, hit_rate(trace, *cell, settings)


def _in_processes(trace: Trace, cells: Sequence[Cell], settings: Settings, processes: int) -> Any:
    spawn = multiprocessing.get_context("spawn")  # a fork of a threaded process may hang
    with ProcessPoolExecutor(processes, spawn, _adopt, (trace, settings)) as pool:
        running = {pool.submit(_run_cell, cell): cell for cell in cells}
        for future in as_completed(running):
            yield running[future], future.result()


_worker: dict[str, Any] = {}


def _adopt(trace: Trace, settings: Settings) -> None:
    _worker.update(trace=trace, settings=settings)


def _run_cell(cell: Cell) -> float:
    return hit_rate(_worker["trace"], *cell, _worker["settings"])


def _is_slow(arm: str) -> bool:
    return arm.removesuffix(HINTS) in graph_policies()


def _equal_columns(rates: dict[str, dict[int, float]]) -> list[str]:
    """Two different algorithms with the same figures everywhere: worth a second look."""
    return [
        f"{one} and {other} are equal at every capacity"
        for one, other in itertools.combinations(rates, 2)
        if len(rates[one]) > 2 and rates[one] == rates[other]
    ]
