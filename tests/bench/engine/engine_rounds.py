"""Servers that take turns of a few seconds, each with the same requests.

A machine that grows slower or faster meanwhile treats all alike. Whose turn it is not, its sidecar
included, is frozen: stock must not pay for the graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import numpy as np
from kvgraph.graph.types import SourceLayer
from rich.console import Console

from ..serving.completions import complete, open_client
from ..serving.model import vocabulary_size
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import Span, Turn
from .engine_course import Course
from .engine_threads import EngineThreads

REQUESTS: Final = 32
CONCURRENCY: Final = 8
PROMPT_TOKENS: Final = 192
OUTPUT_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one server.

    Attributes:
        tokens: That came back.
        wall_s: How long it took.
        cpu_s: What the engine core's main thread and ours used meanwhile.
    """

    tokens: int
    wall_s: float
    cpu_s: float

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.wall_s

    @property
    def cpu_per_1000(self) -> float:
        """CPU seconds per 1,000 output tokens."""
        return 1000 * self.cpu_s / self.tokens


Rounds = dict[str, list[Round]]
"""By arm, the rounds in the order of the pairs."""


def rounds_in_turns(
    plans: Sequence[ServerPlan],
    pairs: int,
    course: Course,
    share: float = 1.0,
    note: Callable[[str, Round], None] | None = None,
) -> Rounds:
    """Start all servers, and give each one round a pair.

    Args:
        pairs: Rounds of each, if there is time for so many; the first pair is always made.
        share: Of the course's time that may be over in the end.
        note: Told of each round at once: what was measured counts, whatever comes after it.

    Raises:
        BenchError: A server did not start, or refused a request.
    """
    turns = _turns(vocabulary_size(plans[0].model))
    rounds: Rounds = {plan.arm: [] for plan in plans}
    with contextlib.ExitStack() as stack:
        with course.part(f"{len(plans)} servers start"):
            servers = [stack.enter_context(_started(plan)) for plan in plans]
        for pair in range(pairs):
            began = perf_counter()
            with course.part("rounds"):
                for server in _in_order(servers, pair):
                    done = _round(server, turns, pair)
                    rounds[server.plan.arm].append(done)
                    course.say(_told(pair, pairs, server.plan.arm, done))
                    if note is not None:
                        note(server.plan.arm, done)
            if pair + 1 < pairs and not course.has_time_for(perf_counter() - began, share):
                course.say(f"no time for more than {pair + 1} of {pairs} pairs")
                break
    return rounds


def _in_order(servers: Sequence[Server], pair: int) -> Sequence[Server]:
    """Who goes first changes from pair to pair."""
    first = pair % len(servers)
    return (*servers[first:], *servers[:first])


def _told(pair: int, pairs: int, arm: str, done: Round) -> str:
    measured = f"{done.rate:,.0f} tok/s, {done.cpu_per_1000:.3f} CPU s per 1,000 tokens"
    return f"pair {pair + 1}/{pairs}  {arm}: {measured}"


def throughput_pairs(
    stock: ServerPlan, other: ServerPlan, pairs: int, console: Console
) -> tuple[list[float], list[float]]:
    """Output tokens per second of either server, once a pair, in turns.

    Raises:
        BenchError: A server did not start, or refused a request.
    """
    rounds = rounds_in_turns([stock, other], pairs, Course(math.inf, console))
    one, two = ([each.rate for each in rounds[plan.arm]] for plan in (stock, other))
    return one, two


@contextlib.contextmanager
def _started(plan: ServerPlan) -> Iterator[Server]:
    """A running server, frozen until its turn comes."""
    with Server(plan) as server:
        if plan.graph:
            check_advised(server)
        server.freeze()
        yield server


def _round(server: Server, turns: list[Turn], pair: int) -> Round:
    """One round, while the other servers are frozen."""
    server.thaw()
    try:
        threads = EngineThreads(server.process_ids())
        # A first few requests: caches warm, and the sidecar has its engine back.
        asyncio.run(_send_all(server.url, turns[:CONCURRENCY], f"warm-up-{pair}"))
        began, used = perf_counter(), threads.cpu_s()
        tokens = asyncio.run(_send_all(server.url, turns, f"round-{pair}"))
        return Round(tokens, perf_counter() - began, threads.cpu_s() - used)
    finally:
        server.freeze()


async def _send_all(url: str, turns: list[Turn], run: str) -> int:
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
