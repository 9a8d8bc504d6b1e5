"""Which functions a busy engine's main thread spends its own time in, and how far down ours are."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import numpy as np
from kvgraph.graph.types import SourceLayer

from ..errors import ServerError
from ..serving.completions import complete, open_client
from ..serving.model import vocabulary_size
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import Span, Turn
from .profiled_executor import OWN_TIMES, is_ours

RUNNING: Final = 256
# All chosen.
POOL: Final = 6000  # blocks: about what the callers' longest prompts need at once
MAX_MODEL_LEN: Final = 1024
_BEGINS: Final = 160  # tokens of a caller's first prompt
_GROWS: Final = 96  # with each turn
_TURNS: Final = 7  # of a caller's session; then another begins
_ANSWER: Final = 64  # tokens
_FIRST_TOKEN: Final = 9  # below are special ones
_PROFILED: Final = "kvgraph_bench.engine.profiled_executor.ProfiledExecutor"


class FunctionShare(NamedTuple):
    """A function's share of the main thread's CPU time, spent in itself.

    Attributes:
        ours: Whether it is a function of kvgraph's.
    """

    function: str
    share: float
    ours: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """The functions, the longest first.

    Attributes:
        called_share: Of the time, what our functions take, and whatever these call.
    """

    rows: tuple[FunctionShare, ...]
    called_share: float

    @property
    def first_of_ours(self) -> int:
        """The line, from 1, of our first function."""
        ours = (line for line, row in enumerate(self.rows, 1) if row.ours)
        return next(ours, len(self.rows) + 1)

    def lines(self, count: int = 20) -> list[str]:
        """The first lines, and our first, for people."""
        shown = dict.fromkeys([*range(min(count, len(self.rows))), self.first_of_ours - 1])
        return [
            f"{at + 1:4d}  {self.rows[at].share:6.2%}  {self.rows[at].function}"
            for at in shown
            if at < len(self.rows)
        ]


def profiled(plan: ServerPlan, seconds: float) -> Profile:
    """Keep a server busy with ``RUNNING`` callers for so many seconds."""
    kept = plan.directory / f"{plan.arm}.own_times.json"
    # Server and callers are late under this load: no connection may be closed just as a caller
    # takes it up again.
    settings = (*plan.settings, (OWN_TIMES, str(kept)), ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "60"))
    options = (*plan.options, "--distributed-executor-backend", _PROFILED)
    plan = replace(plan, blocks=POOL, max_model_len=MAX_MODEL_LEN, max_num_seqs=RUNNING,
                   settings=settings, options=options)  # fmt: skip
    with Server(plan) as server:
        check_advised(server)
        asyncio.run(_keep_busy(server.url, vocabulary_size(plan.model), seconds))
    return read_profile(kept)


def read_profile(kept: Path) -> Profile:
    """What an engine core kept."""
    try:
        found = json.loads(kept.read_text())
    except FileNotFoundError:
        raise ServerError("the engine core was not busy for long enough to be profiled") from None
    total = sum(seconds for *_, seconds in found)
    shares: Counter[tuple[str, str]] = Counter()
    called_share = 0.0
    for module, function, called, seconds in found:
        shares[module, function] += seconds / total
        called_share += called * seconds / total
    rows = (
        FunctionShare(f"{module}.{function}", share, is_ours(module))
        for (module, function), share in shares.most_common()
    )
    return Profile(tuple(rows), called_share)


async def _keep_busy(url: str, vocabulary: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    async with open_client(url) as client:
        await asyncio.gather(
            *(_caller(client, number, vocabulary, until) for number in range(RUNNING))
        )


async def _caller(client: httpx.AsyncClient, number: int, vocabulary: int, until: float) -> None:
    random, sent = np.random.default_rng(number), 0
    prompt: list[int] = []
    while time.monotonic() < until:
        session, turn = divmod(sent, _TURNS)
        more = _GROWS if turn else _BEGINS
        prompt = (prompt if turn else []) + random.integers(_FIRST_TOKEN, vocabulary, more).tolist()
        span = Span(SourceLayer.USER_TURN, tuple(prompt))
        await complete(
            client, Turn(f"caller-{number}-{session}", turn, (span,), _ANSWER, 0.0, None), "busy"
        )
        sent += 1
