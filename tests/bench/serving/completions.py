"""One completion against a server, streamed and timed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx

from ..errors import CompletionError
from .workload import Session, Turn, Workload


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request; times in seconds from its sending."""

    name: str
    text: str
    ttft_s: float
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def open_client(url: str) -> httpx.AsyncClient:
    """A client without a cap on concurrent requests; the environment's proxies are not used."""
    # vLLM's server closes what was idle for 5 s: a connection must not be taken up just then.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
    return httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits, trust_env=False)


async def complete(client: httpx.AsyncClient, turn: Turn, run: str) -> Answer:
    return await send(client, turn.name, request_body(turn, run))


async def send(client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> Answer:
    """Send the JSON of a request that asks for a stream with usage, and read the stream."""
    try:
        return await _send(client, name, body)
    except httpx.HTTPError as error:
        lost = type(error).__name__
        raise CompletionError(f"request {name} was lost ({lost}); see the server's log") from None


async def _send(client: httpx.AsyncClient, name: str, body: dict[str, Any]) -> Answer:
    sent, first = time.perf_counter(), None
    parts: list[str] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise CompletionError(f"request {name} was answered HTTP {response.status_code}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[len("data: ") :])
            usage = chunk.get("usage") or usage
            if chunk["choices"]:
                first = first or time.perf_counter()
                parts.append(chunk["choices"][0]["text"])
    ended = time.perf_counter()
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        name,
        "".join(parts),
        (first or ended) - sent,
        ended - sent,
        usage["prompt_tokens"],
        details.get("cached_tokens") or 0,
        usage["completion_tokens"],
    )


def request_body(turn: Turn, run: str) -> dict[str, Any]:
    """The JSON of one request: the same for every arm."""
    body = {**forced(turn.token_ids, turn.max_tokens), "cache_salt": run}
    if params := turn.kv_transfer_params():
        params["kvgraph"]["session"] = f"{run}:{turn.session}"
        body["kv_transfer_params"] = params
        body["session_id"] = f"{run}:{turn.session}"
    return body


def plain_body(session: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The JSON of a request that names its session and says nothing else."""
    return {**forced(prompt, tokens), "session_id": session}


def forced(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """A streamed answer of so many tokens, whatever comes."""
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


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
    def texts(self) -> dict[str, str]:
        return {answer.name: answer.text for answer in self.answers}

    @property
    def ttft_ms(self) -> list[float]:
        return [answer.ttft_s * 1e3 for answer in self.answers]


def agreement(one: PassResult, other: PassResult) -> float:
    """The share of requests that were answered with the same text in both passes."""
    return sum(other.texts[name] == text for name, text in one.texts.items()) / len(one.texts)


async def one_at_a_time(url: str, workload: Workload, on_answer: OnAnswer) -> PassResult:
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
