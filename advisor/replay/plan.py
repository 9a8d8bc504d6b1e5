"""`kvgraph plan`: how many engines, how much host memory, and which routing; results by cost."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from ..fleet.board import EngineBoard, Speed
from ..fleet.router import Choice, FleetRouter, Holdings, RoutingRequest
from .arms import Settings, all_cells, new_orders
from .cli import Processes, check_writable, parse_numbers
from .reader import load_trace
from .simulator import (
    EvictionOrder,
    HostTier,
    Instance,
    PrefixAffinity,
    RoundRobin,
    Router,
    simulate,
)
from .tables import pyplot, save_picture, table_of
from .trace import AGENTS_SERVICE, HostLink, Ints, Trace


class PrefillQueues:
    """Simulates when each engine finishes a prompt."""

    def __init__(self, tokens_per_s: float, computed: Callable[[Choice], None]) -> None:
        self._rate = tokens_per_s
        self._computed = computed
        self._free_at: dict[int, float] = {}
        self._ends: list[tuple[float, int, Choice]] = []
        self._number = 0

    def advance(self, now: float) -> None:
        """Finish all prompts that are done by ``now``."""
        while self._ends and self._ends[0][0] <= now:
            self._computed(heapq.heappop(self._ends)[2])

    def add(self, choice: Choice, now: float) -> None:
        start = max(now, self._free_at.get(choice.engine, 0.0))
        end = start + choice.tokens / self._rate
        self._free_at[choice.engine] = end
        self._number += 1
        heapq.heappush(self._ends, (end, self._number, choice))


_ALL_LOST: Final = np.ones(1, dtype=np.bool_)


class FleetRouting:
    """Routes by a ``FleetRouter`` that sees what the simulated engines hold.

    Args:
        tokens_per_s: Prompt tokens that an engine computes per second; the remaining ones wait
            there. None: prompts take no time, and no engine has a queue.
    """

    def __init__(self, trace: Trace, tokens_per_s: float | None = None) -> None:
        self._chains = trace.chains()
        self._limits = trace.matchable.tolist()
        self._tokens, self._session = trace.input_tokens.tolist(), trace.session.tolist()
        self._at, self._size = trace.at.tolist(), trace.block_size
        self._speed = Speed()
        self.router = FleetRouter(EngineBoard())
        self.queues: PrefillQueues | None = None
        if tokens_per_s is not None:
            self._speed = replace(self._speed, prefill_tokens_per_s=tokens_per_s)
            self.queues = PrefillQueues(tokens_per_s, self.router.computed)

    def __call__(self, request: int, instances: Sequence[Instance]) -> int:
        board = self.router.board
        for instance in instances[len(board) :]:
            pool_tokens = instance.capacity * self._size
            board.add(f"#{len(board)}", replace(self._speed, pool_tokens=pool_tokens))
        now = self._at[request]
        if self.queues is not None:
            self.queues.advance(now)
        wanted = RoutingRequest(self._session[request], self._tokens[request])
        choice = self.router.route(wanted, self._holdings(request, instances), now)
        if self.queues is None:
            self.router.computed(choice)
        else:
            self.queues.add(choice, now)
        return choice.engine

    def _holdings(self, request: int, instances: Sequence[Instance]) -> Holdings:
        chain, limit = self._chains[request], self._limits[request]

        def reached(reach: Callable[[Instance], int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            return self._size * np.array([reach(each) for each in instances], dtype=np.int64)

        pool = reached(lambda instance: instance.match(chain, limit))
        below = reached(lambda instance: instance.reach(chain, limit))
        return Holdings(pool, below, lost=_ALL_LOST)


Seconds = npt.NDArray[np.float64]

ROUTINGS: Final = ("round-robin", "prefix", "home")
"""Round robin; to the engine with most of the prompt; as `kvgraph route` does."""


@dataclass(frozen=True, slots=True)
class Plan:
    engines: int
    host: float  # blocks of host memory per block of the pool
    routing: str


@dataclass(frozen=True, slots=True)
class PlanTerms:
    blocks: int  # of an engine's pool, where the engine costs 1
    # Prompt tokens that it computes per second, one prompt at a time.
    prefill_tokens_per_s: float = AGENTS_SERVICE.prefill_tokens_per_s
    policy: str = "lru"  # its eviction policy
    # Cost of as much host memory as a pool, where an engine costs 1; the default is chosen.
    host_cost: float = 0.05
    # How many pools of ``blocks`` each engine has, as one that is spread over as many GPUs; it
    # costs as much.
    times: int = 1

    @property
    def pool(self) -> int:
        return self.blocks * self.times

    def cost(self, plan: Plan) -> float:
        return self.times * plan.engines * (1 + plan.host * self.host_cost)

    def for_trace(self, trace: Trace) -> tuple[PlanTerms, int]:
        """Enlarge pools until every request fits; returns how many did not fit before."""
        needed = blocks_needed(trace)
        times = max(1, -(-int(needed.max(initial=0)) // self.blocks))
        return replace(self, times=times), int((needed > self.blocks).sum())


@dataclass(frozen=True, slots=True)
class PlanFound:
    plan: Plan
    cost: float  # in engines
    # ``hit_rate``, ``host_rate``: shares of the prompt blocks found in pools, and loaded.
    hit_rate: float
    host_rate: float
    # ``ttft_p50_s``, ``ttft_p95_s``: seconds from a request's arrival until its prompt is computed.
    ttft_p50_s: float
    ttft_p95_s: float
    busiest: float  # share of the time in which the busiest engine computes prompts
    blocks: int  # of each engine's pool
    # Requests larger than that pool: a plan with any does not serve the trace.
    refused: int

    def as_dict(self) -> dict[str, Any]:
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
    found = all_cells(_run, (trace, terms), plans, processes, progress)
    return sorted(found.values(), key=lambda row: (row.cost, row.ttft_p95_s))


def plans_of(engines: Sequence[int], hosts: Sequence[float]) -> list[Plan]:
    """Return every combination; a single engine needs no routing."""
    every = (Plan(*each) for each in product(engines, hosts, ROUTINGS))
    return [plan for plan in every if plan.engines > 1 or plan.routing == ROUTINGS[-1]]


def cheapest(found: Sequence[PlanFound], ttft_s: float) -> PlanFound | None:
    """Return the cheapest plan that serves all with a p95 TTFT below the bound, or None."""
    good = [row for row in found if not row.refused and row.ttft_p95_s <= ttft_s]
    return min(good, key=lambda row: (row.cost, row.ttft_p95_s), default=None)


def run_plan(trace: Trace, plan: Plan, terms: PlanTerms) -> PlanFound:
    """Replay a trace under a plan. Engines compute one prompt after the other in the order of
    arrival, and copies are loaded in that time; decoding takes none.
    """
    orders = new_orders(terms.policy, trace, Settings(), plan.engines)
    pools = [_instance(order, plan, terms) for order in orders]
    router, where = _router(trace, plan, terms), list[int]()  # engine numbers, by request

    def noted(request: int, instances: Sequence[Instance]) -> int:
        where.append(router(request, instances))
        return where[-1]

    outcome = simulate(trace, pools, router=noted)
    size, total = trace.block_size, max(1, trace.prompt_blocks)
    computed = np.maximum(1, trace.input_tokens - size * (outcome.hits + outcome.warmed))
    link = HostLink()
    loading = outcome.warmed * link.seconds(1, size)
    ttft, busy = waits(trace.at, computed / terms.prefill_tokens_per_s + loading, where)
    p50, p95 = np.percentile(ttft, [50, 95]).tolist() if len(ttft) else (0.0, 0.0)
    hit_rate, host_rate = float(outcome.hits.sum() / total), float(outcome.warmed.sum() / total)
    refused = int((blocks_needed(trace) > terms.pool).sum())
    return PlanFound(
        plan, terms.cost(plan), hit_rate, host_rate, p50, p95, busy, terms.pool, refused
    )


def blocks_needed(trace: Trace) -> Ints:
    """Return the blocks that each request holds at the end of its answer, int32 ``[requests]``."""
    tokens = trace.input_tokens.astype(np.int64) + trace.output_tokens
    needed = np.maximum(-(-tokens // trace.block_size), np.diff(trace.starts))
    return np.asarray(needed, dtype=np.int32)


def waits(at: Seconds, needs: Seconds, where: Sequence[int]) -> tuple[Seconds, float]:
    """Queue requests that arrive ``at``, ascending, and take ``needs`` seconds each, float64
    ``[requests]``, at their engines, first come first served. Returns the seconds from each arrival
    to its end, and the share of the time in which the busiest engine works.
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


