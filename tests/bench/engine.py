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
from .client import complete, open_client
from .demo import check_advised
from .figures import Figures
from .model import ensure_model, vocabulary_size
from .server import Server, ServerPlan
from .workload import Span, Turn

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
    turns = _turns(vocabulary_size(name))
    rates: dict[bool, list[float]] = {False: [], True: []}
    console = Console(stderr=True, quiet=not progress)
    with tempfile.TemporaryDirectory(prefix="kvgraph-engine-") as directory:
        plans = [ServerPlan(name, on, Path(directory), max_num_seqs=CONCURRENCY) for on in _ARMS]
        console.print("two servers start")
        with _started(plans[0]) as stock, _started(plans[1]) as graph:
            for pair in range(pairs):
                # Who goes first changes from pair to pair.
                for server in (stock, graph) if pair % 2 == 0 else (graph, stock):
                    rate = _rate(server, turns, pair)
                    rates[server.plan.graph].append(rate)
                    console.print(f"pair {pair + 1}/{pairs}  {server.plan.arm}: {rate:,.0f} tok/s")
    return _figures(rates)


_ARMS: Final = (False, True)


def _figures(rates: dict[bool, list[float]]) -> Figures:
    figures = Figures("engine")
    ratios = [on / off for off, on in zip(rates[False], rates[True], strict=True)]
    figures.add("throughput_ratio", ratios, "graph / stock", "≥ 0.99")
    figures.add("stock_output_tokens_per_s", rates[False], "tok/s")
    figures.add("graph_output_tokens_per_s", rates[True], "tok/s")
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
