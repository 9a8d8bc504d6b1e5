"""What is found: recorded coding agents on stock, with nothing said, and told everything.

``--part found`` plays them on vLLM's own scheduler and cache manager by a simulated clock, which
takes a minute and is the same on every machine. ``--part hits`` plays them on a real engine: stock
is first asked everything one by one, as fast as it can, so that the pace is found at which users
who work in parallel keep this machine busy and do not overload it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

import httpx
from kvgraph.graph.types import SourceLayer
from rich.console import Console
from rich.table import Table

from ..agents.agents_arms import (
    DEFAULT,
    HINTS,
    KEPT_BACK,
    STOCK,
    AgentArm,
    AgentPass,
    Room,
    Sender,
    layers_by_block,
    longest,
    pool_for,
    watched,
)
from ..closed.open_paper import OpenRun, alone_s, play_open
from ..closed.paper_loop import PAPER_HOLD, PAPER_STOCK, PAPER_TOLD, PaperArm
from ..figures import Figures, measured_now, only_errors, quantile
from ..paper.paper_engine import BLOCK_SIZE, base_config
from ..recorded.agents_requests import SESSIONS, USERS, AgentRequest, pace_of, recorded_requests
from ..serving.cache_ledger import Books, Digest, Tally
from ..serving.completions import PassResult
from ..serving.model import TINY, ModelShape, ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.vllm_server import Server
from ..serving.workload import BLOCK
from .cliff import CliffResult, cliff_details
from .engine_cliff import EngineCliff
from .page_demo import ENDPOINT, LivePage

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

PRICE_FIELD: Final = "protection_price_points"  # of a sidecar's status

_SILENT = replace(PAPER_HOLD, name="nothing said")
_TOLD = replace(PAPER_TOLD, name="told everything")
PAPER_ARMS: Final = (PAPER_STOCK, _SILENT, _TOLD)
ENGINE_ARMS: Final = (
    STOCK,
    replace(DEFAULT, name="nothing said"),
    replace(HINTS, name="told everything"),
)


@dataclass(frozen=True, slots=True)
class ArmResult:
    arm: str  # A key of ``HAD``
    passed: AgentPass
    tally: Tally
    # what protection costs of the share found, in points; None: nobody said
    price_points: float | None = None

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that came out of the prefix cache."""
        return self.passed.share

    @property
    def ttft_ms(self) -> list[float]:
        return self.passed.result.ttft_ms


@dataclass(frozen=True, slots=True)
class DemoResult:
    name: str  # of the part, and of its files
    made_by: str  # what played the requests
    out: Path
    requests: int
    pool: int  # KV blocks that every arm got
    pace: float  # seconds that a recorded second took
    arms: tuple[ArmResult, ...]

    def add_to(self, figures: Figures) -> None:
        stock, _, told = self.arms
        shares = [arm.hit_rate for arm in self.arms]
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
            ratio = quantile(told.ttft_ms, percentile) / quantile(stock.ttft_ms, percentile)
            figures.add(f"ttft_p{percentile}_ratio", ratio, "told / stock")


def run_found(out: Path, shown: DemoProgress, requests: int = REQUESTS) -> DemoResult:
    """Play all arms by the simulated clock, and *told everything* once more without protection:
    the difference is what that costs.
    """
    vocabulary = ModelShape().vocab
    asked = recorded_requests(SESSIONS, USERS, SEED, requests, vocabulary)
    pool = _pool(asked, out) * BLOCK // BLOCK_SIZE
    known = layers_by_block(asked, vocabulary, BLOCK_SIZE)
    with only_errors():
        base = base_config(ensure_model(TINY))
        pace = pace_of(alone_s(base, pool, asked), asked)

        def play(arm: PaperArm, how: str) -> tuple[OpenRun, Tally]:
            shown.passing(arm.name, how)
            books = Books(known)
            return play_open(base, arm, pool, asked, pace, RUNNING, books), books.tally

        done = [_on_paper(*play(arm, "by a simulated clock")) for arm in PAPER_ARMS]
        free, _ = play(replace(_TOLD, unprotected=True), "the same without protection")
    told = done[-1]
    done[-1] = replace(told, price_points=100 * (free.cached_share - told.hit_rate))
    made_by = "vLLM's own scheduler and cache manager, by a simulated clock"
    return DemoResult("found", made_by, out, len(asked), pool, pace, tuple(done))


