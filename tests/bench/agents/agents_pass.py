"""How an arm meets recorded agents: one by one or side by side, by the fleet's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import httpx

from ..errors import AnswerError
from ..recorded.agents_requests import AgentRequest
from ..serving.completions import Answer, open_client, send
from ..serving.passes import OnAnswer, PassResult


@dataclass(frozen=True, slots=True)
class Telling:
    """What callers tell a server: nothing to stock, which could not read it.

    Attributes:
        hinted: Sessions, ends, tool pauses and their rough length.
        layered: Where tools and system prompt lie in a prompt.
    """

    hinted: bool = False
    layered: bool = False


@dataclass(frozen=True, slots=True)
class AgentPass:
    """What came of sending every request; ``sent_s``: when, in seconds since the pass began."""

    result: PassResult
    sent_s: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of all prompt tokens that were not computed."""
        return self.result.cached_tokens / self.result.prompt_tokens


async def one_by_one(
    url: str,
    requests: Sequence[AgentRequest],
    telling: Telling,
    on_answer: OnAnswer,
    pace: float | None = None,
) -> AgentPass:
    """Send every request in order of arrival, each after the answer to the one before.

    Args:
        pace: Seconds that a recorded second takes; None waits for no clock. A request that is
            late because the ones before it took long is sent at once.

    Raises:
        CompletionError: A request was refused or lost.
        AnswerError: The server did not give the recorded answer.
    """
    async with open_client(url) as client:
        sender = _Sender(client, requests, telling, on_answer, pace)
        for request in requests:
            await sender.send(request)
    return sender.passed()


async def side_by_side(
    url: str,
    requests: Sequence[AgentRequest],
    telling: Telling,
    on_answer: OnAnswer,
    pace: float | None = None,
) -> AgentPass:
    """Send every session's requests in order, each after the answer to the one before; sessions
    do not wait for each other. Otherwise like ``one_by_one``.
    """
    sessions: dict[str, list[AgentRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    try:
        async with open_client(url) as client, asyncio.TaskGroup() as group:
            sender = _Sender(client, requests, telling, on_answer, pace)
            for own in sessions.values():
                group.create_task(sender.send_all(own))
    except ExceptionGroup as failed:  # the first to fail; the others were cancelled for it
        raise failed.exceptions[0] from None
    return sender.passed()


class _Sender:
    """Sends requests when they are due, and keeps what comes back."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        requests: Sequence[AgentRequest],
        telling: Telling,
        on_answer: OnAnswer,
        pace: float | None,
    ) -> None:
        self._client = client
        self._requests = requests
        self._telling = telling
        self._on_answer = on_answer
        self._pace = pace
        self._began = perf_counter()
        self._sent: dict[str, float] = {}
        self._answers: dict[str, Answer] = {}

    async def send_all(self, requests: Sequence[AgentRequest]) -> None:
        for request in requests:
            await self.send(request)

    async def send(self, request: AgentRequest) -> None:
        if self._pace is not None:
            due = self._began + self._pace * (request.at - self._requests[0].at)
            await asyncio.sleep(max(0.0, due - perf_counter()))
        self._sent[request.name] = perf_counter() - self._began
        body = request.body(self._pace or 0.0, self._telling.hinted, self._telling.layered)
        answer = await send(self._client, request.name, body)
        check_answer(request, answer)
        self._answers[request.name] = answer
        self._on_answer(answer)

    def passed(self) -> AgentPass:
        """All of it, in order of arrival."""
        names = [request.name for request in self._requests]
        answers = tuple(self._answers[name] for name in names)
        result = PassResult(answers, perf_counter() - self._began)
        return AgentPass(result, tuple(self._sent[name] for name in names))


def check_answer(request: AgentRequest, answer: Answer) -> None:
    """An answer of another length would be another text in the next prompt."""
    if answer.output_tokens != len(request.answer):
        raise AnswerError(
            f"request {request.name} was answered with {answer.output_tokens} tokens, recorded "
            f"were {len(request.answer)}: the server did not load the bench's logits processor"
        )
