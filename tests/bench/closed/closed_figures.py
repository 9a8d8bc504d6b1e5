"""The arithmetic of ``bench agents --closed``: figures from what its runs recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvgraph.graph.wire.advice import HOLD_MAX_S

from ..agents.agents_arms import HOST_LRU
from ..figures import Figures, quantile
from ..serving.workload import BLOCK
from .closed_arms import HOLD, HOLD_TOLD, HOST_HOLD, LPM, OFF, STOCK, ClosedRun

if TYPE_CHECKING:
    from .closed import ClosedScale
    from .on_paper.newcomer import NewcomerRun


@dataclass(frozen=True, slots=True)
class ClosedResult:
    """What was played, and what came of it.

    Attributes:
        best: Agents at which stock is at its best.
        hold_us: Microseconds that a held request costs a step, by how many are held.
        pool: Blocks.
        block: Tokens of one.
        newcomers: Large prompts beside small sessions; on paper only.
    """

    out: Path
    best: int
    scale: ClosedScale
    runs: Sequence[ClosedRun]
    hold_us: dict[int, list[float]]
    pool: int = 0
    block: int = BLOCK
    newcomers: Sequence[NewcomerRun] = ()

    def figures(self) -> Figures:
        """The figures that these runs can give; without a suffix, of the arm ``hold``."""
        figures = Figures("agents --closed")
        for arm, suffix in ((HOLD, ""), (HOLD_TOLD, "_told"), (OFF, "_off")):
            self._add_over(figures, arm.name, suffix)
            self._add_under(figures, arm.name, suffix)
        self._add_hosts(figures)
        held = [run for run in self.runs if run.held is not None]
        if any(run.arm in (HOLD.name, HOLD_TOLD.name) for run in held):
            longest = max(run.held.longest_s for run in held if run.held is not None)
            figures.add("longest_hold_s", longest, "s", f"≤ {HOLD_MAX_S:.0f}")
        self._add_newcomers(figures)
        figures.add("failed", sum(run.passed.failed for run in self.runs), "requests", "0")
        for count, samples in self.hold_us.items():
            figures.add(f"held_us_per_step_{count}", samples, "us a request", "≤ 2")
        return figures

    def _add_newcomers(self, figures: Figures) -> None:
        ours = [run for run in self.newcomers if run.arm == HOLD.name]
        if ours:
            unit = "of the crowd's p95"
            figures.add("newcomer_wait_ratio", max(run.ratio for run in ours), unit, "≤ 3")
            longest = max(max(run.newcomers) for run in ours)
            figures.add("newcomer_wait_s", longest, "s", f"≤ {HOLD_MAX_S:.0f}")

    def of(self, arm: str, agents: int) -> list[ClosedRun]:
        """Runs of ``arm`` with so many agents."""
        return [run for run in self.runs if (run.arm, run.agents) == (arm, agents)]

    def _add_over(self, figures: Figures, arm: str, suffix: str) -> None:
        for over in self.scale.over:
            agents = round(over * self.best)
            stock, ours = self.of(STOCK.name, agents), self.of(arm, agents)
            if not stock or not ours:
                continue
            at = f"{suffix}_at_{agents}"
            figures.add(f"turns_ratio_over{at}", _turns(ours) / _turns(stock), "of stock", "≥ 3")
            later = [_quantile(run.passed.ttft_s(False), 50) for run in ours]
            before = median(_quantile(run.passed.ttft_s(False), 50) for run in stock)
            ratio = median(later) / max(before, 1e-9)
            figures.add(f"ttft_p50_ratio_over{at}", ratio, "of stock", "≤ 0.05")
            waits = [_quantile(_first_waits(run), 95) for run in ours]
            figures.add(f"first_turn_wait_p95_s{at}", median(waits), "s")
            figures.add(f"starved{at}", sum(map(_starved, ours)), "sessions", "0")
            if other := self.of(LPM.name, agents):
                ratio = _turns(ours) / _turns(other)
                figures.add(f"turns_ratio_lpm{at}", ratio, "of longest prefix first", "≥ 1")

    def _add_under(self, figures: Figures, arm: str, suffix: str) -> None:
        numbers = (round(share * self.best) for share in self.scale.under)
        for agents in dict.fromkeys(numbers):
            stock, ours = self.of(STOCK.name, agents), self.of(arm, agents)
            if not stock or not ours:
                continue
            at = f"{suffix}_at_{agents}"
            ratios = [_turns([a]) / _turns([b]) for a, b in zip(ours, stock, strict=False)]
            figures.add(f"turns_ratio_under{at}", ratios, "of stock", "≥ 0.99")
            shares = [run.held.share for run in ours if run.held is not None]
            figures.add(f"held_share_under{at}", max(shares, default=0.0), "of requests", "≤ 0.01")

    def _add_hosts(self, figures: Figures) -> None:
        numbers = (round(share * self.best) for share in self.scale.hosted)
        for agents in dict.fromkeys(numbers):
            plain, ours = self.of(HOST_LRU.name, agents), self.of(HOST_HOLD.name, agents)
            if plain and ours:
                ratio = _turns(ours) / _turns(plain)
                unit = "of plain host memory"
                figures.add(f"turns_ratio_host_at_{agents}", ratio, unit, "≥ 1.5")


def _turns(runs: Sequence[ClosedRun]) -> float:
    return max(1e-9, median(run.passed.turns_per_minute for run in runs))


def _first_waits(run: ClosedRun) -> list[float]:
    """Of first turns: until the first token, or until the run's end where none came."""
    waiting = [seconds for first, seconds in run.passed.waiting_s if first]
    return run.passed.ttft_s(True) + waiting


def _starved(run: ClosedRun) -> int:
    """Sessions that a whole run did not start."""
    clock = run.passed.clock
    return sum(first and waited > clock.measured_s for first, waited in run.passed.waiting_s)


def _quantile(samples: Sequence[float], percentile: float) -> float:
    return quantile(samples, percentile) if samples else 0.0
