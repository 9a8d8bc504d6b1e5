"""How the demo ends: one table, one picture, one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ..graph.types import PROTECTED_LAYERS, SourceLayer
from .demo import ArmResult, DemoResult, quantile
from .passes import PassResult

FIGURES_FILE: Final = "demo.json"
PICTURE_FILE: Final = "demo.png"

_Row = tuple[str, Callable[[ArmResult], str]]


def print_report(result: DemoResult, console: Console | None = None) -> None:
    """The table for people, the verdict on the texts, and where the files are."""
    console = console or Console()
    console.print(report_table(result))
    same = "identical" if result.texts_identical else "NOT identical"
    console.print(f"Texts of the two arms, one request at a time: [bold]{same}[/bold].")
    console.print(
        f"All at once the arms agree on {result.arms_agree:.1%} of the texts; stock agrees with "
        f"itself on {result.stock_agrees_with_itself:.1%} (batching alone moves near-ties)."
    )
    for name in (PICTURE_FILE, FIGURES_FILE):
        if (result.out / name).exists():
            console.print(f"  {result.out / name}", soft_wrap=True)


def report_table(result: DemoResult) -> Table:
    """Both arms side by side."""
    table = Table(title=f"{result.requests} requests, twice, in either arm", title_justify="left")
    table.add_column("")
    for arm in result.arms:
        table.add_column(arm.arm, justify="right")
    for title, cell in _rows():
        section = title == ""
        if section:
            table.add_section()
            continue
        table.add_row(title, *(cell(arm) for arm in result.arms))
    return table


def save_figures(result: DemoResult) -> Path:
    """Write the figures and both arms' details beside the logs; no text of any request."""
    path = result.out / FIGURES_FILE
    arms = {arm.arm: _arm_details(arm) for arm in result.arms}
    content = {**result.figures().as_dict(), "requests": result.requests, "arms": arms}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def _rows() -> list[_Row]:
    rule: _Row = ("", lambda arm: "")
    return [
        ("[bold]both passes[/bold]", lambda arm: ""),
        ("prompt tokens from the prefix cache", lambda arm: f"{_cached(arm):,}"),
        ("prompt tokens recomputed", lambda arm: f"{_recomputed(arm):,}"),
        ("prefix cache hit rate", lambda arm: f"{arm.hit_rate:.1%}"),
        rule,
        ("[bold]blocks evicted[/bold]", lambda arm: f"{sum(arm.evicted.values()):,}"),
        *(_evictions(layer) for layer in SourceLayer if layer is not SourceLayer.AFFECT),
        ("protected blocks lost", lambda arm: f"[bold]{arm.protected_lost:,}[/bold]"),
        rule,
        *_pass_rows("one at a time", lambda arm: arm.sequential),
        rule,
        *_pass_rows("all at once", lambda arm: arm.concurrent),
    ]


def _pass_rows(title: str, of: Callable[[ArmResult], PassResult]) -> list[_Row]:
    def ttft(arm: ArmResult) -> str:
        p50, p95 = (quantile(of(arm).ttft_ms, percentile) for percentile in (50, 95))
        return f"{p50:,.0f} / {p95:,.0f} ms"

    return [
        (f"[bold]{title}[/bold]", lambda arm: ""),
        ("  hit rate", lambda arm: f"{of(arm).cached_tokens / of(arm).prompt_tokens:.1%}"),
        ("  TTFT p50 / p95", ttft),
        ("  throughput", lambda arm: f"{of(arm).tokens_per_s:,.0f} tok/s"),
    ]


def _evictions(layer: SourceLayer) -> _Row:
    name = layer.name.lower() + (" (protected)" if layer in PROTECTED_LAYERS else "")
    return f"  {name}", lambda arm: f"{arm.evicted[layer]:,}"


def _cached(arm: ArmResult) -> int:
    return arm.sequential.cached_tokens + arm.concurrent.cached_tokens


def _recomputed(arm: ArmResult) -> int:
    return arm.sequential.recomputed_tokens + arm.concurrent.recomputed_tokens


def _arm_details(arm: ArmResult) -> dict[str, Any]:
    passes = (("sequential", arm.sequential), ("concurrent", arm.concurrent))
    tallies = {"sequential": arm.sequential_tally, "concurrent": arm.concurrent_tally}
    return {
        name: {
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "wall_s": round(done.wall_s, 2),
            "tokens_per_s": round(done.tokens_per_s, 1),
            "ttft_ms": {p: round(quantile(done.ttft_ms, p), 1) for p in (50, 90, 95, 99)},
            "stored": _by_layer(tallies[name].stored),
            "evicted": _by_layer(tallies[name].evicted),
            "missed_event_batches": tallies[name].missed_batches,
        }
        for name, done in passes
    }


def _by_layer(counts: dict[SourceLayer, int]) -> dict[str, int]:
    return {layer.name.lower(): counts[layer] for layer in SourceLayer if counts[layer]}
