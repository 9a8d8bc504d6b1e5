"""``bench agents --open``: the demo's requests by the clock, on vLLM's scheduler alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ...agents.agents_lab import KEPT_BACK, pool_for
from ...figures import Figures
from ...machine import measured_now
from ...paper.paper_engine import BLOCK_SIZE, base_config
from ...paper.quiet import only_errors
from ...recorded.agents_fleet import recorded_requests
from ...recorded.agents_requests import AgentRequest
from ...serving.model import TINY, ModelShape, ensure_model
from ...serving.progress import DemoProgress
from ...serving.workload import BLOCK
from .closed_paper_arms import PAPER_HOLD, PAPER_LPM, PAPER_OFF, PAPER_STOCK, PAPER_TOLD
from .hosts_paper import HostRun, add_hosts, play_hosts
from .open_paper import OpenRun, alone_s, play_open
from .others_paper import OTHERS, answers_per_s

OPEN_FILE: Final = "open.json"
REQUESTS: Final = 600  # as many as the demo plays
_OTHERS_ARMS: Final = (PAPER_STOCK, PAPER_OFF, PAPER_HOLD)
_ARMS: Final = (PAPER_STOCK, PAPER_LPM, PAPER_OFF, PAPER_HOLD, PAPER_TOLD)


@dataclass(frozen=True, slots=True)
class Setting:
    """How hard an engine has it.

    Attributes:
        running: Requests that run at once at most.
        load: Share of the time in which stock would be busy, were it asked one by one.
    """

    running: int
    load: float

    @property
    def name(self) -> str:
        """As a figure's name ends."""
        return f"_at_{self.running}_{self.load:g}"


SETTINGS: Final = (Setting(1, 0.3), Setting(1, 0.75), Setting(64, 0.75), Setting(64, 2.2))
"""As the demo has it, and too much; then the same for an engine that batches. Chosen."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    """All arms under all settings.

    Attributes:
        pool: Blocks of ``BLOCK_SIZE`` tokens.
        others: Answers a second by arm, for each kind of traffic that is no agents'.
        hosts: Arms with host memory.
    """

    out: Path
    pool: int
    runs: Sequence[tuple[Setting, OpenRun]]
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    hosts: Sequence[HostRun] = ()

    def figures(self) -> Figures:
        """Each arm beside stock: what it finds, and how long first tokens take."""
        figures = Figures("agents --open")
        for setting in dict.fromkeys(setting for setting, _ in self.runs):
            stock, *others = (run for at, run in self.runs if at == setting)
            figures.add(f"stock_share{setting.name}", stock.cached_share, "share of prompt")
            for run in others:
                _add(figures, f"_{run.arm}{setting.name}", run, stock)
        add_hosts(figures, self.hosts)
        for kind, rates in self.others.items():
            for arm, rate in rates.items():
                figures.add(f"{kind}_answers_{arm}", rate, "answers/s")
            ratio = rates[PAPER_HOLD.name] / rates[PAPER_OFF.name]
            figures.add(f"{kind}_ratio", ratio, "of admission off", "≥ .99")
        return figures

    def save(self) -> Path:
        """Write figures and runs, with the date and the command."""
        content = {
            **self.figures().as_dict(),
            **measured_now(),
            "pool": self.pool,
            "block": BLOCK_SIZE,
            "runs": [asdict(setting) | _details(run) for setting, run in self.runs],
            "hosts": [{"host": each.host} | _details(each.run) for each in self.hosts],
        }
        path = self.out / OPEN_FILE
        path.write_text(json.dumps(content, indent=1) + "\n")
        return path


def run_open(
    progress: bool, quick: bool, sessions: Path, users: int, seed: int, requests: int | None,
    share: float, out: Path,
) -> OpenResult:  # fmt: skip
    """Every arm under every setting; no engine, no GPU, and no clock on the wall.

    Args:
        share: Of the prompt, what LRU finds in the pool.
        quick: The first setting alone.
    """
    out.mkdir(parents=True, exist_ok=True)
    asked = recorded_requests(sessions, users, seed, requests or REQUESTS, ModelShape().vocab)
    longest = max(len(each.prompt) + len(each.answer) for each in asked)
    found = pool_for(asked, share, longest // BLOCK + KEPT_BACK, out / "fleet.jsonl.gz")
    pool = found * BLOCK // BLOCK_SIZE
    settings = SETTINGS[:1] if quick else SETTINGS
    with DemoProgress(0, shown=progress) as shown, only_errors():
        base = base_config(ensure_model(TINY))
        wall_s = alone_s(base, pool, asked)
        runs = []
        for setting in settings:
            pace = wall_s / (setting.load * _span_s(asked))
            for arm in _ARMS:
                shown.passing(f"{arm.name}{setting.name}", "on paper")
                runs.append((setting, play_open(base, arm, pool, asked, pace, setting.running)))
        hosts: list[HostRun] = []
        if not quick:
            pace = wall_s / (SETTINGS[0].load * _span_s(asked))
            hosts = play_hosts(base, pool, asked, pace, lambda arm: shown.passing(arm, "on paper"))
        others = {}
        for traffic in () if quick else OTHERS:
            shown.passing(traffic.name, "on paper")
            rates = {arm.name: answers_per_s(base, arm, traffic) for arm in _OTHERS_ARMS}
            others[traffic.name] = rates
    return OpenResult(out.resolve(), pool, runs, others, hosts)


def _span_s(requests: Sequence[AgentRequest]) -> float:
    return requests[-1].at - requests[0].at


def _add(figures: Figures, name: str, run: OpenRun, stock: OpenRun) -> None:
    gain = 100 * (run.cached_share - stock.cached_share)
    figures.add(f"gain_points{name}", gain, "points", "≥ 0")
    for percentile in (50, 95):
        ratio = run.ttft_s(percentile) / stock.ttft_s(percentile)
        figures.add(f"ttft_p{percentile}_ratio{name}", ratio, "of stock", "≤ 1")
    figures.add(f"ttft_mean_ratio{name}", run.mean_ttft_s / stock.mean_ttft_s, "of stock", "≤ 1")
    if run.held is not None:
        figures.add(f"held_share{name}", run.held.share, "of requests")


def _details(run: OpenRun) -> dict[str, Any]:
    return {
        "arm": run.arm,
        "cached_share": round(run.cached_share, 4),
        "ttft_s": {p: round(run.ttft_s(p), 2) for p in (50, 95, 99)},
        "ttft_mean_s": round(run.mean_ttft_s, 2),
        "wall_s": round(run.wall_s, 1),
        "held": None if run.held is None else asdict(run.held),
    }
