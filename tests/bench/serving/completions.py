"""One completion against a server, streamed and timed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ..errors import CompletionError
from .workload import Turn


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
    """Send ``turn`` at temperature 0 and read its stream."""
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
    body = {**_forced(turn.token_ids, turn.max_tokens), "cache_salt": run}
    if params := turn.kv_transfer_params():
        params["kvgraph"]["session"] = f"{run}:{turn.session}"
        body["kv_transfer_params"] = params
        body["session_id"] = f"{run}:{turn.session}"
    return body


def plain_body(session: str, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    """The JSON of a request that names its session and says nothing else."""
    return {**_forced(prompt, tokens), "session_id": session}


def _forced(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
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
