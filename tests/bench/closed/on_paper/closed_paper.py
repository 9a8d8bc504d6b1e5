"""The closed loop on paper: users who wait for answers and for their recorded pauses."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvgraph.advisor.replay.recordings import Session, read_sessions

from ...figures import quantile
from ...paper.paper_engine import BLOCK_SIZE, base_config
from ...paper.quiet import only_errors
from ...recorded.agents_requests import AgentRequest
from ...serving.model import TINY, ModelShape, ensure_model
from ...serving.progress import DemoProgress
from ..closed import ClosedResult, ClosedScale, measure_hold
from ..closed_pass import STARTING_S, Clock, ClosedPass, ClosedRun, ClosedTurn, Script, scripts
from .paper_loop import (
    PAPER_ARMS,
    PAPER_HOLD,
    PAPER_STOCK,
    PaperArm,
    PaperLoop,
    Sent,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

POOL: Final = 480
"""Blocks; half of them are what a prompt of the longest length that paper allows takes."""
CROWDS: Final = (32, 64)  # sessions at once; the pool holds the contexts of some 20
_TURNS: Final = 6  # of each, before another begins
_FIRST, _GROWTH, _SAID = 10, 2, 16  # blocks, blocks a turn, tokens of an answer
_PAUSE_S: Final = 10.0
_EVERY_S: Final = 240.0  # between newcomers, so that one has long gone when the next arrives
_WARM_UP_S: Final = 300.0
_MEASURED_S: Final = 2400.0
_LARGE: Final = "newcomer"
_STOPS: Final = 1  # a token that ends an answer


@dataclass(frozen=True, slots=True)
class NewcomerRun:
    """What came of one arm; times in seconds."""

    arm: str
    sessions: int  # of the crowd, at once
    newcomers: tuple[float, ...]  # from arrival to the first token, or to the run's end
    crowd: tuple[float, ...]  # the same of the crowd's sessions' first turns
    turns: int  # of the crowd, answered

    @property
    def ratio(self) -> float:
        """The longest wait of a newcomer, in 95th percentiles of the crowd's."""
        return max(self.newcomers) / max(1e-9, quantile(self.crowd, 95))


def play_newcomers(
    base: VllmConfig,
    vocabulary: int,
    seed: int,
    measured_s: float = _MEASURED_S,
    crowds: Sequence[int] = CROWDS,
) -> tuple[NewcomerRun, ...]:
    """Stock and ours beside each crowd, with the same newcomers."""
    return tuple(
        _play(base, arm, _Crowd(size, vocabulary, seed), _WARM_UP_S + measured_s)
        for size in crowds
        for arm in (PAPER_STOCK, PAPER_HOLD)
    )


def _play(base: VllmConfig, arm: PaperArm, crowd: _Crowd, end_s: float) -> NewcomerRun:
    loop = PaperLoop(base, arm, POOL + 1, crowd)
    try:
        loop.run(end_s)
        waits: dict[bool, list[float]] = {False: [], True: []}
        for each in loop.answers:
            if each.first and each.sent_s >= _WARM_UP_S:
                waits[each.answer.name.startswith(_LARGE)].append(each.answer.ttft_s)
        for left in loop.unanswered.values():
            if left.turn.first and left.first_s is None:
                waited = loop.now - left.sent.at_s
                waits[left.turn.request.name.startswith(_LARGE)].append(waited)
        turns = sum(each.sent_s >= _WARM_UP_S for each in loop.answers)
        return NewcomerRun(arm.name, crowd.size, tuple(waits[True]), tuple(waits[False]), turns)
    finally:
        loop.engine.close()


class _Crowd:
    """Small sessions one after another, and now and then a prompt of half the pool."""

    def __init__(self, size: int, vocabulary: int, seed: int) -> None:
        self.size = size
        self._vocabulary = vocabulary
        self._random = random.Random(f"{seed}/newcomer")
        self._due = [(number * 5.0 / size, number) for number in range(size)]
        self._due.append((_WARM_UP_S, size))
        heapq.heapify(self._due)
        self._played = [0] * (size + 1)
        self._prompts: dict[int, list[int]] = {}

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> Iterator[Sent]:
        while self._due and self._due[0][0] <= now:
            at, user = heapq.heappop(self._due)
            if user == self.size:
                heapq.heappush(self._due, (at + _EVERY_S, user))
                yield Sent(user, self._newcomer(), at)
            else:
                yield Sent(user, self._turn(user), at)

    def answered(self, sent: Sent, now: float) -> None:
        if sent.user == self.size:
            return
        self._prompts[sent.user] = [*sent.turn.request.prompt, *sent.turn.request.answer]
        heapq.heappush(self._due, (now + sent.turn.pause_s, sent.user))

    def _turn(self, user: int) -> ClosedTurn:
        session, turn = divmod(self._played[user], _TURNS)
        self._played[user] += 1
        before = self._prompts.get(user, []) if turn else []
        prompt = [*before, *self._tokens((_GROWTH if turn else _FIRST) * BLOCK_SIZE)]
        name = f"small-{user}-{session}"
        request = self._request(f"{name}-{turn}", name, prompt, turn == _TURNS - 1)
        return ClosedTurn(request, turn == 0, self._random.uniform(0.5, 1.5) * _PAUSE_S)

    def _newcomer(self) -> ClosedTurn:
        name = f"{_LARGE}-{self._played[self.size]}"
        self._played[self.size] += 1
        prompt = self._tokens(POOL // 2 * BLOCK_SIZE - _SAID)
        return ClosedTurn(self._request(name, name, prompt, True), True, 0.0)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(2, self._vocabulary) for _ in range(count)]

    def _request(self, name: str, session: str, prompt: list[int], ended: bool) -> AgentRequest:
        answer = (*self._tokens(_SAID - 1), _STOPS)
        return AgentRequest(name, 0.0, session, tuple(prompt), answer, ended, None, None, ())


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
