"""The closed loop on paper: users who wait for answers and for their recorded pauses."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..closed_arms import ClosedRun
from ..closed_pass import STARTING_S, Clock, ClosedPass
from ..closed_users import Script
from .closed_paper_arms import PaperArm
from .paper_loop import PaperLoop, Sent

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
    """Every user plays its script until the time is up.

    Args:
        base: vLLM's configuration of an engine on paper.
        blocks: Of the pool, the null block among them.
        clock: In the service model's seconds, a recorded one each.
        starting_s: Users begin within so many of them, evenly.
    """
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
    """A crowd: each plays its script, and pauses between its turns.

    Args:
        pace: Seconds that a recorded second of a pause takes.
    """

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
