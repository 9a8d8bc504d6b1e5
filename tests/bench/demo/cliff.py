"""The simulated cliff: agents come one after the other, until they are too many.

Scheduler, cache manager and queue are vLLM's own; connector, graph, planner and hold are ours;
only the model is a clock (``timed_engine``). Two hours take about half a minute.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.tables import pyplot
from rich.console import Console
from rich.table import Table

from ..closed.closed_paper import BLOCKS, play_on_paper
from ..closed.closed_pass import Clock, ClosedRun, scripts
from ..closed.paper_loop import PAPER_HOLD, PAPER_STOCK
from ..figures import Figures, measured_now, only_errors, quantile
from ..paper.paper_engine import base_config
from ..recorded.agents_requests import SESSIONS
from ..serving.model import TINY, ModelShape, ensure_model
from ..serving.progress import DemoProgress

AGENTS: Final = 44
COMING_S: Final = 4800.0
"""Agents at the end, more than fit, and seconds within which they come, evenly."""

CLOCK: Final = Clock(1.0, COMING_S, 2400.0)
"""What is measured, in recorded seconds: the time when all are there."""

WINDOW_S: Final = 300.0
SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Window:
    ends_s: float  # when it was over
    agents: int  # who were there by then
    turns_per_hour: float
    # median time to first token of the turns that were answered in it; None: none was
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class CliffResult:
    out: Path
    stock: ClosedRun
    ours: ClosedRun

    def add_to(self, figures: Figures) -> None:
        stock, ours = (run.passed.turns_per_minute for run in (self.stock, self.ours))
        figures.add("cliff_turns_ratio", ours / max(stock, 1e-9), "of stock", "≥ 2.3")
        for name, run in (("stock", self.stock), ("ours", self.ours)):
            figures.add(f"cliff_turns_per_hour_{name}", 60 * run.passed.turns_per_minute, "turns/h")
            later = run.passed.ttft_s(False)
            if later:
                figures.add(f"cliff_ttft_p50_{name}", quantile(later, 50), "s")


@only_errors()
def run_cliff(out: Path, shown: DemoProgress) -> CliffResult:
    """Play the same recorded agents on both; no engine and no GPU."""
    base = base_config(ensure_model(TINY))
    found = read_sessions(SESSIONS)
    users = scripts(found, AGENTS, SEED, CLOCK.end_s, ModelShape().vocab)
    done = []
    for arm, name in ((PAPER_STOCK, "stock"), (PAPER_HOLD, "kvgraph with admission")):
        shown.passing(name, "two hours by the clock on paper")
        done.append(play_on_paper(base, arm, BLOCKS, users, CLOCK, COMING_S))
    return CliffResult(out, *done)


def windows(run: ClosedRun) -> Sequence[Window]:
    answers = sorted(run.passed.answers, key=lambda each: each.ended_s)
    found = []
    for number in range(int(run.passed.clock.end_s / WINDOW_S)):
        begins, ends = number * WINDOW_S, (number + 1) * WINDOW_S
        inside = [each.answer.ttft_s for each in answers if begins <= each.ended_s < ends]
        agents = min(run.agents, 1 + int(run.agents * ends / COMING_S))
        median = quantile(inside, 50) if inside else None
        found.append(Window(ends, agents, len(inside) * 3600.0 / WINDOW_S, median))
    return found


CLIFF_PICTURE: Final = "cliff.png"
CLIFF_FILE: Final = "cliff.json"
MADE_BY: Final = (
    "vLLM's own scheduler and cache manager, by a clock of its own: 9,000 tokens/s of prefill"
)
_COLORS: Final = ("#9aa0a6", "#12a150")  # stock first


def save_cliff(result: CliffResult) -> Path:
    figures = Figures("cliff")
    result.add_to(figures)
    content = {**figures.as_dict(), **measured_now(), **cliff_details(result)}
    (result.out / CLIFF_FILE).write_text(json.dumps(content, indent=1) + "\n")
    return _draw(result)


def cliff_details(result: CliffResult) -> dict[str, Any]:
    return {
        "made by": MADE_BY,
        "agents": AGENTS,
        "pool_blocks": BLOCKS,
        "clock": asdict(CLOCK),
        "windows": {name: [asdict(each) for each in windows(run)] for name, run in _named(result)},
    }


def print_cliff(result: CliffResult) -> None:
    console = Console()
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
