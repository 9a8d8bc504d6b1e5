"""The two ways in which an arm meets the workload: one request at a time, and all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import httpx

from .completions import Answer, complete, open_client
from .workload import Session, Workload

OnAnswer = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class PassResult:
    """Every answer of one pass, in the order of their arrival."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came out of the prefix cache."""
        return sum(answer.cached_tokens for answer in self.answers)

    @property
    def recomputed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens served per second of wall time."""
        output = sum(answer.output_tokens for answer in self.answers)
        return (self.prompt_tokens + output) / self.wall_s

    @property
    def texts(self) -> dict[str, str]:
        """Answer text by request name."""
        return {answer.name: answer.text for answer in self.answers}

    @property
    def ttft_ms(self) -> list[float]:
        """Time to first token of every request, in milliseconds."""
        return [answer.ttft_s * 1e3 for answer in self.answers]


def agreement(one: PassResult, other: PassResult) -> float:
    """The share of requests that were answered with the same text in both passes."""
    return sum(other.texts[name] == text for name, text in one.texts.items()) / len(one.texts)


async def one_at_a_time(url: str, workload: Workload, on_answer: OnAnswer) -> PassResult:
    """Every request in the script's order, each after the one before: no batching at all."""
    began = perf_counter()
    answers = []
    async with open_client(url) as client:
        for turn in workload.in_order():
            answer = await complete(client, turn, "sequential")
            on_answer(answer)
            answers.append(answer)
    return PassResult(tuple(answers), perf_counter() - began)


async def all_at_once(url: str, workload: Workload, on_answer: OnAnswer) -> PassResult:
    """Sessions start by the script's clock and pause between their turns as scripted."""
    began = perf_counter()
    answers: list[Answer] = []

    def take(answer: Answer) -> None:
        answers.append(answer)
        on_answer(answer)

    try:
        async with open_client(url) as client, asyncio.TaskGroup() as group:
            for session in workload.sessions:
                group.create_task(_live(client, session, take))
    except ExceptionGroup as failed:  # the first to fail; the others were cancelled for it
        raise failed.exceptions[0] from None
    return PassResult(tuple(answers), perf_counter() - began)


async def _live(client: httpx.AsyncClient, session: Session, on_answer: OnAnswer) -> None:
    await asyncio.sleep(session.starts_s)
    for turn in session.turns:
        await asyncio.sleep(turn.pause_s)
        on_answer(await complete(client, turn, "concurrent"))
