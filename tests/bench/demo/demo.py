"""What is found: recorded coding agents on stock, with nothing said, and told everything, on vLLM's
own scheduler and cache manager by a simulated clock. It takes a minute, and is the same on every
machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

from kvgraph.graph.types import SourceLayer
from rich.console import Console
from rich.table import Table

from ..agents.agents_arms import KEPT_BACK, layers_by_block, longest, pool_for
from ..closed.open_paper import OpenRun, alone_s, play_open
from ..closed.paper_loop import PAPER_HOLD, PAPER_STOCK, PAPER_TOLD, PaperArm
from ..figures import Figures, measured_now, only_errors
from ..paper.paper_engine import BLOCK_SIZE, base_config
from ..recorded.agents_requests import SESSIONS, USERS, pace_of, recorded_requests
from ..serving.cache_ledger import Books, Tally
from ..serving.model import TINY, ModelShape, ensure_model
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .cliff import CliffResult, cliff_details
from .engine_cliff import EngineCliff

REQUESTS: Final = 600
SEED: Final = 1

STOCK_FINDS: Final = 0.6
"""Share of the prompt that stock finds, one request after the other: it makes the pool's size."""

RUNNING: Final = 1
"""Requests that run at once: more would hold most of so small a pool while they run."""

HAD: Final = {
    "stock": "vLLM alone",
    "nothing said": "the switch alone",
    "told everything": "the switch, signals, layers",
}  # what each arm has, stock first

PRICE_FIELD: Final = "protection_price_points"
MADE_BY: Final = "vLLM's own scheduler and cache manager, by a simulated clock"

_SILENT = replace(PAPER_HOLD, name="nothing said")
_TOLD = replace(PAPER_TOLD, name="told everything")
PAPER_ARMS: Final = (PAPER_STOCK, _SILENT, _TOLD)


@dataclass(frozen=True, slots=True)
class ArmResult:
    run: OpenRun  # of an arm that is a key of ``HAD``
    tally: Tally
    # what protection costs of the share found, in points; None: nobody said
    price_points: float | None = None


@dataclass(frozen=True, slots=True)
class DemoResult:
    out: Path
    requests: int
    pool: int  # KV blocks that every arm got
    pace: float  # seconds that a recorded second took
    arms: tuple[ArmResult, ...]

    def add_to(self, figures: Figures) -> None:
        stock, _, told = self.arms
        shares = [arm.run.cached_share for arm in self.arms]
        for name, share in zip(("stock", "nothing_said", "told"), shares, strict=True):
            figures.add(f"{name}_share", share, "share of prompt")
        figures.add("hit_gain_points_no_hints", 100 * (shares[1] - shares[0]), "points", "> 0")
        figures.add("hit_gain_points", 100 * (shares[2] - shares[0]), "points", "> 0")
        figures.add("told_over_nothing_said", 100 * (shares[2] - shares[1]), "points", "> 0")
        figures.add("protected_lost", told.tally.protected_lost, "blocks", "0, or the table's why")
        figures.add("protected_computed_again", told.tally.protected_again, "blocks")
        figures.add("stock_protected_lost", stock.tally.protected_lost, "blocks", "> 0")
        if told.price_points is not None:
            figures.add(PRICE_FIELD, told.price_points, "points", "≤ 0.5")
        for percentile in (50, 95):
            ratio = told.run.ttft_s(percentile) / stock.run.ttft_s(percentile)
            figures.add(f"ttft_p{percentile}_ratio", ratio, "told / stock")


