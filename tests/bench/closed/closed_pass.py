"""How closed-loop users meet a server: no request is sent before its predecessor's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import httpx

from ..agents.agents_pass import Telling, check_answer
from ..errors import CompletionError, TrafficError
from ..serving.completions import Answer, open_client, send
from ..serving.passes import OnAnswer
from .closed_users import ClosedTurn, Script

STARTING_S: Final = 5.0
"""Users begin within so many seconds of each other: chosen."""


@dataclass(frozen=True, slots=True)
class Clock:
    """When a run is measured; times in seconds.

    Attributes:
        pace: That a recorded second takes.
        warm_up_s: At the beginning, whose turns are not counted.
        measured_s: That follow.
    """

    pace: float
    warm_up_s: float
    measured_s: float

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.measured_s


@dataclass(frozen=True, slots=True)
class ClosedAnswer:
    """One answered turn; ``sent_s`` in seconds since the run began."""

    sent_s: float
    first: bool
    answer: Answer

    @property
    def ended_s(self) -> float:
        return self.sent_s + self.answer.latency_s


@dataclass(frozen=True, slots=True)
class ClosedPass:
    """What came of a run.

    Attributes:
        waiting_s: How long each turn that was not answered by the end had been waiting, and
            whether it was a session's first.
        failed: Requests that were refused or lost.
    """

    clock: Clock
    answers: tuple[ClosedAnswer, ...]
    waiting_s: tuple[tuple[bool, float], ...]
    failed: int

    @property
    def counted(self) -> list[ClosedAnswer]:
        """Turns that were answered while it was measured."""
        clock = self.clock
        return [a for a in self.answers if clock.warm_up_s <= a.ended_s < clock.end_s]

    @property
    def turns_per_minute(self) -> float:
        return 60.0 * len(self.counted) / self.clock.measured_s

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that were not computed."""
        prompt = sum(each.answer.prompt_tokens for each in self.counted)
        return sum(each.answer.cached_tokens for each in self.counted) / max(1, prompt)

    def ttft_s(self, first: bool) -> list[float]:
        """Times to first token, of sessions' first turns or of the others."""
        return [each.answer.ttft_s for each in self.counted if each.first is first]


async def closed_loop(
    url: str, users: Sequence[Script], telling: Telling, clock: Clock, on_answer: OnAnswer
) -> ClosedPass:
    """Every user plays its script until the time is up.

    Raises:
        AnswerError: The server did not give a recorded answer.
        TrafficError: A script ran out.
    """
    async with open_client(url) as client:
        play = _Play(client, telling, clock, on_answer)
        tasks = [
            asyncio.create_task(play.user(script, STARTING_S * number / len(users)))
            for number, script in enumerate(users)
        ]
        _, pending = await asyncio.wait(
            tasks, timeout=clock.end_s, return_when=asyncio.FIRST_EXCEPTION
        )
        waiting, failed = play.waiting(), play.failed  # who is cancelled below has not failed
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    return ClosedPass(clock, tuple(play.answers), waiting, failed)


@dataclass
class _Play:
    client: httpx.AsyncClient
    telling: Telling
    clock: Clock
    on_answer: OnAnswer
    answers: list[ClosedAnswer] = field(default_factory=list)
    failed: int = 0
    began: float = field(default_factory=perf_counter)
    _sent: dict[str, tuple[bool, float]] = field(default_factory=dict)

    def waiting(self) -> tuple[tuple[bool, float], ...]:
        """Turns that are not answered, and for how long."""
        now = perf_counter()
        return tuple((first, now - sent) for first, sent in self._sent.values())

    async def user(self, script: Script, starts_s: float) -> None:
        await asyncio.sleep(starts_s)
        for turn in script:
            await self._turn(turn)
            await asyncio.sleep(self.clock.pace * turn.pause_s)
        raise TrafficError("a user's script ran out: the run is too long for it")

    async def _turn(self, turn: ClosedTurn) -> None:
        request, sent = turn.request, perf_counter()
        body = request.body(self.clock.pace, self.telling.hinted, self.telling.layered)
        self._sent[request.name] = turn.first, sent
        try:
            answer = await send(self.client, request.name, body)
        except CompletionError:
            self.failed += 1
            return
        finally:
            del self._sent[request.name]
        check_answer(request, answer)
        self.answers.append(ClosedAnswer(sent - self.began, turn.first, answer))
        self.on_answer(answer)
