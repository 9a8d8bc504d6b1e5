"""The cliff on a real engine, stock and with the switch, one after the other on all cores."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from kvgraph.advisor.replay.recorded_sessions import read_sessions
from rich.console import Console
from rich.table import Table

from ..agents.agents_arms import AgentArm, Room
from ..closed.closed import PACE, POOL
from ..closed.closed_pass import STOCK, Clock, ClosedRun, Script, closed_loop, scripts
from ..figures import Figures, quantile
from ..recorded.agents_requests import SESSIONS
from ..serving.completions import Answer
from ..serving.model import ensure_model, vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.vllm_server import HINTS, Server
from ..serving.workload import BLOCK
from .page_demo import ENDPOINT, LivePage

AGENTS: Final = 32  # 1.6 times as many as stock serves best on this pool

CLOCK: Final = Clock(PACE, 15.0, 60.0)
SEED: Final = 1
LIVE_S: Final = 15.0  # what is shown while it runs is of so many seconds

_SWITCH: Final = AgentArm("kvgraph", graph=True, settings=((HINTS, ""),))
_NAMES: Final = {"stock": "stock vLLM", "kvgraph": "kvgraph"}
_HAD: Final = {"stock": "vLLM alone", "kvgraph": "the switch alone"}


@dataclass(frozen=True, slots=True)
class EngineCliff:
    stock: ClosedRun
    ours: ClosedRun

    def add_to(self, figures: Figures) -> None:
        stock, ours = self.stock.passed, self.ours.passed
        ratio = ours.turns_per_minute / max(stock.turns_per_minute, 1e-9)
        figures.add("engine_turns_ratio", ratio, "of stock", "≥ 3")
        figures.add("engine_turns_per_minute_stock", stock.turns_per_minute, "turns/min")
        figures.add("engine_turns_per_minute", ours.turns_per_minute, "turns/min")
        before, after = (_ttft(run, 50) for run in (self.stock, self.ours))
        if before is not None and after is not None:
            figures.add("engine_ttft_p50_ratio", after / max(before, 1e-9), "of stock", "≤ .05")
            figures.add("engine_ttft_p50_stock", before, "s")
            figures.add("engine_ttft_p50", after, "s")
        figures.add("engine_failed", stock.failed + ours.failed, "requests", "0")

    def details(self) -> dict[str, Any]:
        return {
            "agents": self.stock.agents,
            "pool_blocks": POOL,
            "clock": asdict(self.stock.passed.clock),
            "arms": {_NAMES[run.arm]: _arm_details(run) for run in (self.stock, self.ours)},
        }


def run_engine_cliff(
    model: str | None, out: Path, shown: DemoProgress, page: LivePage | None
) -> EngineCliff:
    name = model or str(ensure_model())
    recorded_s = CLOCK.end_s / CLOCK.pace
    sessions = read_sessions(SESSIONS)
    users = scripts(sessions, AGENTS, SEED, recorded_s, vocabulary_size(name))
    longest = max(len(t.request.prompt) + len(t.request.answer) for own in users for t in own)
    room = Room(name, out, POOL, -(-longest // BLOCK) * BLOCK)
    return EngineCliff(*(_run(arm, room, users, CLOCK, shown, page) for arm in (STOCK, _SWITCH)))


def print_engine_cliff(result: EngineCliff) -> None:
    console = Console()
    title = f"{result.stock.agents} agents on a real engine whose pool fits about twenty"
    table = Table(title=title, title_justify="left")
    columns = ("and what it had", "turns a minute", "TTFT p50", "p95", "of first turns, p50")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for run in (result.stock, result.ours):
        times = (_ttft(run, 50), _ttft(run, 95), _ttft(run, 50, first=True))
        shown = ("-" if each is None else f"{each:,.2f} s" for each in times)
        turns = f"[bold]{run.passed.turns_per_minute:,.0f}[/bold]"
        table.add_row(f"{_NAMES[run.arm]}\n[dim]{_HAD[run.arm]}[/dim]", turns, *shown)
    console.print(table)
    clock = result.stock.passed.clock
    console.print(
        f"{clock.measured_s:.0f} seconds of each, after {clock.warm_up_s:.0f} of warm-up. Each "
        "agent's next turn comes after its answer and the recorded pause. With kvgraph a session's "
        "first turn waits while the pool has no room for it; TTFT is of the turns that return."
    )


def _run(
    arm: AgentArm,
    room: Room,
    users: Sequence[Script],
    clock: Clock,
    shown: DemoProgress,
    page: LivePage | None,
) -> ClosedRun:
    name, plan = _NAMES[arm.name], room.plan(arm, f"cliff_{arm.name}")
    if page is not None:
        page.begin_anew()
        if arm.graph:
            plan = replace(plan, settings=(*plan.settings, (ENDPOINT, page.endpoint)))
    shown.starting(name)
    with Server(plan) as server:
        note = "" if arm.graph or page is None else "; no graph, so the page is empty"
        shown.passing(name, f"{len(users)} agents, {clock.end_s:.0f} s{note}", 0)
        live = _Live(shown)
        passed = asyncio.run(closed_loop(server.url, users, arm.telling, clock, live.answered))
    return ClosedRun(arm.name, len(users), passed, None)


class _Live:
    def __init__(self, shown: DemoProgress) -> None:
        self._shown = shown
        self._began = perf_counter()
        self._last: deque[tuple[float, float]] = deque()  # when answered, time to first token

    def answered(self, answer: Answer) -> None:
        now = perf_counter()
        self._last.append((now, answer.ttft_s))
        while self._last[0][0] < now - LIVE_S:
            self._last.popleft()
        rate = 60 * len(self._last) / max(1.0, min(LIVE_S, now - self._began))
        ttft = median(ttft for _, ttft in self._last)
        self._shown.noted(f"{rate:.0f} turns/min, first token after {ttft:.2f} s")


def _ttft(run: ClosedRun, percentile: int, first: bool = False) -> float | None:
    times = run.passed.ttft_s(first)
    return quantile(times, percentile) if times else None


def _arm_details(run: ClosedRun) -> dict[str, Any]:
    return {
        "had": _HAD[run.arm],
        "turns_per_minute": round(run.passed.turns_per_minute, 1),
        "prompt_found": round(run.passed.cached_share, 4),
        "ttft_returning_s": {p: _rounded(_ttft(run, p)) for p in (50, 95)},
        "ttft_first_s": {p: _rounded(_ttft(run, p, first=True)) for p in (50, 95)},
        "waiting_at_the_end": len(run.passed.waiting_s),
        "failed": run.passed.failed,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