def run_hits(
    model: str | None, out: Path, shown: DemoProgress, page: LivePage | None = None
) -> DemoResult:
    name = model or str(ensure_model())
    vocabulary = vocabulary_size(name)
    requests = recorded_requests(SESSIONS, USERS, SEED, REQUESTS, vocabulary)
    pool = _pool(requests, out)
    room = Room(name, out, pool, longest(requests))
    known = layers_by_block(requests, vocabulary)
    arms, pace = _run_arms(room, requests, known, shown, page)
    made_by = f"a real vLLM, {1 / pace:,.0f} × recorded speed"
    return DemoResult("hits", made_by, out, len(requests), pool, pace, arms)


def price_in(status: Any) -> float | None:
    """What a sidecar's status says that protection costs, wherever it stands; None: nothing."""
    if isinstance(status, Mapping):
        price = status.get(PRICE_FIELD)
        if isinstance(price, int | float):
            return float(price)
        status = list(status.values())
    if isinstance(status, list):
        return next((found for each in status if (found := price_in(each)) is not None), None)
    return None


def _pool(requests: Sequence[AgentRequest], out: Path) -> int:
    least = longest(requests) // BLOCK + KEPT_BACK
    return pool_for(requests, STOCK_FINDS, least, out / "fleet.jsonl.gz")


def _on_paper(run: OpenRun, tally: Tally) -> ArmResult:
    answers = tuple(each.answer for each in run.answers)
    sent = tuple(each.sent_s for each in run.answers)
    return ArmResult(run.arm, AgentPass(PassResult(answers, run.wall_s), sent), tally)


def _how_long(arm: AgentArm, requests: Sequence[AgentRequest], pace: float) -> str:
    """How a pass goes, how long it takes at least, and why the page may show nothing of it."""
    minutes = pace * (requests[-1].at - requests[0].at) / 60
    said = f"side by side, at least {minutes:.0f} min"
    return said if arm.graph else f"{said}; no graph, so the page is empty"


def _run_arms(
    room: Room,
    requests: Sequence[AgentRequest],
    known: dict[Digest, SourceLayer],
    shown: DemoProgress,
    page: LivePage | None,
) -> tuple[tuple[ArmResult, ...], float]:
    done: list[ArmResult] = []
    pace: float | None = None
    for arm in ENGINE_ARMS:
        shown.starting(arm.name)
        plan = replace(room.plan(arm, arm.name.replace(" ", "_")), max_num_seqs=RUNNING)
        if page is not None:
            page.begin_anew()
            plan = replace(plan, settings=(*plan.settings, (ENDPOINT, page.endpoint)))
        with watched(plan, known) as (server, ledger):
            if pace is None:
                shown.passing(arm.name, "how fast is this machine?", len(requests))
                first = Sender([server.url], requests, arm.telling, shown.answered).one_by_one()
                pace = pace_of(first.result.wall_s, requests)
                server.reset_prefix_cache()
                ledger.take()
            shown.passing(arm.name, _how_long(arm, requests, pace), len(requests))
            sender = Sender([server.url], requests, arm.telling, shown.answered, pace)
            passed = sender.side_by_side()
            price = _price(server, page) if arm.graph else None
            done.append(ArmResult(arm.name, passed, ledger.take(), price))
    assert pace is not None
    return tuple(done), pace


def _price(server: Server, page: LivePage | None) -> float | None:
    if page is not None:
        return price_in(page.status())
    status = httpx.get(f"{server.sidecar_url()}/status", timeout=10.0, trust_env=False)
    return price_in(status.json())


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
