"""Requests in flight while something is killed: which answers had begun, and what came of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import httpx

from ..errors import BenchError

LEAST: Final = 20  # requests in flight at a kill
_BEGUN: Final = 2  # answers that have begun by then; chosen: one may just be ending
_PATIENCE_S: Final = 120.0
_ERROR: Final = 'data: {"error"'
"""How vLLM ends a stream of which it computes no more; it says ``[DONE]`` all the same."""
_SHOWN: Final = 200  # characters of an answer that says why there is none; chosen


class Fate(StrEnum):
    WHOLE = "whole"
    CUT = "cut"  # its answer had begun
    FAILED = "failed"  # it had not


@dataclass(slots=True)
class Asked:
    """A request's answer, how often it was asked ``again`` elsewhere, and tokens found."""

    began: bool = False
    again: int = 0
    found: int = 0
    fate: Fate | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class WaveEnd:
    """A wave: requests ``in_flight`` at the kill, and of these those ``begun`` to be answered."""

    in_flight: int
    begun: int
    asked: tuple[Asked, ...]

    def count(self, fate: Fate) -> int:
        return sum(each.fate is fate for each in self.asked)

    def facts(self) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "begun": self.begun,
            **{fate.value: self.count(fate) for fate in Fate},
            "asked_again": sum(each.again for each in self.asked),
            "found": sum(each.found for each in self.asked),
            "why": sorted({each.why for each in self.asked if each.why}),
        }


class KillWave:
    """Sends requests at once.

    Args:
        urls: Where a request goes; to the next one only where a connection broke before a byte of
            its answer, as clients of OpenAI's ask again.
        bodies: Of requests that ask for a stream.
    """

    def __init__(self, urls: Sequence[str], bodies: Sequence[dict[str, Any]]) -> None:
        self._urls, self._bodies = urls, bodies
        self._asked = [Asked() for _ in bodies]

    async def play(self, kill: Callable[[], Awaitable[None]]) -> WaveEnd:
        """Send all, ``kill`` once some have begun; raises BenchError if so many never had."""
        timeout = httpx.Timeout(_PATIENCE_S, connect=5.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            running = [
                asyncio.create_task(self._ask(client, body, asked))
                for body, asked in zip(self._bodies, self._asked, strict=True)
            ]
            while sum(each.began for each in self._asked) < _BEGUN:
                if all(each.done() for each in running):
                    break  # nobody was answered
                await asyncio.sleep(0.005)
            in_flight = [each for each in self._asked if each.fate is None]
            begun = sum(each.began for each in in_flight)
            await kill()
            await asyncio.gather(*running)
        if len(in_flight) < LEAST:
            why = "; ".join(sorted({each.why for each in self._asked if each.why}))
            raise BenchError(f"only {len(in_flight)} requests were in flight at the kill: {why}")
        return WaveEnd(len(in_flight), begun, tuple(self._asked))

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any], asked: Asked) -> None:
        for number, url in enumerate(self._urls):
            asked.again = number
            try:
                whole = await _stream(client, url, body, asked)
            except httpx.TransportError as error:
                asked.why = type(error).__name__
                if asked.began:
                    break
                continue
            if whole:
                asked.fate, asked.why = Fate.WHOLE, ""
                return
            break
        asked.fate = Fate.CUT if asked.began else Fate.FAILED


async def _stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], asked: Asked) -> bool:
    """Whether an answer came to its end."""
    ended = False
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            said = (await answer.aread())[:_SHOWN].decode(errors="replace")
            asked.why = f"HTTP {answer.status_code}: {said}"
            return False
        async for line in answer.aiter_lines():
            if line.startswith(_ERROR):
                asked.why = line[:_SHOWN]
                return False
            asked.began = asked.began or bool(line)
            ended = ended or line == "data: [DONE]"
            if '"usage":{' in line.replace(" ", ""):
                usage = json.loads(line.removeprefix("data: "))["usage"]
                asked.found = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return ended
