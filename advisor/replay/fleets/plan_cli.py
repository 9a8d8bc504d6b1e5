"""``kvgraph plan``: what to buy for a trace, and how to route."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ReplayError
from ..traces.duration import AGENTS_SERVICE

if TYPE_CHECKING:
    from .fleet_plans import PlanFound

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
    engines: Annotated[str, typer.Option(help="Numbers of engines to try.")] = "1,2,4,8",
    host: Annotated[str, typer.Option(help="Host memory to try, in pools.")] = "0,2",
    ttft: Ttft = 2.0,
    prefill: PrefillRate = AGENTS_SERVICE.prefill_tokens_per_s,
    policy: Annotated[str, typer.Option(help="lru, or default: kvgraph's own (slow).")] = "lru",
    host_cost: HostCost = 0.05,
    processes: Annotated[int, typer.Option(min=1, max=64)] = 2,
    picture: Annotated[Path, typer.Option(help="Save the picture here (PNG).")] = DEFAULT_PICTURE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """How many engines, how much host memory, which routing: hit rate and TTFT over cost."""
    from ..traces.reader import load_trace
    from .fleet_plans import PlanTerms, cheapest, compare_plans, plans_of
    from .plan_picture import draw_plans

    plans = plans_of([int(each) for each in _numbers("--engines", engines, whole=True)],
                     _numbers("--host", host))  # fmt: skip
    terms = PlanTerms(blocks, prefill, policy, host_cost)
    console = Console(stderr=True, quiet=as_json)
    with console.status(f"{len(plans)} plans") as status:
        read = load_trace(trace)
        terms, too_large = terms.for_trace(read)
        found = compare_plans(
            read, plans, terms, processes=processes,
            progress=lambda done, total: status.update(f"{done} of {total} plans"),
        )  # fmt: skip
    best = cheapest(found, ttft)
    draw_plans(found, best, ttft, picture)
    if as_json:
        rows = [row.as_dict() for row in found]
        said = {"plans": rows, "best": best and best.as_dict(), "too_large": too_large}
        typer.echo(json.dumps(said))
        return
    Console().print(_table(found, best, trace.name))
    if too_large:
        typer.echo(
            f"{too_large:,} of {len(read):,} requests are larger than a pool of {blocks:,} blocks: "
            f"no engine serves them. Planned with pools of {terms.pool:,} blocks, {terms.times} "
            f"times as large and as dear"
        )
    typer.echo(_sentence(best, ttft))
    typer.echo(f"picture: {picture}")


def _numbers(option: str, text: str, whole: bool = False) -> list[float]:
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = [-1.0]
    least = 1 if whole else 0
    if not all(least <= n <= 1024 and (not whole or n == int(n)) for n in numbers):
        raise ReplayError(f"{option} {text!r}: allowed: numbers from {least} to 1024, with commas")
    return numbers


def _table(found: Sequence[PlanFound], best: PlanFound | None, name: str) -> Table:
    table = Table(title=f"{name}: plans by cost", title_justify="left")
    for column in ("engines", "host", "cost", "hit rate", "loaded", "TTFT p50", "p95", "busiest"):
        table.add_column(column, justify="right")
    table.add_column("routing")
    for row in found:
        table.add_row(
            f"{row.plan.engines}", f"{row.plan.host:g} pools", f"{row.cost:.2f}",
            f"{row.hit_rate:.3f}", f"{row.host_rate:.3f}", f"{row.ttft_p50_s:.2f} s",
            f"{row.ttft_p95_s:.2f} s", f"{row.busiest:.0%}", row.plan.routing,
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
