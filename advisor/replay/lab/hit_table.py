"""Hit rates of many arms at many capacities: the lab's table."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..traces.trace import Trace
from .arms import HINTS, STOPS, Settings, graph_policies, run_arm, without_suffix
from .cells import run_cells


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
        """How far ``arm`` is from LRU (0) to Belady (1); None if one of these is missing."""
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
    rates_of = run_cells(_hit_rate, (trace, settings), cells, processes)
    for done, (cell, rate) in enumerate(rates_of, start=1):
        found[cell] = rate
        progress(done, len(cells))
    rates = {arm: {c: found[arm, c] for c in capacities} for arm in arms}
    seconds = time.perf_counter() - began
    notes = [*_notes(trace, capacities, arms), *_equal_columns(rates, settings.guard)]
    return HitTable(trace, tuple(capacities), rates, seconds, notes)


def _hit_rate(shared: tuple[Trace, Settings], cell: tuple[str, int]) -> float:
    """Prompt blocks matched by prefix / all prompt blocks, for an arm and a capacity."""
    (trace, settings), (arm, capacity) = shared, cell
    return float(run_arm(arm, trace, capacity, settings).sum() / max(1, trace.prompt_blocks))


def _is_slow(arm: str) -> bool:
    return without_suffix(arm) in graph_policies()


def _notes(trace: Trace, capacities: Sequence[int], arms: Sequence[str]) -> Iterator[str]:
    """What a reader of the table would not guess."""
    said = trace.said
    if not (said and said.anything) and any(arm.endswith(HINTS) for arm in arms):
        yield (
            f"in {trace.name} nobody says anything: {HINTS} takes from the future which request is "
            "its session's last, and that is all that is said"
        )
    if not (said and said.tells_stops) and any(arm.endswith(STOPS) for arm in arms):
        yield (
            f"{trace.name} does not say why answers ended, so nothing is read with {STOPS}: make "
            "the fleet with `kvgraph traffic --signals stops` or `all`, or record one"
        )
    for capacity in capacities:
        if longer := int((trace.prompts > capacity).sum()):
            yield (
                f"{longer:,} of {len(trace):,} prompts have more than {capacity:,} blocks: an "
                "engine with such a pool refuses them"
            )


def _equal_columns(rates: dict[str, dict[int, float]], guard: bool) -> Iterator[str]:
    """Warn of two different algorithms with the same figures everywhere."""
    for one, other in itertools.combinations(rates, 2):
        if len(rates[one]) > 2 and rates[one] == rates[other]:
            equal = f"{one} and {other} are equal at every capacity"
            ranked = next((arm for arm in (one, other) if arm != "lru"), "")
            kept = guard and "lru" in (one, other) and _is_slow(ranked)
            yield f"{equal}: the guard let {ranked} rank never, or in vain" if kept else equal
