"""What the graph costs an engine that needs no help: throughput without memory pressure.

Servers with and without the graph take turns, so that a machine that grows slower or faster in
the meantime treats both alike; a figure is the ratio within a pair.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np
from rich.console import Console

from ..graph.types import SourceLayer
from .client import complete, open_client
from .demo import check_advised
from .figures import Figures
from .model import ensure_model, vocabulary_size
from .server import Server, ServerPlan
from .workload import Span, Turn

REQUESTS: Final = 48
CONCURRENCY: Final = 8
PROMPT_TOKENS: Final = 192
OUTPUT_TOKENS: Final = 96
ROUNDS: Final = 3
"""Measured rounds a server, after one to warm up; a round sends every request once."""


def run(progress: bool = True, pairs: int = 5, model: str | None = None) -> Figures:
    """Measure ``pairs`` pairs of servers.

    Figures: ``throughput_ratio`` (graph / stock, output tokens per second), and either arm's rate.

    Raises:
        BenchError: A server did not start, or refused a request.
    """
    name = model or str(ensure_model())
    turns = _turns(vocabulary_size(name))
    console = Console(stderr=True, quiet=not progress)
    rates: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="kvgraph-engine-") as directory:
        for pair in range(pairs):
            # Who goes first changes from pair to pair.
            for graph in (False, True) if pair % 2 == 0 else (True, False):
                plan = ServerPlan(name, graph, Path(directory), max_num_seqs=CONCURRENCY)
                rates[graph].append(_rate(plan, turns))
                console.print(f"pair {pair + 1}/{pairs} {plan.arm}: {rates[graph][-1]:,.0f} tok/s")
    return _figures(rates)


def _figures(rates: dict[bool, list[float]]) -> Figures:
    figures = Figures("engine")
    ratios = [on / off for off, on in zip(rates[False], rates[True], strict=True)]
    figures.add("throughput_ratio", ratios, "graph / stock", "≥ 0.99")
    figures.add("stock_output_tokens_per_s", rates[False], "tok/s")
    figures.add("graph_output_tokens_per_s", rates[True], "tok/s")
    return figures


def _rate(plan: ServerPlan, turns: list[Turn]) -> float:
    """Output tokens per second of one fresh server: the median of its rounds."""
    with Server(plan) as server:
        if plan.graph:
            check_advised(server)
        asyncio.run(_round(server.url, turns, "warm-up"))
        return float(np.median([_timed(server.url, turns, f"round-{i}") for i in range(ROUNDS)]))


def _timed(url: str, turns: list[Turn], run: str) -> float:
    began = perf_counter()
    tokens = asyncio.run(_round(url, turns, run))
    return tokens / (perf_counter() - began)


async def _round(url: str, turns: list[Turn], run: str) -> int:
    """Send every request once, ``CONCURRENCY`` at a time; the output tokens that came back."""
    slots = asyncio.Semaphore(CONCURRENCY)
    async with open_client(url) as client:

        async def send(turn: Turn) -> int:
            async with slots:
                return (await complete(client, turn, run)).output_tokens

        return sum(await asyncio.gather(*map(send, turns)))


def _turns(vocabulary: int) -> list[Turn]:
    random = np.random.default_rng(3)
    turns = []
    for i in range(REQUESTS):
        ids = random.integers(vocabulary // 8, vocabulary * 7 // 8, PROMPT_TOKENS)
        span = Span(SourceLayer.USER_TURN, tuple(int(token) for token in ids))
        turns.append(Turn(f"caller-{i}", 0, (span,), OUTPUT_TOKENS, 0.0, {}))
    return turns
