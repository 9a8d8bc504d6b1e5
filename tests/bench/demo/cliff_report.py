"""How the simulated cliff ends: one picture, one table, one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.tables import pyplot
from rich.console import Console
from rich.table import Table

from ..closed.closed_arms import ClosedRun
from ..closed.on_paper.closed_paper_run import BLOCKS
from ..figures import Figures, quantile
from ..machine import measured_now
from .cliff import AGENTS, CLOCK, WINDOW_S, CliffResult, Window, windows

CLIFF_PICTURE: Final = "cliff.png"
CLIFF_FILE: Final = "cliff.json"
MADE_BY: Final = (
    "vLLM's own scheduler and cache manager, by a clock of its own: 9,000 tokens/s of prefill"
)
_COLORS: Final = ("#9aa0a6", "#12a150")  # stock first


def save_cliff(result: CliffResult) -> Path:
    """Draw the picture and write every window beside it."""
    figures = Figures("cliff")
    result.add_to(figures)
    content = {**figures.as_dict(), **measured_now(), **cliff_details(result)}
    (result.out / CLIFF_FILE).write_text(json.dumps(content, indent=1) + "\n")
    return _draw(result)


def cliff_details(result: CliffResult) -> dict[str, Any]:
    """What was played, and every window of both runs."""
    return {
        "made by": MADE_BY,
        "agents": AGENTS,
        "pool_blocks": BLOCKS,
        "clock": asdict(CLOCK),
        "windows": {name: [asdict(each) for each in windows(run)] for name, run in _named(result)},
    }


def print_cliff(result: CliffResult, console: Console | None = None) -> None:
    """The table for people: with few agents, and with too many."""
    console = console or Console()
    table = Table(title=f"{AGENTS} agents come within {CLOCK.warm_up_s / 60:.0f} minutes")
    for column in (
        "",
        "turns an hour at its best",
        "with all agents",
        "TTFT of all turns, p50",
        "p95",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, run in _named(result):
        table.add_row(name, *_cells(run))
    console.print(table)
    console.print(f"Made by {MADE_BY}; no model has run.")
    console.print(f"  {result.out / CLIFF_PICTURE}", soft_wrap=True)


def _cells(run: ClosedRun) -> list[str]:
    times = run.passed.ttft_s(False) + run.passed.ttft_s(True)
    best = max(each.turns_per_hour for each in windows(run))
    p50, p95 = (f"{quantile(times, p):,.1f} s" if times else "-" for p in (50, 95))
    return [f"{best:,.0f}", f"{60 * run.passed.turns_per_minute:,.0f}", p50, p95]


def _named(result: CliffResult) -> list[tuple[str, ClosedRun]]:
    return [("stock vLLM", result.stock), ("kvgraph with admission", result.ours)]


def _draw(result: CliffResult) -> Path:
    plots = pyplot()
    shares = {"height_ratios": (1, 2, 2)}
    figure, axes = plots.subplots(
        3, 1, figsize=(9, 7), sharex=True, layout="constrained", gridspec_kw=shares
    )
    for (name, run), color in zip(_named(result), _COLORS, strict=True):
        found = windows(run)
        minutes = [each.ends_s / 60 for each in found]
        axes[1].plot(
            minutes, [each.turns_per_hour for each in found], color=color, lw=2, label=name
        )
        axes[2].plot(*_waits(found), color=color, lw=2, label=name)
    agents = [each.agents for each in windows(result.stock)]
    axes[0].fill_between(minutes, agents, step="pre", color="#e8eaed")
    axes[0].set_ylabel("agents")
    axes[1].set_ylabel("turns an hour")
    axes[1].legend(loc="upper left", frameon=False)
    axes[2].set_ylabel("time to first token,\nmedian, s")
    axes[2].set_yscale("log")
    axes[2].set_xlabel(f"minutes, in steps of {WINDOW_S / 60:.0f}. {MADE_BY}")
    for each in axes:
        each.set_ylim(bottom=0 if each is not axes[2] else None)
        each.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Agents come, until their contexts no longer fit", fontweight="bold")
    path = result.out / CLIFF_PICTURE
    figure.savefig(path, dpi=130)
    plots.close(figure)
    return path


def _waits(found: list[Window] | Any) -> tuple[list[float], list[float]]:
    known = [(each.ends_s / 60, each.ttft_s) for each in found if each.ttft_s]
    return [minute for minute, _ in known], [wait for _, wait in known]
