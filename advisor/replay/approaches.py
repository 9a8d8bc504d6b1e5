"""Approaches side by side: routing (A), a host tier (B), an eviction policy (C), and together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from ..policies.registry import DEFAULT
from .arms import Settings, new_orders, run_cells
from .orders import SessionTtlOrder
from .simulator import (
    EvictionOrder,
    HostTier,
    Instance,
    Outcome,
    PrefixAffinity,
    RoundRobin,
    Router,
    SessionSticky,
    simulate,
)
from .tables import table_of
from .trace import HostLink, ServiceModel, Trace

HOST_FACTOR: Final = 4  # blocks of host memory for each block of an instance's pool
RESERVED: Final = 0.7  # share of a pool that approach A keeps for sessions with several turns

ROUTERS: Final[dict[str, Callable[[Trace], Router]]] = {
    "round-robin": lambda trace: RoundRobin(),
    "prefix-affinity": PrefixAffinity,
    "session-sticky": SessionSticky,
}


@dataclass(frozen=True, slots=True)
class Approach:
    """A router, an eviction order (``reserved`` is approach A's own), and a host tier or none."""

    name: str
    router: str
    policy: str
    host: bool


@dataclass(frozen=True, slots=True)
class ApproachRow:
    """The result of one approach."""

    approach: str
    capacity: int  # blocks of all pools together
    hit_rate: float  # prompt blocks found in a pool / all prompt blocks
    host_rate: float  # prompt blocks loaded from host memory / all prompt blocks
    prefill_tokens: int  # prompt tokens still computed
    ttft_saved_ms: float  # mean prefill time saved per request, less the time for loading


def approaches() -> list[Approach]:
    """Return the approaches of the table."""
    policy = DEFAULT
    return [
        Approach("round-robin, LRU", "round-robin", "lru", False),
        Approach("prefix-affinity, LRU", "prefix-affinity", "lru", False),
        Approach("session-sticky, LRU", "session-sticky", "lru", False),
        Approach("A: session-sticky, reserved", "session-sticky", "reserved", False),
        Approach("B: prefix-affinity, host tier", "prefix-affinity", "lru", True),
        Approach(f"C: prefix-affinity, {policy}", "prefix-affinity", policy, False),
        Approach("A + B", "session-sticky", "reserved", True),
        Approach(f"A's routing + C: {policy}", "session-sticky", policy, False),
        Approach(f"B + C: {policy}", "prefix-affinity", policy, True),
        Approach(f"A's routing + B + C: {policy}", "session-sticky", policy, True),
    ]


def compare_approaches(
    trace: Trace,
    capacities: Sequence[int],
    instances: int,
    settings: Settings,
    *,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ApproachRow]:
    """Run every approach; each capacity is divided evenly among ``instances``."""
    cells = [(approach, capacity) for capacity in capacities for approach in approaches()]
    # The slowest first, so that no process runs one alone at the end.
    slow_first = sorted(cells, key=lambda cell: cell[0].policy != DEFAULT)
    found: dict[tuple[Approach, int], ApproachRow] = {}
    rows = run_cells(_run_cell, (trace, instances, settings), slow_first, processes)
    for done, (cell, row) in enumerate(rows, start=1):
        found[cell] = row
        progress(done, len(cells))
    return [found[cell] for cell in cells]


def run_approach(
    trace: Trace, approach: Approach, capacity: int, instances: int, settings: Settings
) -> ApproachRow:
    """Replay ``trace`` through ``instances`` engines under one approach."""
    each = max(1, capacity // instances)
    pools = [
        Instance(each, order, host=HostTier(HOST_FACTOR * each) if approach.host else None)
        for order in _orders(approach.policy, trace, each, instances, settings)
    ]
    outcome = simulate(trace, pools, router=ROUTERS[approach.router](trace), load=settings.load)
    return _row(trace, approach, capacity, outcome)


def approaches_table(trace: Trace, rows: Sequence[ApproachRow]) -> Table:
    """Return the rows as a table."""
    heads = "approach", "blocks", "hit rate", "from host", "prefill M tokens", "TTFT saved"
    table = table_of(f"{trace.name}: approaches side by side", heads, heads[:1])
    for row in rows:
        table.add_row(
            row.approach,
            f"{row.capacity:,}",
            f"{row.hit_rate:.4f}",
            f"{row.host_rate:.4f}",
            f"{row.prefill_tokens / 1e6:.1f}",
            f"{row.ttft_saved_ms:.1f} ms",
        )
    return table


def _run_cell(shared: tuple[Trace, int, Settings], cell: tuple[Approach, int]) -> ApproachRow:
    (trace, instances, settings), (approach, capacity) = shared, cell
    return run_approach(trace, approach, capacity, instances, settings)


def _orders(
    policy: str, trace: Trace, capacity: int, instances: int, settings: Settings
) -> Sequence[EvictionOrder]:
    if policy != "reserved":
        return new_orders(policy, trace, settings, instances)
    kept = round(RESERVED * capacity)
    return [SessionTtlOrder(trace, settings.session_ttl_s, kept) for _ in range(instances)]


def _row(trace: Trace, approach: Approach, capacity: int, outcome: Outcome) -> ApproachRow:
    total = max(1, trace.prompt_blocks)
    hits, warmed = int(outcome.hits.sum()), int(outcome.warmed.sum())
    size = trace.block_size
    saved_tokens = (hits + warmed) * size
    saved_s = ServiceModel().prefill_seconds(saved_tokens) - HostLink().seconds(warmed, size)
    return ApproachRow(
        approach=approach.name,
        capacity=capacity,
        hit_rate=hits / total,
        host_rate=warmed / total,
        prefill_tokens=max(0, int(trace.input_tokens.sum(dtype="int64")) - saved_tokens),
        ttft_saved_ms=1e3 * saved_s / max(1, len(trace)),
    )