def run_found(out: Path, shown: DemoProgress, requests: int = REQUESTS) -> DemoResult:
    """Play all arms, and *told everything* once more without protection, to see its price."""
    vocabulary = ModelShape().vocab
    asked = recorded_requests(SESSIONS, USERS, SEED, requests, vocabulary)
    least = longest(asked) // BLOCK + KEPT_BACK
    pool = pool_for(asked, STOCK_FINDS, least, out / "fleet.jsonl.gz") * BLOCK // BLOCK_SIZE
    known = layers_by_block(asked, vocabulary, BLOCK_SIZE)
    with only_errors():
        base = base_config(ensure_model(TINY))
        pace = pace_of(alone_s(base, pool, asked), asked)

        def play(arm: PaperArm, how: str) -> ArmResult:
            shown.passing(arm.name, how)
            books = Books(known)
            run = play_open(base, arm, pool, asked, pace, RUNNING, books)
            return ArmResult(run, books.tally)

        done = [play(arm, "by a simulated clock") for arm in PAPER_ARMS]
        free = play(replace(_TOLD, unprotected=True), "the same without protection")
    told = done[-1]
    price = 100 * (free.run.cached_share - told.run.cached_share)
    done[-1] = replace(told, price_points=price)
    return DemoResult(out, len(asked), pool, pace, tuple(done))


FIGURES_FILE: Final = "demo.json"


@dataclass
class DemoRun:
    out: Path
    cliff: CliffResult | None = None
    engine: EngineCliff | None = None
    found: DemoResult | None = None
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
            content["found"] = _found_details(self.found)
        path = self.out / FIGURES_FILE
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def print_report(result: DemoResult, console: Console | None = None) -> None:
    console = console or Console()
    console.print(report_table(result))
    console.print(
        f"{USERS} recorded coding agents on {MADE_BY}, in {result.pool} blocks. Every arm "
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
        table.add_row(f"{arm.run.arm}\n[dim]{HAD[arm.run.arm]}[/dim]", *_cells(arm))
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
        shares = ", ".join(f"{arm.run.cached_share:.1%} ({arm.run.arm})" for arm in run.found.arms)
        yield f"of the same prompts the cache had {shares}"


def _why_lost(result: DemoResult) -> Iterator[str]:
    stock, _, told = result.arms
    if not told.tally.protected_lost:
        return
    yield (
        f"Of the rules' blocks {told.run.arm} lost {told.tally.protected_lost} (stock: "
        f"{stock.tally.protected_lost}), and {told.tally.protected_again} of these were computed "
        "again: protection holds as much as costs little of what is found, and sessions that are "
        "over protect nothing; what is beyond is ranked like any other block."
    )


def _cells(arm: ArmResult) -> list[str]:
    p50, p95 = (arm.run.ttft_s(percentile) for percentile in (50, 95))
    price = "" if arm.price_points is None else f"{arm.price_points:.1f}"
    if p95 < 10:
        times = f"{1e3 * p50:,.0f} / {1e3 * p95:,.0f} ms"
    else:
        times = f"{p50:,.1f} / {p95:,.0f} s"
    return [
        f"[bold]{arm.run.cached_share:.1%}[/bold]",
        f"[bold]{arm.tally.protected_lost:,}[/bold]",
        f"{arm.tally.protected_again:,}",
        price,
        times,
    ]


def _found_details(result: DemoResult) -> dict[str, Any]:
    return {
        "made by": MADE_BY,
        "requests": result.requests,
        "pool_blocks": result.pool,
        "pace": round(result.pace, 5),
        "arms": {arm.run.arm: _arm_details(arm) for arm in result.arms},
    }


def _arm_details(arm: ArmResult) -> dict[str, Any]:
    done = arm.run
    return {
        "had": HAD[done.arm],
        "prompt_found": round(done.cached_share, 5),
        "wall_s": round(done.wall_s, 2),
        "busy_share": round(sum(a.answer.latency_s for a in done.answers) / done.wall_s, 3),
        "ttft_ms": {p: round(1e3 * done.ttft_s(p), 1) for p in (50, 90, 95, 99)},
        "evicted": _by_layer(arm.tally.evicted),
        "computed_again": _by_layer(arm.tally.again),
        "protection_price_points": arm.price_points,
    }


def _by_layer(counts: dict[SourceLayer, int]) -> dict[str, int]:
    return {layer.name.lower(): counts[layer] for layer in SourceLayer if counts[layer]}
