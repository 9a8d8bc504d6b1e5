"""How many engines, how much host memory, which routing: what each plan would do with a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..engine.instance import HostTier, Instance
from ..engine.routers import PrefixAffinity, RoundRobin
from ..engine.simulator import Router, simulate
from ..lab.arms import Settings, new_orders
from ..lab.cells import run_cells
from ..orders.orders import EvictionOrder
from ..traces.duration import AGENTS_SERVICE, HostLink
from ..traces.trace import Ints, Trace
from .fleet_routing import FleetRouting, NotingRouter

Seconds = npt.NDArray[np.float64]

ROUTINGS: Final = ("round-robin", "prefix", "home")
"""One engine after the other; where most of the prompt is cached; what ``kvgraph route`` does."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to buy, and how to route.

    Attributes:
        host: Blocks of host memory per block of the pool.
    """

    engines: int
    host: float
    routing: str


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What an engine is.

    Attributes:
        blocks: Of an engine's pool: one that costs 1.
        prefill_tokens_per_s: Prompt tokens that it computes per second, one prompt at a time.
        policy: What orders its blocks.
        host_cost: Cost of as much host memory as a pool, where an engine costs 1; the default is
            chosen.
        times: How many pools of ``blocks`` each engine has, as one that is spread over as many
            GPUs; it costs as much.
    """

    blocks: int
    prefill_tokens_per_s: float = AGENTS_SERVICE.prefill_tokens_per_s
    policy: str = "lru"
    host_cost: float = 0.05
    times: int = 1

    @property
    def pool(self) -> int:
        """Blocks that an engine of a plan has."""
        return self.blocks * self.times

    def cost(self, plan: Plan) -> float:
        """What a plan costs, in engines of ``blocks``."""
        return self.times * plan.engines * (1 + plan.host * self.host_cost)

    def for_trace(self, trace: Trace) -> tuple[PlanTerms, int]:
        """The same with pools in which every request of a trace has room, and how many requests
        have none in ``blocks``: an engine refuses a prompt that can never fit."""
        needed = blocks_needed(trace)
        times = max(1, -(-int(needed.max(initial=0)) // self.blocks))
        return replace(self, times=times), int((needed > self.blocks).sum())


@dataclass(frozen=True, slots=True)
class PlanFound:
    """What a plan does with a trace.

    Attributes:
        cost: In engines.
        hit_rate, host_rate: Shares of the prompt blocks found in pools, and loaded.
        ttft_p50_s, ttft_p95_s: Seconds from a request's arrival until its prompt is computed.
        busiest: Share of the time in which the busiest engine computes prompts.
        blocks: Of each engine's pool.
        refused: Requests that are larger than that pool: no plan that has some serves the trace.
    """

    plan: Plan
    cost: float
    hit_rate: float
    host_rate: float
    ttft_p50_s: float
    ttft_p95_s: float
    busiest: float
    blocks: int
    refused: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found = asdict(self)
        return {**found.pop("plan"), **found}


def compare_plans(
    trace: Trace,
    plans: Sequence[Plan],
    terms: PlanTerms,
    *,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[PlanFound]:
    """What each plan does, in the order of their costs."""
    found: list[PlanFound] = []
    for done, (_, row) in enumerate(run_cells(_run, (trace, terms), plans, processes), start=1):
        found.append(row)
        progress(done, len(plans))
    return sorted(found, key=lambda row: (row.cost, row.ttft_p95_s))


def plans_of(engines: Sequence[int], hosts: Sequence[float]) -> list[Plan]:
    """Every combination; a single engine needs no routing."""
    every = (Plan(*each) for each in product(engines, hosts, ROUTINGS))
    return [plan for plan in every if plan.engines > 1 or plan.routing == ROUTINGS[-1]]


def cheapest(found: Sequence[PlanFound], ttft_s: float) -> PlanFound | None:
    """The cheapest plan that serves all requests, and whose TTFT is good enough at p95; None: none
    is."""
    good = [row for row in found if not row.refused and row.ttft_p95_s <= ttft_s]
    return min(good, key=lambda row: (row.cost, row.ttft_p95_s), default=None)


def run_plan(trace: Trace, plan: Plan, terms: PlanTerms) -> PlanFound:
    """Replay a trace under a plan.

    Engines compute one prompt after the other in the order of arrival, and copies are loaded in
    that time; decoding takes none.
    """
    orders = new_orders(terms.policy, trace, Settings(), plan.engines)
    pools = [_instance(order, plan, terms) for order in orders]
    router = NotingRouter(_router(trace, plan, terms))
    outcome = simulate(trace, pools, router=router)
    size, total = trace.block_size, max(1, trace.prompt_blocks)
    computed = np.maximum(1, trace.input_tokens - size * (outcome.hits + outcome.warmed))
    link = HostLink()
    loading = outcome.warmed * link.seconds(1, size)
    ttft, busy = waits(trace.at, computed / terms.prefill_tokens_per_s + loading, router.where)
    p50, p95 = np.percentile(ttft, [50, 95]).tolist() if len(ttft) else (0.0, 0.0)
    hit_rate, host_rate = float(outcome.hits.sum() / total), float(outcome.warmed.sum() / total)
    refused = int((blocks_needed(trace) > terms.pool).sum())
    return PlanFound(
        plan, terms.cost(plan), hit_rate, host_rate, p50, p95, busy, terms.pool, refused
    )


def blocks_needed(trace: Trace) -> Ints:
    """int32 ``[requests]``: blocks that each holds at the end of its answer."""
    tokens = trace.input_tokens.astype(np.int64) + trace.output_tokens
    needed: Ints = np.maximum(-(-tokens // trace.block_size), np.diff(trace.starts)).astype(
        np.int32
    )
    return needed


def waits(at: Seconds, needs: Seconds, where: Sequence[int]) -> tuple[Seconds, float]:
    """Seconds from each arrival to its end, first come first served at each engine; and the share
    of the time in which the busiest engine works.

    Args:
        at: float64 ``[requests]``, arrivals, ascending.
        needs: float64 ``[requests]``, seconds of work.
        where: The engine of each.
    """
    free: dict[int, float] = {}
    work: dict[int, float] = {}
    ends = np.zeros(len(at))
    for number, (arrival, need, engine) in enumerate(
        zip(at.tolist(), needs.tolist(), where, strict=True)
    ):
        free[engine] = ends[number] = max(arrival, free.get(engine, 0.0)) + need
        work[engine] = work.get(engine, 0.0) + need
    span = max(free.values(), default=0.0) or 1.0
    return ends - at, max(work.values(), default=0.0) / span


def _run(shared: tuple[Trace, PlanTerms], plan: Plan) -> PlanFound:
    return run_plan(shared[0], plan, shared[1])


def _instance(order: EvictionOrder, plan: Plan, terms: PlanTerms) -> Instance:
    host = HostTier(round(plan.host * terms.pool)) if plan.host else None
    return Instance(terms.pool, order, host=host)


def _router(trace: Trace, plan: Plan, terms: PlanTerms) -> Router:
    if plan.routing == "home":
        return FleetRouting(trace, tokens_per_s=terms.prefill_tokens_per_s)
    return PrefixAffinity(trace) if plan.routing == "prefix" else RoundRobin()
