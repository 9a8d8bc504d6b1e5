"""The closed loop on paper: users who wait for answers and for their recorded pauses."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgraph.advisor.replay.recordings import Session, read_sessions

from ...paper.paper_engine import BLOCK_SIZE, base_config
from ...paper.quiet import only_errors
from ...serving.model import TINY, ModelShape, ensure_model
from ...serving.progress import DemoProgress
from ..closed import ClosedResult, ClosedScale, measure_hold
from ..closed_pass import STARTING_S, Clock, ClosedPass, ClosedRun, Script, scripts
from .newcomer import NewcomerRun, play_newcomers
from .paper_loop import (
    PAPER_ARMS,
    PAPER_STOCK,
    PaperArm,
    PaperLoop,
    Sent,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def play_on_paper(
    base: VllmConfig,
    arm: PaperArm,
    blocks: int,
    users: Sequence[Script],
    clock: Clock,
    starting_s: float = STARTING_S,
) -> ClosedRun:
    """Every user plays its script until the time is up."""
    loop = PaperLoop(base, arm, blocks, _Users(users, clock.pace, starting_s), pace=clock.pace)
    try:
        loop.run(clock.end_s)
        waiting = [
            (each.turn.first, loop.now - each.sent.at_s) for each in loop.unanswered.values()
        ]
        passed = ClosedPass(clock, tuple(loop.answers), tuple(waiting), 0)
        return ClosedRun(arm.name, len(users), passed, loop.held())
    finally:
        loop.engine.close()


class _Users:
    """A crowd: each plays its script, and pauses between its turns."""

    def __init__(self, users: Sequence[Script], pace: float, starting_s: float) -> None:
        self._scripts = [iter(script) for script in users]
        self._pace = pace
        self._due = [(starting_s * user / len(users), user) for user in range(len(users))]

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> Iterator[Sent]:
        while self._due and self._due[0][0] <= now:
            at, user = heapq.heappop(self._due)
            yield Sent(user, next(self._scripts[user]), at)

    def answered(self, sent: Sent, now: float) -> None:
        heapq.heappush(self._due, (now + self._pace * sent.turn.pause_s, sent.user))


BLOCKS: Final = 1000
"""In the pool: as many as two thousand of a real engine's, of 512 recorded tokens each."""

_SCALE: Final = ClosedScale(
    clock=Clock(1.0, 600.0, 3600.0), searched=(16, 18, 20, 22, 24), pairs=1
)  # By this clock two runs of one arm are the same.
_QUICK: Final = replace(_SCALE, clock=Clock(1.0, 600.0, 1800.0), best=20)
_VOCABULARY: Final = ModelShape().vocab


def run_paper(
    progress: bool, quick: bool, sessions: Path, seed: int, out: Path, best: int | None
) -> ClosedResult:
    """All arms below the cliff and past it; no engine, no GPU, and no clock on the wall."""
    out.mkdir(parents=True, exist_ok=True)
    scale = _QUICK if quick else _SCALE
    scale = replace(scale, best=best or scale.best)
    with DemoProgress(0, shown=progress) as shown, only_errors():
        bench = _PaperBench(read_sessions(sessions), seed, scale, shown)
        bench.play()
        return ClosedResult(
            out.resolve(), bench.best, scale, bench.runs, measure_hold(), BLOCKS - 1, BLOCK_SIZE,
            bench.newcomers(),
        )  # fmt: skip


class _PaperBench:
    def __init__(
        self, sessions: list[Session], seed: int, scale: ClosedScale, shown: DemoProgress
    ) -> None:
        self.best = scale.best or 0
        self.runs: list[ClosedRun] = []
        self._sessions, self._seed, self._scale, self._shown = sessions, seed, scale, shown
        self._base = base_config(ensure_model(TINY))

    def play(self) -> None:
        if not self.best:
            tried = [self._run(agents, PAPER_STOCK) for agents in self._scale.searched]
            self.best = max(tried, key=lambda run: run.passed.turns_per_minute).agents
        for hosted in (False, True):
            arms = [arm for arm in PAPER_ARMS if arm.hosted is hosted]
            for agents in self._scale.agents(self.best, hosted):
                self._run(agents, *arms)

    def newcomers(self) -> tuple[NewcomerRun, ...]:
        """Large prompts beside small sessions."""
        self._shown.passing("newcomers", "on paper")
        return play_newcomers(self._base, _VOCABULARY, self._seed)

    def _run(self, agents: int, *arms: PaperArm) -> ClosedRun:
        clock = self._scale.clock
        users = scripts(self._sessions, agents, self._seed, clock.end_s, _VOCABULARY)
        for arm in arms:
            self._shown.passing(f"{arm.name}-{agents}", "on paper")
            self.runs.append(play_on_paper(self._base, arm, BLOCKS, users, clock))
        return self.runs[-1]
