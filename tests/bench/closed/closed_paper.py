"""The closed loop on paper: users who wait for answers and for their recorded pauses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgraph.advisor.replay.recorded_sessions import read_sessions

from ..figures import only_errors
from ..paper.paper_engine import BLOCK_SIZE, base_config
from ..recorded.agents_requests import AgentRequest
from ..serving.model import TINY, ModelShape, ensure_model
from ..serving.progress import DemoProgress
from .closed import ClosedResult, ClosedScale, play_all
from .closed_pass import STARTING_S, Clock, ClosedPass, ClosedRun, ClosedTurn, Script, scripts
from .paper_loop import PAPER_ARMS, PAPER_HOLD, Crowd, PaperArm, PaperLoop, Sent

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POOL: Final = 480  # blocks; half of them are what a prompt of the longest length on paper takes
CROWD: Final = 32  # sessions at once; the pool holds the contexts of some 20
TURNS: Final = 6  # of each, before another begins
FIRST, GROWTH, SAID = 10, 2, 16  # blocks, blocks a turn, tokens of an answer
PAUSE_S: Final = 10.0
EVERY_S: Final = 240.0  # between newcomers, so that one has long gone when the next arrives
WARM_UP_S: Final = 300.0
LARGE: Final = "newcomer"


def waits(config: Any, seconds: float, seed: int) -> tuple[list[float], list[float]]:
    """Seconds from arrival to the first token, or to the end: newcomers', small sessions' first."""
    loop = PaperLoop(config, PAPER_HOLD, POOL + 1, _Newcomers(seed))
    found: dict[bool, list[float]] = {True: [], False: []}
    try:
        loop.run(WARM_UP_S + seconds)
        for each in loop.answers:
            if each.first and each.sent_s >= WARM_UP_S:
                found[each.answer.name.startswith(LARGE)].append(each.answer.ttft_s)
        for left in loop.unanswered.values():
            if left.turn.first and left.first_s is None:
                waited = loop.now - left.sent.at_s
                found[left.turn.request.name.startswith(LARGE)].append(waited)
    finally:
        loop.engine.close()
    return found[True], found[False]


class _Newcomers(Crowd):
    """Small sessions one after another, and who comes now and then."""

    def __init__(self, seed: int) -> None:
        begins = [(number * 5.0 / CROWD, number) for number in range(CROWD)]
        super().__init__([*begins, (WARM_UP_S, CROWD)])
        self._random = random.Random(f"{seed}/newcomer")
        self._played = [0] * (CROWD + 1)
        self._prompts: dict[int, tuple[int, ...]] = {}

    def asks(self, user: int) -> Iterator[ClosedTurn]:
        number, self._played[user] = self._played[user], self._played[user] + 1
        session, turn = divmod(number, 1 if user == CROWD else TURNS)
        if user == CROWD:
            name, prompt = f"{LARGE}-{session}", self._tokens(POOL // 2 * BLOCK_SIZE - SAID)
        else:
            name = f"small-{user}-{session}"
            before = self._prompts.get(user, ()) if turn else ()
            prompt = (*before, *self._tokens((GROWTH if turn else FIRST) * BLOCK_SIZE))
        ends = user == CROWD or turn == TURNS - 1
        answer = (*self._tokens(SAID - 1), 1)
        request = AgentRequest(f"{name}-{turn}", 0.0, name, prompt, answer, ends, None, None, ())
        yield ClosedTurn(request, turn == 0, self._random.uniform(0.5, 1.5) * PAUSE_S)
        if user == CROWD:
            self.plan(WARM_UP_S + EVERY_S * (session + 1), user)

    def answered(self, sent: Sent, now: float) -> None:
        if sent.user < CROWD:
            self._prompts[sent.user] = sent.turn.request.prompt + sent.turn.request.answer
            self.plan(now + sent.turn.pause_s, sent.user)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(2, ModelShape().vocab) for _ in range(count))


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
