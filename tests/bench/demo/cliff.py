"""The simulated cliff: agents come one after the other, until they are too many.

Scheduler, cache manager and queue are vLLM's own; connector, graph, planner and hold are ours;
only the model is a clock (``closed_paper``). Two hours take about half a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvgraph.advisor.replay.recordings import read_sessions

from ..closed.closed_arms import ClosedRun
from ..closed.closed_pass import Clock
from ..closed.closed_users import scripts
from ..closed.on_paper.closed_paper import play_on_paper
from ..closed.on_paper.closed_paper_arms import PAPER_HOLD, PAPER_STOCK
from ..closed.on_paper.closed_paper_run import BLOCKS
from ..figures import Figures, quantile
from ..paper.paper_engine import base_config
from ..paper.quiet import only_errors
from ..recorded.agents_fleet import SESSIONS
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
    """What happened within ``WINDOW_S`` seconds.

    Attributes:
        ends_s: When it was over.
        agents: Who were there by then.
        ttft_s: Median time to first token of the turns that were answered in it; None: none was.
    """

    ends_s: float
    agents: int
    turns_per_hour: float
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class CliffResult:
    """Stock, and kvgraph with admission, with the same agents."""

    out: Path
    stock: ClosedRun
    ours: ClosedRun

    def add_to(self, figures: Figures) -> None:
        """The figures of the time when all agents are there; TTFT of returning turns."""
        stock, ours = (run.passed.turns_per_minute for run in (self.stock, self.ours))
        figures.add("cliff_turns_ratio", ours / max(stock, 1e-9), "of stock", "≥ 2.3")
        for name, run in (("stock", self.stock), ("ours", self.ours)):
            figures.add(f"cliff_turns_per_hour_{name}", 60 * run.passed.turns_per_minute, "turns/h")
            later = run.passed.ttft_s(False)
            if later:
                figures.add(f"cliff_ttft_p50_{name}", quantile(later, 50), "s")


@only_errors()
def run_cliff(out: Path, shown: DemoProgress, sessions: Path = SESSIONS) -> CliffResult:
    """Play the same recorded agents on both; no engine and no GPU.

    Raises:
        ReplayError: The sessions cannot be read.
    """
    base = base_config(ensure_model(TINY))
    found = read_sessions(sessions)
    users = scripts(found, AGENTS, SEED, CLOCK.end_s, ModelShape().vocab)
    done = []
    for arm, name in ((PAPER_STOCK, "stock"), (PAPER_HOLD, "kvgraph with admission")):
        shown.passing(name, "two hours by the clock on paper")
        done.append(play_on_paper(base, arm, BLOCKS, users, CLOCK, COMING_S))
    return CliffResult(out, *done)


def windows(run: ClosedRun) -> Sequence[Window]:
    """A run from its beginning to its end."""
    answers = sorted(run.passed.answers, key=lambda each: each.ended_s)
    found = []
    for number in range(int(run.passed.clock.end_s / WINDOW_S)):
        begins, ends = number * WINDOW_S, (number + 1) * WINDOW_S
        inside = [each.answer.ttft_s for each in answers if begins <= each.ended_s < ends]
        agents = min(run.agents, 1 + int(run.agents * ends / COMING_S))
        median = quantile(inside, 50) if inside else None
        found.append(Window(ends, agents, len(inside) * 3600.0 / WINDOW_S, median))
    return found
