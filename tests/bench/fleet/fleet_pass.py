"""One pass of recorded agents over several engines: each session's turns in order, and what came
of them where engines may die."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from time import perf_counter

from ..agents.agents_arms import check_answer
from ..errors import CompletionError
from ..recorded.agents_requests import AgentRequest
from ..serving.completions import Answer, OnAnswer, PassResult, open_client, send
from .routers.rival_routers import Pick

Midway = Callable[[int], Awaitable[None]]
"""What happens once half of the requests were sent and answered, told how many are in flight."""


@dataclass(frozen=True, slots=True)
class FleetPass:
    """What came of every request of an arm.

    Attributes:
        failed: Names of requests that were not answered to the end.
        sent: Requests by engine; one number where a proxy chose.
    """

    arm: str
    result: PassResult
    failed: tuple[str, ...]
    sent: tuple[int, ...]

    @property
    def share(self) -> float:
        """Share of the answered prompts' tokens that were not computed."""
        return self.result.cached_tokens / max(1, self.result.prompt_tokens)


class FleetSender:
    """Sends an arm's requests.

    Args:
        arm: In its sessions' names, so that no pass continues sessions of another.
        urls: Where requests go.
        pick: Chooses among them.
        pace: Seconds that a recorded second takes; 0: each session as fast as it is answered.
        midway: Happens in the middle.
        salted: Whether the arm's name salts the prefix cache too, since engines still have what
            other passes asked for.
    """

    def __init__(
        self,
        arm: str,
        urls: Sequence[str],
        pick: Pick,
        requests: Sequence[AgentRequest],
        pace: float,
        on_answer: OnAnswer,
        midway: Midway | None = None,
        salted: bool = False,
    ) -> None:
        self._arm, self._urls, self._pick = arm, urls, pick
        self._requests, self._pace = requests, pace
        self._on_answer = on_answer
        self._midway, self._salted = midway, salted
        self._began = perf_counter()
        self._half = asyncio.Event()
        self._running = [0] * len(urls)
        self._sent = [0] * len(urls)
        self._answers: list[Answer] = []
        self._failed: list[str] = []

    async def play(self) -> FleetPass:
        """Send all of them, sessions side by side.

        Raises:
            AnswerError: A server did not give the recorded answer.
        """
        sessions: dict[str, list[AgentRequest]] = defaultdict(list)
        for request in self._requests:
            sessions[request.session].append(request)
        self._began = perf_counter()
        async with AsyncExitStack() as stack:
            self._clients = [await stack.enter_async_context(open_client(x)) for x in self._urls]
            try:
                async with asyncio.TaskGroup() as group:
                    if self._midway is not None:
                        group.create_task(self._at_half())
                    for own in sessions.values():
                        group.create_task(self._session(own))
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
        result = PassResult(tuple(self._answers), perf_counter() - self._began)
        return FleetPass(self._arm, result, tuple(self._failed), tuple(self._sent))

    async def _session(self, own: Sequence[AgentRequest]) -> None:
        for request in own:
            due = self._began + self._pace * (request.at - self._requests[0].at)
            await asyncio.sleep(max(0.0, due - perf_counter()))
            await self._send(replace(request, session=f"{self._arm}-{request.session}"))
            if 2 * (len(self._answers) + len(self._failed)) >= len(self._requests):
                self._half.set()

    async def _send(self, request: AgentRequest) -> None:
        number = self._pick(request.session, self._running)
        self._sent[number] += 1
        self._running[number] += 1
        try:
            body = request.body(self._pace, hinted=True)
            if self._salted:
                body["cache_salt"] = self._arm
            answer = await send(self._clients[number], request.name, body)
        except CompletionError:
            self._failed.append(request.name)
            return
        finally:
            self._running[number] -= 1
        check_answer(request, answer)
        self._answers.append(answer)
        self._on_answer(answer)

    async def _at_half(self) -> None:
        await self._half.wait()
        assert self._midway is not None
        await self._midway(sum(self._running))
