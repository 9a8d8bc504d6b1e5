"""How the demo ends: one table, one picture, one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ...graph.types import PROTECTED_LAYERS, SourceLayer
from ..figures import quantile
from .demo import ArmResult, DemoResult

FIGURES_FILE: Final = "demo.json"
PICTURE_FILE: Final = "demo.png"

_Row = tuple[str, Callable[[ArmResult], str]]


def print_report(result: DemoResult, console: Console | None = None) -> None:
    """The table for people, what was played, and where the files are."""
    console = console or Console()
    console.print(report_table(result))
    console.print(
        f"Recorded coding agents, {1 / result.pace:,.0f} × as fast as recorded, on a pool of "
        f"{result.pool} blocks. Every arm was made to give the recorded answers: what differs is "
        "what it had to compute."
    )
    for name in (PICTURE_FILE, FIGURES_FILE):
        if (result.out / name).exists():
            console.print(f"  {result.out / name}", soft_wrap=True)


def report_table(result: DemoResult) -> Table:
    """All arms side by side."""
    table = Table(title=f"{result.requests} requests in every arm", title_justify="left")
    table.add_column("")
    for arm in result.arms:
        table.add_column(arm.arm, justify="right")
    for title, cell in _rows(result):
        if title == "":
            table.add_section()
            continue
        table.add_row(title, *(cell(arm) for arm in result.arms))
    return table


def save_figures(result: DemoResult) -> Path:
    """Write the figures and every arm's details beside the logs; no text of any request."""
    path = result.out / FIGURES_FILE
    content = {
        **result.figures().as_dict(),
        "requests": result.requests,
        "pool_blocks": result.pool,
        "pace": round(result.pace, 5),
        "arms": {arm.arm: _arm_details(arm) for arm in result.arms},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def lost_layers(result: DemoResult) -> list[SourceLayer]:
    """The layers of which any arm evicted a block."""
    return [x for x in SourceLayer if any(arm.tally.evicted[x] for arm in result.arms)]


def _rows(result: DemoResult) -> list[_Row]:
    rule: _Row = ("", lambda arm: "")
    return [
        ("prompt tokens from the prefix cache", lambda arm: f"{arm.passed.result.cached_tokens:,}"),
        ("prompt tokens computed", lambda arm: f"{arm.passed.result.recomputed_tokens:,}"),
        ("prefix cache hit rate", lambda arm: f"[bold]{arm.hit_rate:.1%}[/bold]"),
        rule,
        ("blocks evicted", lambda arm: f"{sum(arm.tally.evicted.values()):,}"),
        *(_evictions(layer) for layer in lost_layers(result)),
        ("protected blocks lost", lambda arm: f"[bold]{arm.tally.protected_lost:,}[/bold]"),
        rule,
        ("time to first token, p50 / p95", _ttft),
        ("throughput", lambda arm: f"{arm.passed.result.tokens_per_s:,.0f} tok/s"),
    ]


def _ttft(arm: ArmResult) -> str:
    p50, p95 = (quantile(arm.ttft_ms, percentile) for percentile in (50, 95))
    return f"{p50:,.0f} / {p95:,.0f} ms"


def _evictions(layer: SourceLayer) -> _Row:
    name = layer.name.lower() + (" (protected)" if layer in PROTECTED_LAYERS else "")
    return f"  {name}", lambda arm: f"{arm.tally.evicted[layer]:,}"


def _arm_details(arm: ArmResult) -> dict[str, Any]:
    done = arm.passed.result
    return {
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "wall_s": round(done.wall_s, 2),
        "busy_share": round(sum(a.latency_s for a in done.answers) / done.wall_s, 3),
        "tokens_per_s": round(done.tokens_per_s, 1),
        "ttft_ms": {p: round(quantile(arm.ttft_ms, p), 1) for p in (50, 90, 95, 99)},
        "stored": _by_layer(arm.tally.stored),
        "evicted": _by_layer(arm.tally.evicted),
        "missed_event_batches": arm.tally.missed_batches,
    }


def _by_layer(counts: dict[SourceLayer, int]) -> dict[str, int]:
    return {layer.name.lower(): counts[layer] for layer in SourceLayer if counts[layer]}
