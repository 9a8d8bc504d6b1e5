"""What can be said of a workload in a few figures: how its sessions come back, and what its prompts
would find in a fleet of engines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

import numpy as np

from ..engine.instance import Instance
from ..engine.routers import PrefixAffinity
from ..engine.simulator import simulate
from ..fast.bounds import infinite_hits
from ..lab.analysis import needed_at_once, own_history, session_blocks
from ..orders.orders import LruOrder
from ..traces.trace import Ints, Trace
from .fleet_routing import NotingRouter


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """A workload on a fleet whose router goes by what engines have cached, each under LRU.

    Attributes:
        several: Share of sessions with more than one turn.
        gap_p50, gap_p90: Requests that the engine of a session's turn serves before its next turn.
        blocks_p50: Blocks of a session's longest prompt.
        live_p50, live_max: Sessions between two of their turns, at a request.
        infinite: Share of prompt blocks that an endless cache finds.
        lru: The share that the fleet finds.
        multi_turn: Share of the gap between both that a session's own turns lose.
        budget_p50, budget_max: Distinct blocks that those sessions hold, at a request.
    """

    several: float
    gap_p50: float
    gap_p90: float
    blocks_p50: float
    live_p50: float
    live_max: float
    infinite: float
    lru: float
    multi_turn: float
    budget_p50: float
    budget_max: float

    def errors(self, other: WorkloadFacts) -> dict[str, float]:
        """By how much each figure is off that of ``other``, as a share of it."""
        wanted = asdict(other)
        return {name: abs(own / wanted[name] - 1) for name, own in asdict(self).items()}


SEED_FACTS: Final = WorkloadFacts(
    several=0.09,
    gap_p50=2,
    gap_p90=12,
    blocks_p50=93,
    live_p50=14,
    live_max=21,
    infinite=0.534,
    lru=0.433,
    multi_turn=0.66,
    budget_p50=3515,
    budget_max=4927,
)
"""The seed's figures, on eight engines of 550 blocks."""


def workload_facts(trace: Trace, engines: int, capacity: int) -> WorkloadFacts:
    """Measure a workload on ``engines`` engines of ``capacity`` blocks each."""
    routed = NotingRouter(PrefixAffinity(trace))
    pools = [Instance(capacity, LruOrder()) for _ in range(engines)]
    found = simulate(trace, pools, router=routed).hits
    endless = infinite_hits(trace)
    lost = endless - found
    lost_own = np.maximum(0, np.minimum(endless, own_history(trace)) - found)
    total = max(1, trace.prompt_blocks)
    gaps = _gaps(trace, np.array(routed.where))
    needed, budget = needed_at_once(trace)
    return WorkloadFacts(
        several=float((np.bincount(trace.session) > 1).mean()),
        gap_p50=float(np.percentile(gaps, 50)),
        gap_p90=float(np.percentile(gaps, 90)),
        blocks_p50=float(np.median(session_blocks(trace))),
        live_p50=float(np.median(needed)),
        live_max=float(needed.max()),
        infinite=float(endless.sum() / total),
        lru=float(found.sum() / total),
        multi_turn=float(lost_own.sum() / max(1, lost.sum())),
        budget_p50=float(np.median(budget)),
        budget_max=float(budget.max()),
    )


def _gaps(trace: Trace, where: Ints) -> Ints:
    """Requests that the engine of each turn serves before its session's next turn."""
    order = np.argsort(trace.session, kind="stable")
    again = np.flatnonzero(trace.session[order][1:] == trace.session[order][:-1])
    gaps = [
        int((where[turn + 1 : after] == where[turn]).sum())
        for turn, after in zip(order[again], order[again + 1], strict=True)
    ]
    return np.array(gaps, dtype=np.int32)