DEFAULT_PICTURE: Final = Path("plan.png")


Ttft = Annotated[float, typer.Option(min=0.001, help="Wanted TTFT at p95, in seconds.")]
PrefillRate = Annotated[
    float, typer.Option(min=1, help="Prompt tokens that an engine computes per second.")
]
HostCost = Annotated[
    float,
    typer.Option(min=0, help="Cost of as much host memory as one pool holds; one engine costs 1."),
]


def plan(
    trace: Annotated[Path, typer.Argument(help="A trace file, gzipped or not.")],
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of one engine's pool.")],
    engines: Annotated[
        str, typer.Option(help="Numbers of engines to try, separated by commas.")
    ] = "1,2,4,8",
    host: Annotated[
        str,
        typer.Option(
            help="Host memory of an engine to try, in sizes of its pool, separated by commas."
        ),
    ] = "0,2",
    ttft: Ttft = 2.0,
    prefill: PrefillRate = AGENTS_SERVICE.prefill_tokens_per_s,
    policy: Annotated[str, typer.Option(help="lru, or default: kvgraph's own (slow).")] = "lru",
    host_cost: HostCost = 0.05,
    processes: Processes = 2,
    picture: Annotated[Path, typer.Option(help="Save the picture here (PNG).")] = DEFAULT_PICTURE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """How many engines, how much host memory, which routing: hit rate and TTFT over cost."""
    sizes = "numbers from {} to 1024, with commas"
    plans = plans_of(
        parse_numbers("--engines", engines, int, sizes.format(1), most=1024),
        parse_numbers("--host", host, float, sizes.format(0), least=0, most=1024),
    )
    check_writable("--picture", picture)
    terms = PlanTerms(blocks, prefill, policy, host_cost)
    console = Console(stderr=True, quiet=as_json)
    with console.status(f"{len(plans)} plans") as status:
        read = load_trace(trace)
        terms, too_large = terms.for_trace(read)
        found = compare_plans(
            read,
            plans,
            terms,
            processes=processes,
            progress=lambda done, total: status.update(f"{done} of {total} plans"),
        )
    best = cheapest(found, ttft)
    if as_json:
        rows = [row.as_dict() for row in found]
        said = {"plans": rows, "best": best and best.as_dict(), "too_large": too_large}
        typer.echo(json.dumps(said))
        return draw_plans(found, best, ttft, picture)
    Console().print(_table(found, best, trace.name))
    if too_large:
        typer.echo(
            f"{too_large:,} of {len(read):,} requests are larger than a pool of {blocks:,} blocks: "
            f"no engine serves them. Planned with pools of {terms.pool:,} blocks, {terms.times} "
            f"times as large and as dear"
        )
    typer.echo(_sentence(best, ttft))
    draw_plans(found, best, ttft, picture)  # after the figures: a full disk costs it alone
    typer.echo(f"picture: {picture}")


def _table(found: Sequence[PlanFound], best: PlanFound | None, name: str) -> Table:
    heads = (
        "engines", "host pools", "cost", "hit rate", "from host", "TTFT p50 s", "p95 s", "busy",
        "routing",
    )  # fmt: skip
    table = table_of(f"{name}: plans by cost", heads, ["engines", "routing"])
    for row in found:
        table.add_row(
            f"{row.plan.engines}", f"{row.plan.host:g}", f"{row.cost:.2f}",
            f"{row.hit_rate:.3f}", f"{row.host_rate:.3f}", f"{row.ttft_p50_s:.2f}",
            f"{row.ttft_p95_s:.2f}", f"{row.busiest:.0%}", row.plan.routing,
            style="bold" if row is best else "",
        )  # fmt: skip
    return table


def _sentence(best: PlanFound | None, ttft: float) -> str:
    if best is None:
        return f"no plan has a TTFT of {ttft:g} s at p95: try more engines or more host memory"
    plan = best.plan
    memory = f"{plan.host:g} pools of host memory each" if plan.host else "no host memory"
    engines = "1 engine" if plan.engines == 1 else f"{plan.engines} engines"
    return (
        f"cheapest with a TTFT of {ttft:g} s at p95: {engines} of {best.blocks:,} blocks with "
        f"{memory}, "
        f"routing {plan.routing} (simulated: prompts one after the other, decoding free)"
    )


_COLORS: Final = dict(zip(ROUTINGS, ("#9a9a9a", "#4c78a8", "#e45756"), strict=True))


def draw_plans(
    found: Sequence[PlanFound], best: PlanFound | None, ttft_s: float, path: Path
) -> None:
    """Save the picture; raises ReplayError."""
    plots = pyplot()
    figure, (rates, times) = plots.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for routing in ROUTINGS:
        rows = [row for row in found if row.plan.routing == routing]
        _points(rates, rows, [row.hit_rate + row.host_rate for row in rows], routing)
        _points(times, rows, [row.ttft_p95_s for row in rows], routing)
    rates.set(xlabel="cost in engines", ylabel="share of the prompt found", ylim=(0, 1))
    times.set(xlabel="cost in engines", ylabel="TTFT p95 in seconds", yscale="log")
    times.axhline(ttft_s, color="#444444", linewidth=0.8, linestyle=":")
    if best is not None:
        times.plot(
            [best.cost],
            [best.ttft_p95_s],
            "o",
            markersize=14,
            fillstyle="none",
            color="#222222",
            label="cheapest that is fast enough",
        )
    times.legend(frameon=False, fontsize=8)
    save_picture(figure, path, dpi=120)


def _points(axes: Any, rows: Sequence[PlanFound], values: Sequence[float], routing: str) -> None:
    """Plot one point per plan; hollow where there is no host memory."""
    costs = [row.cost for row in rows]
    axes.plot(costs, values, linewidth=0.6, alpha=0.4, color=_COLORS[routing])
    faces = [_COLORS[routing] if row.plan.host else "white" for row in rows]
    axes.scatter(costs, values, s=26, c=faces, edgecolors=_COLORS[routing], label=routing, zorder=3)
