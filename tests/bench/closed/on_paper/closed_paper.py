"""The closed loop on paper: users who wait for answers and for their recorded pauses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgraph.advisor.replay.recorded_sessions import read_sessions

from ...paper.paper_engine import BLOCK_SIZE, base_config
from ...paper.quiet import only_errors
from ...serving.model import TINY, ModelShape, ensure_model
from ...serving.progress import DemoProgress
from ..closed import ClosedResult, ClosedScale, play_all
from ..closed_pass import STARTING_S, Clock, ClosedPass, ClosedRun, ClosedTurn, Script, scripts
from .newcomers import waits
from .paper_loop import PAPER_ARMS, Crowd, PaperArm, PaperLoop, Sent

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


class _Users(Crowd):
    def __init__(self, users: Sequence[Script], pace: float, starting_s: float) -> None:
        super().__init__((starting_s * user / len(users), user) for user in range(len(users)))
        self._scripts = [iter(script) for script in users]
        self._pace = pace

    def asks(self, user: int) -> Iterator[ClosedTurn]:
        yield next(self._scripts[user])

    def answered(self, sent: Sent, now: float) -> None:
        self.plan(now + self._pace * sent.turn.pause_s, sent.user)


BLOCKS: Final = 1000
"""In the pool: as many as two thousand of a real engine's, of 512 recorded tokens each."""

_SCALE: Final = ClosedScale(
    clock=Clock(1.0, 600.0, 3600.0), searched=(16, 18, 20, 22, 24), pairs=1
)  # By this clock two runs of one arm are the same.
_NEWCOMERS_S: Final = 2400.0
_QUICK: Final = replace(_SCALE, clock=Clock(1.0, 600.0, 1800.0), best=20)


def run_paper(
    progress: bool, quick: bool, sessions: Path, seed: int, out: Path, best: int | None
) -> ClosedResult:
    """All arms below the cliff and past it; no engine, no GPU, and no clock on the wall."""
    out.mkdir(parents=True, exist_ok=True)
    scale = _QUICK if quick else _SCALE
    scale = replace(scale, best=best or scale.best)
    recorded, clock = read_sessions(sessions), scale.clock
    with DemoProgress(0, shown=progress) as shown, only_errors():
        base = base_config(ensure_model(TINY))

        def play(arm: PaperArm, agents: int) -> ClosedRun:
            shown.passing(f"{arm.name}-{agents}", "on paper")
            users = scripts(recorded, agents, seed, clock.end_s, ModelShape().vocab)
            return play_on_paper(base, arm, BLOCKS, users, clock)

        best, runs = play_all(scale, PAPER_ARMS, play)
        shown.passing("newcomers", "on paper")
        large = waits(base, _NEWCOMERS_S, seed)
    return ClosedResult(out.resolve(), best, scale, runs, BLOCKS - 1, BLOCK_SIZE, large)
