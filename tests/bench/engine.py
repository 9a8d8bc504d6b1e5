"""What the graph costs an engine that needs no help: throughput without memory pressure.

Two servers, with and without the graph, take turns of a few seconds, so that a machine that grows
slower or faster meanwhile treats both alike; a figure is the ratio within a pair. Whose turn it is
not, its sidecar included, is frozen: stock must not pay for the graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np
from rich.console import Console

from ..graph.types import SourceLayer
from .figures import Figures
from .serving.completions import complete, open_client
from .serving.model import ensure_model, vocabulary_size
from .serving.vllm_server import Server, ServerPlan, check_advised
from .serving.workload import Span, Turn

REQUESTS: Final = 32
CONCURRENCY: Final = 8
PROMPT_TOKENS: Final = 192
OUTPUT_TOKENS: Final = 96


def run(progress: bool = True, pairs: int = 10, model: str | None = None) -> Figures:
    """Measure ``pairs`` pairs of rounds; a round sends every request once.

    Figures: ``throughput_ratio`` (graph / stock, output tokens per second), and either arm's rate.

    Raises:
        BenchError: A server did not start, or refused a request.
    """
    name = model or str(ensure_model())
    with tempfile.TemporaryDirectory(prefix="kvgraph-engine-") as directory:
        stock, graph = (
            ServerPlan(name, on, Path(directory), max_num_seqs=CONCURRENCY) for on in (False, True)
        )
        console = Console(stderr=True, quiet=not progress)
        return _figures(*throughput_pairs(stock, graph, pairs, console))


def throughput_pairs(
    stock: ServerPlan, graph: ServerPlan, pairs: int, console: Console
) -> tuple[list[float], list[float]]:
    """Output tokens per second of either server, once a pair, in turns.

    Raises:
        BenchError: A server did not start, or refused a request.
    """
    turns = _turns(vocabulary_size(stock.model))
    rates: dict[str, list[float]] = {stock.arm: [], graph.arm: []}
    console.print("two servers start")
    with _started(stock) as one, _started(graph) as other:
        for pair in range(pairs):
            # Who goes first changes from pair to pair.
            for server in (one, other) if pair % 2 == 0 else (other, one):
                rate = _rate(server, turns, pair)
                rates[server.plan.arm].append(rate)
                console.print(f"pair {pair + 1}/{pairs}  {server.plan.arm}: {rate:,.0f} tok/s")
    return rates[stock.arm], rates[graph.arm]


def _figures(stock: list[float], graph: list[float]) -> Figures:
    figures = Figures("engine")
    ratios = [on / off for off, on in zip(stock, graph, strict=True)]
    figures.add("throughput_ratio", ratios, "graph / stock", "≥ 0.99")
    figures.add("stock_output_tokens_per_s", stock, "tok/s")
    figures.add("graph_output_tokens_per_s", graph, "tok/s")
    return figures


@contextlib.contextmanager
def _started(plan: ServerPlan) -> Iterator[Server]:
    """A running server, frozen until its turn comes."""
    with Server(plan) as server:
        if plan.graph:
            check_advised(server)
        server.freeze()
        yield server


def _rate(server: Server, turns: list[Turn], pair: int) -> float:
    """Output tokens per second of one round, while the other server is frozen."""
    server.thaw()
    try:
        # A first few requests: caches warm, and the sidecar has its engine back.
        asyncio.run(_round(server.url, turns[:CONCURRENCY], f"warm-up-{pair}"))
        began = perf_counter()
        tokens = asyncio.run(_round(server.url, turns, f"round-{pair}"))
        return tokens / (perf_counter() - began)
    finally:
        server.freeze()


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
