"""Recorded agents in a closed loop on a real vLLM, below the cliff and past it, held and not.

Each user's next turn comes after the answer and the recorded pause. Past the number of agents whose
contexts fit, each turn pushes out what the next one needs: the cliff. Sessions are ``SHRINK`` times
smaller than recorded and ``1 / PACE`` times faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol, TypeVar

from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.graph.wire.advice import HOLD_MAX_S

from ..agents.agents_arms import HOST_LRU, AgentArm, Room, longest
from ..figures import Figures, measured_now, quantile
from ..recorded.agents_requests import SESSIONS
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .closed_pass import (
    CLOSED_ARMS,
    HOLD,
    HOLD_TOLD,
    HOST_HOLD,
    LPM,
    OFF,
    STOCK,
    Clock,
    ClosedRun,
    run_closed,
    scripts,
)


@dataclass(frozen=True, slots=True)
class ClosedResult:
    out: Path
    best: int  # agents at which stock is at its best
    scale: ClosedScale
    runs: Sequence[ClosedRun]
    pool: int = 0  # blocks
    block: int = BLOCK  # tokens of one
    # seconds that prompts of half a pool waited, and small sessions' first ones; on paper only
    newcomers: tuple[Sequence[float], Sequence[float]] = ((), ())

    def figures(self) -> Figures:
        figures = Figures("agents --closed")
        for arm, suffix in ((HOLD, ""), (HOLD_TOLD, "_told"), (OFF, "_off")):
            self._add_over(figures, arm.name, suffix)
            self._add_under(figures, arm.name, suffix)
        self._add_hosts(figures)
        large, small = self.newcomers
        if large:
            ratio, unit = max(large) / max(1e-9, _quantile(small, 95)), "of the crowd's p95"
            figures.add("newcomer_wait_ratio", ratio, unit, "≤ 3")
            figures.add("newcomer_wait_s", max(large), "s", f"≤ {HOLD_MAX_S:.0f}")
        held = [run for run in self.runs if run.held is not None]
        if any(run.arm in (HOLD.name, HOLD_TOLD.name) for run in held):
            longest = max(run.held.longest_s for run in held if run.held is not None)
            figures.add("longest_hold_s", longest, "s", f"≤ {HOLD_MAX_S:.0f}")
        figures.add("failed", sum(run.passed.failed for run in self.runs), "requests", "0")
        return figures

    def of(self, arm: str, agents: int) -> list[ClosedRun]:
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


PACE: Final = 1 / 60
"""Seconds that a recorded second takes: prefill here is about as much slower than a GPU's, for
sessions that are smaller by ``SHRINK``."""

POOL: Final = 480  # blocks: contexts of about twenty agents

UNDER: Final = (0.6, 0.8, 1.0)
OVER: Final = (1.6, 2.4)  # numbers of agents, as multiples of the one at which stock is at its best

HOSTED: Final = (3.2,)
"""The same where host memory holds as much as the pool: its cliff is twice as far out."""

CLOCK: Final = Clock(PACE, 20.0, 100.0)


@dataclass(frozen=True, slots=True)
class ClosedScale:
    clock: Clock = CLOCK
    # agents at which stock is at its best; None: searched among ``searched``
    best: int | None = None
    searched: tuple[int, ...] = (12, 16, 20, 24, 28)
    under: tuple[float, ...] = UNDER  # multiples of it that are not past the cliff; 1.0 is its edge
    over: tuple[float, ...] = OVER  # those that are
    hosted: tuple[float, ...] = HOSTED  # those that are past it for arms with host memory
    # runs of each arm below the cliff, in turns: there the arms differ by less than two runs of
    # one arm do
    pairs: int = 3
    repeats: int = 1  # runs of each arm past the cliff
    arms: tuple[AgentArm, ...] = CLOSED_ARMS

    def agents(self, best: int, hosted: bool) -> list[int]:
        """Numbers of agents that an arm is to play with, below the cliff first."""
        past = self.hosted if hosted else self.over
        shares = (*(() if hosted else self.under * self.pairs), *(past * self.repeats))
        return [round(share * best) for share in shares]


QUICK_CLOSED: Final = ClosedScale(
    clock=Clock(PACE, 15.0, 45.0), best=20, under=UNDER[-1:], over=OVER[:1],
    pairs=1, arms=(STOCK, LPM, HOLD, HOST_LRU, HOST_HOLD),
)  # fmt: skip


def run_closed_bench(
    progress: bool = True,
    quick: bool = False,
    best: int | None = None,
    pairs: int | None = None,
    arms: Sequence[AgentArm] | None = None,
    sessions: Path = SESSIONS,
    seed: int = 1,
    model: str | None = None,
    out: Path = Path(".closed"),
) -> ClosedResult:
    scale = QUICK_CLOSED if quick else ClosedScale()
    scale = replace(scale, best=best or scale.best, pairs=pairs or scale.pairs)
    clock = scale.clock
    arms = scale.arms if arms is None else arms
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name = model or str(ensure_model())
    recorded, vocabulary = read_sessions(sessions), vocabulary_size(name)
    with DemoProgress(0, shown=progress) as shown:

        def play(arm: AgentArm, agents: int) -> ClosedRun:
            users = scripts(recorded, agents, seed, clock.end_s / clock.pace, vocabulary)
            length = longest([turn.request for own in users for turn in own])
            return run_closed(arm, Room(name, out, POOL, length, POOL), users, clock, shown)

        best, runs = play_all(scale, arms, play)
    return ClosedResult(out, best, scale, runs, POOL)


class Hosted(Protocol):
    """An arm, as far as the plan goes."""

    @property
    def hosted(self) -> bool:
        """Whether it has host memory."""


Arm = TypeVar("Arm", bound=Hosted)


def play_all(
    scale: ClosedScale, arms: Sequence[Arm], play: Callable[[Arm, int], ClosedRun]
) -> tuple[int, list[ClosedRun]]:
    """Find how many agents suit the first arm, stock; then play all arms at multiples of that."""
    best = scale.best
    if best is None:
        tried = [play(arms[0], agents) for agents in scale.searched]
        best = max(tried, key=lambda run: run.passed.turns_per_minute).agents
    return best, [
        play(arm, agents)
        for hosted in (False, True)
        for agents in scale.agents(best, hosted)
        for arm in arms
        if arm.hosted is hosted
    ]


CLOSED_FILE: Final = "closed.json"


def save_closed(result: ClosedResult) -> Path:
    clock = result.scale.clock
    content = {
        **result.figures().as_dict(),
        **measured_now(),
        "best": result.best,
        "pool": result.pool,
        "block": result.block,
        "clock": asdict(clock),
        "runs": [_run_details(run) for run in result.runs],
        "newcomers": result.newcomers,
    }
    path = result.out / CLOSED_FILE
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _run_details(run: ClosedRun) -> dict[str, Any]:
    passed = run.passed
    return {
        "arm": run.arm,
        "agents": run.agents,
        "turns": len(passed.counted),
        "turns_per_minute": round(passed.turns_per_minute, 1),
        "cached_share": round(passed.cached_share, 4),
        "ttft_later_s": _quantiles(passed.ttft_s(False)),
        "ttft_first_s": _quantiles(passed.ttft_s(True)),
        "sessions_begun": len(passed.ttft_s(True)),
        "waiting_at_end": len(passed.waiting_s),
        "failed": passed.failed,
        "held": None if run.held is None else asdict(run.held),
    }


def _quantiles(samples: Sequence[float]) -> dict[int, float] | None:
    return {p: round(quantile(samples, p), 3) for p in (50, 95, 100)} if samples else None
