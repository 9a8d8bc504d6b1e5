"""Requests by the clock on paper: sessions side by side, whatever the engine can take.

The demo's second half, without its machine: every run of the same requests gives the same times.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from ...figures import quantile
from ...recorded.agents_requests import AgentRequest
from ...serving.cache_ledger import Books
from ..closed_pass import ClosedAnswer
from ..closed_sidecar import HoldCounts
from ..closed_users import ClosedTurn
from .closed_paper_arms import PAPER_STOCK, PaperArm
from .paper_loop import PaperLoop, Sent
from .paper_service import AGENTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class OpenRun:
    """One arm, once; times in the service model's seconds.

    Attributes:
        wall_s: Until the last answer.
        held: What the engine counted; None where nobody is held.
    """

    arm: str
    answers: Sequence[ClosedAnswer]
    wall_s: float
    held: HoldCounts | None

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were not computed."""
        prompt = sum(each.answer.prompt_tokens for each in self.answers)
        return sum(each.answer.cached_tokens for each in self.answers) / prompt

    @property
    def mean_ttft_s(self) -> float:
        """Mean time to first token."""
        return sum(each.answer.ttft_s for each in self.answers) / len(self.answers)

    def ttft_s(self, percentile: int) -> float:
        """A percentile of all times to first token."""
        return quantile([each.answer.ttft_s for each in self.answers], percentile)


def play_open(
    base: VllmConfig,
    arm: PaperArm,
    blocks: int,
    requests: Sequence[AgentRequest],
    pace: float,
    running: int,
    books: Books | None = None,
) -> OpenRun:
    """Send each session's requests when they are due, each after the answer to the one before.

    Args:
        blocks: Of the pool, the null block among them.
        pace: Seconds that a recorded second takes.
        running: Requests that run at once at most.
        books: Where vLLM's KV events are booked.
    """
    return _play(base, arm, blocks, Sessions(_by_session(requests), pace), running, books)


def alone_s(base: VllmConfig, blocks: int, requests: Sequence[AgentRequest]) -> float:
    """What all requests take one after the other on stock, in seconds."""
    return _play(base, PAPER_STOCK, blocks, Sessions([requests], 0.0), 1).wall_s


def _play(
    base: VllmConfig,
    arm: PaperArm,
    blocks: int,
    crowd: Sessions,
    running: int,
    books: Books | None = None,
) -> OpenRun:
    service = replace(AGENTS, sequences=running)
    loop = PaperLoop(base, arm, blocks, crowd, service, crowd.pace, books)
    try:
        loop.run()
        return OpenRun(arm.name, tuple(loop.answers), loop.now, loop.held())
    finally:
        loop.engine.close()


def _by_session(requests: Sequence[AgentRequest]) -> Iterator[list[AgentRequest]]:
    in_order = sorted(requests, key=lambda each: each.session)  # stable: each session's stay so
    return (list(own) for _, own in groupby(in_order, key=lambda each: each.session))


class Sessions:
    """A crowd: each session's requests by the clock, late ones as soon as may be.

    Args:
        pace: Seconds that a recorded second takes.
    """

    def __init__(self, sessions: Iterable[Sequence[AgentRequest]], pace: float) -> None:
        self._left = [deque(own) for own in sessions]
        self.pace = pace
        self._began = min(own[0].at for own in self._left)
        self._lengths = [len(own) for own in self._left]
        self._due: list[tuple[float, int]] = []
        for user in range(len(self._left)):
            self._plan(user, 0.0)

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> Iterator[Sent]:
        while self._due and self._due[0][0] <= now:
            at, user = heapq.heappop(self._due)
            own = self._left[user]
            is_first = len(own) == self._lengths[user]
            yield Sent(user, ClosedTurn(own.popleft(), is_first, 0.0), at)

    def answered(self, sent: Sent, now: float) -> None:
        self._plan(sent.user, now)

    def _plan(self, user: int, now: float) -> None:
        if own := self._left[user]:
            due = self.pace * (own[0].at - self._began)
            heapq.heappush(self._due, (max(now, due), user))
