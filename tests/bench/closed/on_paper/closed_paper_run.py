"""``bench agents --closed --paper``: the cliff, and the hold, on vLLM's scheduler alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from kvgraph.advisor.replay.recordings import Session, read_sessions

from ...paper.paper_engine import BLOCK_SIZE, base_config
from ...paper.quiet import only_errors
from ...serving.model import TINY, ModelShape, ensure_model
from ...serving.progress import DemoProgress
from ..closed import ClosedScale
from ..closed_arms import ClosedRun
from ..closed_figures import ClosedResult
from ..closed_pass import Clock
from ..closed_users import scripts
from ..hold_cost import measure_hold
from .closed_paper import play_on_paper
from .closed_paper_arms import PAPER_ARMS, PAPER_STOCK, PaperArm
from .newcomer import NewcomerRun, play_newcomers

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
