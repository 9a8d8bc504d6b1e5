"""The arithmetic of ``bench agents``: figures from what arms and lab recorded, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..figures import Figures
from ..recorded.agents_requests import AgentRequest
from .agents_arms import (
    DEFAULT,
    HINTS,
    HOST_LRU,
    MARKED,
    QUIET_TIERS,
    STOCK,
    TIERS,
    AgentArm,
    AgentRun,
)
from .agents_busy import BusyRun
from .agents_lab import BELADY, LRU, LabRun, default_policy


@dataclass(frozen=True, slots=True)
class AgentsResult:
    """What was played, and what came of it.

    Attributes:
        pools: Blocks of each pool; the first one's figures are the headline.
        pace: Seconds that a recorded second took.
    """

    out: Path
    requests: tuple[AgentRequest, ...]
    pools: tuple[int, ...]
    pace: float | None
    runs: Sequence[AgentRun]
    lab: Sequence[LabRun]
    busy: BusyRun | None = None

    def figures(self) -> Figures:
        """The figures of ``kvgraph bench agents`` that these runs can give."""
        figures = Figures("agents")
        first = self.pools[0]
        figures.add("stock_share", self.shares(STOCK, first), "share of prompt", ".5 – .7")
        belady = self.lab_share(BELADY, first)
        assert belady is not None
        figures.add("belady_share", belady, "share of prompt")
        for arm, name, target in (
            (DEFAULT, "engine_inferred_share", "≥ 0.30"),
            (MARKED, "engine_marked_share", "≥ engine_inferred_share"),
            (HINTS, "engine_signalled_share", "≥ 0.55"),
        ):
            if self.shares(arm, first):
                figures.add(f"{arm.name}_share", self.shares(arm, first), "share of prompt")
                figures.add(name, self._closed(arm, belady), "of stock → Belady", target)
        if points := self._worst_points():
            figures.add("engine_worst_points", min(points), "points", "≥ -0.2")
        if differences := self.lab_differences():
            largest = max(differences, key=abs)
            figures.add("lab_live_difference", largest, "points", "≤ 1 either way")
        self._add_tiers(figures)
        if self.busy is not None:
            figures.add("protected_lost_busy", self.busy.tally.protected_lost, "blocks", "0")
        return figures

    def shares(self, arm: AgentArm, pool: int) -> list[float]:
        """Share of the prompt that each run of ``arm`` on ``pool`` found."""
        return [r.passed.share for r in self.runs if (r.arm, r.pool) == (arm.name, pool)]

    def lab_share(self, policy: str, pool: int) -> float | None:
        """The lab's share of the prompt; None if it was not replayed."""
        found = [r.share for r in self.lab if (r.policy, r.pool) == (policy, pool)]
        return found[0] if found else None

    def lab_differences(self) -> list[float]:
        """What arms gain over stock beyond what the lab lets them gain over LRU, in points."""
        found = []
        for arm in (DEFAULT, HINTS):
            for pool in self.pools:
                shares = self.shares(arm, pool)
                policy = self.lab_share(default_policy(arm.telling.hinted), pool)
                lru = self.lab_share(LRU, pool)
                if shares and policy is not None and lru is not None:
                    live = median(shares) - median(self.shares(STOCK, pool))
                    found.append(100 * (live - (policy - lru)))
        return found

    def _closed(self, arm: AgentArm, belady: float) -> float:
        """How much of the way from stock to Belady the arm goes."""
        stock = median(self.shares(STOCK, self.pools[0]))
        return (median(self.shares(arm, self.pools[0])) - stock) / (belady - stock)

    def _worst_points(self) -> list[float]:
        """Each run with advice and without host memory, against the worst of stock's runs."""
        return [
            100 * (share - min(self.shares(STOCK, pool)))
            for arm in (DEFAULT, MARKED, HINTS)
            for pool in self.pools
            for share in self.shares(arm, pool)
        ]

    def _add_tiers(self, figures: Figures) -> None:
        for arm, name, target in (
            (QUIET_TIERS, "quiet_tiers_recomputed", "≤ 1.0"),
            (TIERS, "tiers_recomputed", "≤ 0.85"),
        ):
            if ratios := self._ratios(arm):
                figures.add(f"{name}_ratio", ratios[min(ratios)], "tiers / plain", target)
                figures.add(f"{name}_worst", max(ratios.values()), "tiers / plain", "≤ 1.0")

    def _ratios(self, arm: AgentArm) -> dict[int, float]:
        """By the size of host memory: tokens that an arm with tiers computed, over those that a
        plain host tier of equal size did."""
        return {
            run.host: run.passed.result.recomputed_tokens / plain.passed.result.recomputed_tokens
            for run in self.runs
            for plain in self.runs
            if (run.arm, plain.arm) == (arm.name, HOST_LRU.name) and run.host == plain.host
        }
