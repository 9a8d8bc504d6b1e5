"""Prompts of half a pool, now and then, beside many small sessions: who waits how long."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from ...paper.paper_engine import BLOCK_SIZE
from ...recorded.agents_requests import AgentRequest
from ...serving.model import ModelShape
from ..closed_pass import ClosedTurn
from .paper_loop import PAPER_HOLD, Crowd, PaperLoop, Sent

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
