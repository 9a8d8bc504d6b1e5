"""What LRU misses although an infinite cache would find it, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from .fast import infinite_hits, lru_hits
from .tables import capacity_table
from .trace import Trace


@dataclass(frozen=True, slots=True)
class LossAnalysis:
    """LRU compared with an infinite cache, at one capacity."""

    capacity_blocks: int
    infinite_hit_rate: float
    lru_hit_rate: float
    gap_points: float  # hit rate of the infinite cache minus LRU's, in percentage points
    gap_tokens: int  # the same in prompt tokens computed again
    multi_turn_share: float  # share of the lost blocks that an earlier turn of the same session had
    cross_session_share: float  # share of the lost blocks that only other sessions had before
    multi_turn_sessions: float  # share of sessions with two turns or more
    # ``gap_requests_p50``, ``gap_requests_p90``: others' requests between two turns of a session.
    gap_requests_p50: float
    gap_requests_p90: float
    # ``gap_s_p50``, ``gap_s_p90``: seconds between them.
    gap_s_p50: float
    gap_s_p90: float
    session_blocks_p50: float  # KV of a session at its largest, in blocks
    # ``needed_sessions_p50``, ``needed_sessions_max``: sessions that will return, at each arrival.
    needed_sessions_p50: float
    needed_sessions_max: int
    budget_blocks: int  # most distinct blocks that returning sessions need at once

    def as_dict(self) -> dict[str, Any]:
        return {
            name: float(f"{value:.5g}") if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


def analyze(trace: Trace, capacity: int) -> LossAnalysis:
    """Analyse the losses of LRU with ``capacity`` blocks."""
    best, found = infinite_hits(trace), lru_hits(trace, capacity)
    own = own_history(trace)
    lost = best - found
    lost_own = np.maximum(0, np.minimum(best, own) - found)
    between_requests, between_s = _gaps(trace)
    needed, budget = needed_at_once(trace)
    total = max(1, trace.prompt_blocks)
    all_lost = max(1, int(lost.sum()))
    turns = np.bincount(trace.session)
    return LossAnalysis(
        capacity_blocks=capacity,
        infinite_hit_rate=float(best.sum() / total),
        lru_hit_rate=float(found.sum() / total),
        gap_points=float(100 * lost.sum() / total),
        gap_tokens=int(lost.sum()) * trace.block_size,
        multi_turn_share=float(lost_own.sum() / all_lost),
        cross_session_share=float((lost - lost_own).sum() / all_lost),
        multi_turn_sessions=float((turns > 1).sum() / max(1, (turns > 0).sum())),
        gap_requests_p50=percentile(between_requests, 50),
        gap_requests_p90=percentile(between_requests, 90),
        gap_s_p50=percentile(between_s, 50),
        gap_s_p90=percentile(between_s, 90),
        session_blocks_p50=percentile(session_blocks(trace), 50),
        needed_sessions_p50=percentile(needed, 50),
        needed_sessions_max=int(needed.max(initial=0)),
        budget_blocks=int(budget.max(initial=0)),
    )


def losses_table(trace: Trace, capacities: list[int], losses: list[LossAnalysis]) -> Table:
    table = capacity_table(f"{trace.name}: where LRU loses", capacities)
    columns = [loss.as_dict() for loss in losses]
    for name in list(columns[0])[1:]:
        table.add_row(name.replace("_", " "), *(f"{column[name]:,}" for column in columns))
    return table


def own_history(trace: Trace) -> Any:
    """Return how many of each prompt's first blocks an earlier turn of its session walked."""
    walked: dict[int, set[int]] = {}
    own = np.zeros(len(trace), dtype=np.int32)
    for request, (chain, session) in enumerate(
        zip(trace.chains(), trace.session.tolist(), strict=True)
    ):
        before = walked.setdefault(session, set())
        for block in chain[: int(trace.matchable[request])]:
            if block not in before:
                break
            own[request] += 1
        before.update(chain)
    return own


def _gaps(trace: Trace) -> tuple[Any, Any]:
    """Return requests and seconds between consecutive turns of the same session."""
    order = np.argsort(trace.session, kind="stable")
    same = trace.session[order][1:] == trace.session[order][:-1]
    return np.diff(order)[same] - 1, np.diff(trace.at[order])[same]


def session_blocks(trace: Trace) -> Any:
    largest = np.zeros(int(trace.session.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(largest, trace.session, np.diff(trace.starts))
    return largest[largest > 0]


def needed_at_once(trace: Trace) -> tuple[Any, Any]:
    """Return at each arrival how many sessions are between turns, and how many blocks they hold."""
    last, session, chains = trace.last.tolist(), trace.session.tolist(), trace.chains()
    held: dict[int, list[int]] = {}
    holders: dict[int, int] = {}
    needed, budget = np.zeros((2, len(trace)), dtype=np.int64)
    for request, chain in enumerate(chains):
        for block in held.pop(session[request], ()):
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
        if not last[request]:
            held[session[request]] = chain
            for block in chain:
                holders[block] = holders.get(block, 0) + 1
        needed[request] = len(held)
        budget[request] = len(holders)
    return needed, budget


def percentile(values: Any, share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else 0.0
