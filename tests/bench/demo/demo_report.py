"""How the demo ends: a table a part, one JSON file, and three sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final

from kvgraph.graph.types import SourceLayer
from rich.console import Console
from rich.table import Table

from ..figures import Figures, measured_now, quantile
from ..recorded.agents_requests import USERS
from .cliff import CliffResult, cliff_details
from .demo import HAD, ArmResult, DemoResult
from .engine_cliff import EngineCliff

FIGURES_FILE: Final = "demo.json"


@dataclass
class DemoRun:
    out: Path
    cliff: CliffResult | None = None
    engine: EngineCliff | None = None
    found: DemoResult | None = None  # what is found, by a simulated clock or on a real engine
    began_s: float = field(default_factory=monotonic)
    minutes: float = 0.0

    def figures(self) -> Figures:
        figures = Figures("demo")
        figures.add("demo_minutes", self.minutes, "min", "≤ 8")
        for part in (self.cliff, self.engine, self.found):
            if part is not None:
                part.add_to(figures)
        return figures

    def save(self) -> Path:
        self.minutes = (monotonic() - self.began_s) / 60
        content = {**self.figures().as_dict(), **measured_now()}
        if self.cliff is not None:
            content["cliff"] = cliff_details(self.cliff)
        if self.engine is not None:
            content["engine"] = self.engine.details()
        if self.found is not None:
            content[self.found.name] = _found_details(self.found)
        path = self.out / FIGURES_FILE
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def print_report(result: DemoResult, console: Console | None = None) -> None:
    console = console or Console()
    console.print(report_table(result))
    console.print(
        f"{USERS} recorded coding agents on {result.made_by}, in {result.pool} blocks. Every arm "
        "was made to give the recorded answers: what differs is what it had to compute. Signals: "
        "when a session ends, waits for a tool and will roughly be back; layers: where tools and "
        "rules stand. Rules lost, and computed again: protected blocks. Price: what protection "
        "costs of what is found, in points."
    )
    for sentence in _why_lost(result):
        console.print(sentence)


def report_table(result: DemoResult) -> Table:
    table = Table(title=f"{result.requests} requests to every arm", title_justify="left")
    table.add_column("and what it had", no_wrap=True)
    for column in ("found", "rules lost", "again", "price", "TTFT p50 / p95"):
        table.add_column(column, justify="right", no_wrap=column.startswith("TTFT"))
    for arm in result.arms:
        table.add_row(f"{arm.arm}\n[dim]{HAD[arm.arm]}[/dim]", *_cells(arm))
    return table


def print_last_words(run: DemoRun, page: str, console: Console | None = None) -> None:
    """Three sentences: what was seen, what to do next, and where the page is."""
    console = console or Console()
    console.print()
    seen = "; ".join(_seen(run))
    if seen:
        console.print(f"What you saw: {seen}.", soft_wrap=True)
    console.print(
        "What to do next: set AITHER_KVCACHE_GRAPH=1 where you start vLLM, and `kvgraph doctor` "
        "says what your engine can have.",
        soft_wrap=True,
        markup=False,
    )
    console.print(
        f"The page was at {page.partition('/open')[0]} and goes with this command: `kvgraph demo "
        "--part page` keeps one until Ctrl-C, and an engine with the switch logs its own address.",
        soft_wrap=True,
        markup=False,
    )


def _seen(run: DemoRun) -> Iterator[str]:
    if run.engine is not None:
        stock, ours = run.engine.stock.passed, run.engine.ours.passed
        yield (
            f"with {run.engine.stock.agents} agents a real engine answered "
            f"{stock.turns_per_minute:,.0f} turns a minute as stock and "
            f"{ours.turns_per_minute:,.0f} with the switch"
        )
    elif run.cliff is not None:
        stock, ours = run.cliff.stock.passed, run.cliff.ours.passed
        yield (
            f"with {run.cliff.stock.agents} simulated agents stock answered "
            f"{60 * stock.turns_per_minute:,.0f} turns an hour, and "
            f"{60 * ours.turns_per_minute:,.0f} with admission"
        )
    if run.found is not None:
        shares = ", ".join(f"{arm.hit_rate:.1%} ({arm.arm})" for arm in run.found.arms)
        yield f"of the same prompts the cache had {shares}"


def _why_lost(result: DemoResult) -> Iterator[str]:
    stock, _, told = result.arms
    if not told.tally.protected_lost:
        return
    yield (
        f"Of the rules' blocks {told.arm} lost {told.tally.protected_lost} (stock: "
        f"{stock.tally.protected_lost}), and {told.tally.protected_again} of these were computed "
        "again: protection holds as much as costs little of what is found, and sessions that are "
        "over protect nothing; what is beyond is ranked like any other block."
    )


def _cells(arm: ArmResult) -> list[str]:
    p50, p95 = (quantile(arm.ttft_ms, percentile) for percentile in (50, 95))
    price = "" if arm.price_points is None else f"{arm.price_points:.1f}"
    if p95 < 10_000:
        times = f"{p50:,.0f} / {p95:,.0f} ms"
    else:
        times = f"{p50 / 1e3:,.1f} / {p95 / 1e3:,.0f} s"
    return [
        f"[bold]{arm.hit_rate:.1%}[/bold]",
        f"[bold]{arm.tally.protected_lost:,}[/bold]",
        f"{arm.tally.protected_again:,}",
        price,
        times,
    ]


def _found_details(result: DemoResult) -> dict[str, Any]:
    return {
        "made by": result.made_by,
        "requests": result.requests,
        "pool_blocks": result.pool,
        "pace": round(result.pace, 5),
        "arms": {arm.arm: _arm_details(arm) for arm in result.arms},
    }


def _arm_details(arm: ArmResult) -> dict[str, Any]:
    done = arm.passed.result
    return {
        "had": HAD[arm.arm],
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "prompt_found": round(arm.hit_rate, 5),
        "wall_s": round(done.wall_s, 2),
        "busy_share": round(sum(a.latency_s for a in done.answers) / done.wall_s, 3),
        "ttft_ms": {p: round(quantile(arm.ttft_ms, p), 1) for p in (50, 90, 95, 99)},
        "evicted": _by_layer(arm.tally.evicted),
        "computed_again": _by_layer(arm.tally.again),
        "protection_price_points": arm.price_points,
    }


def _by_layer(counts: dict[SourceLayer, int]) -> dict[str, int]:
    return {layer.name.lower(): counts[layer] for layer in SourceLayer if counts[layer]}
