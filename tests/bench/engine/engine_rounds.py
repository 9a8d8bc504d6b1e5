"""Servers that take turns of a few seconds, each with the same requests.

A machine that grows slower or faster meanwhile treats all alike. Whose turn it is not, its sidecar
included, is frozen: stock must not pay for the graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np
from kvgraph.graph.types import SourceLayer
from rich.console import Console

from ..errors import ServerError
from ..serving.completions import complete, open_client
from ..serving.model import vocabulary_size
from ..serving.vllm_server import Server, ServerPlan, check_advised
from ..serving.workload import Span, Turn


class Course:
    """Says how a bench goes on, and ends what it repeats where its time is over.

    Attributes:
        took: Seconds of each part until now, by its name.
    """

    def __init__(
        self, budget_s: float, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.took: dict[str, float] = {}
        self._budget_s = budget_s
        self._console = console
        self._clock = clock
        self._began = clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure and tell how long a part takes; one that fails counts too."""
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self.took[name] = self.took.get(name, 0.0) + now - began
            spent, budget = (each / 60 for each in (now - self._began, self._budget_s))
            self.say(f"{name}: {now - began:.0f} s; {spent:.1f} of {budget:.0f} minutes are over")

    def has_time_for(self, seconds: float, share: float = 1.0) -> bool:
        """Whether what takes so long ends within a share of the budget, from the start on."""
        return self._clock() - self._began + seconds <= share * self._budget_s

    def say(self, line: str) -> None:
        """Tell people something."""
        self._console.print(line, soft_wrap=True)


_CORE: Final = "EngineCore"  # in the name that vLLM gives the process
_OURS: Final = "kvgraph"  # how the names of our threads begin


class EngineThreads:
    """What an engine core computes itself, and what kvgraph does beside it in the same processes.

    The core schedules; on most engines the model runs in processes of its own, whose OpenMP workers
    are not looked at. A sidecar's threads are not either: none of them bears our name.
    """

    def __init__(self, processes: Iterable[int]) -> None:
        self._processes = sorted(processes)
        cores = [pid for pid in self._processes if _CORE in _title(pid)]
        if len(cores) != 1:
            raise ServerError(f"{len(cores)} processes of this server are an engine core, not one")
        self.core = cores[0]

    def cpu_s(self) -> float:
        """CPU seconds so far of the core's main thread and of ours.

        What a thread that ended has used is not in it; ours live as long as the engine.
        """
        return sum(self.by_thread().values())

    def by_thread(self) -> dict[str, float]:
        """The same by the threads' names; the main one's is ``main``."""
        found: dict[str, float] = {}
        for task in self._tasks():
            name = "main" if task.name == str(self.core) else _read(task / "comm").strip()
            if name == "main" or name.startswith(_OURS):
                found[name] = found.get(name, 0.0) + _cpu_s(task)
        return found

    def _tasks(self) -> Iterator[Path]:
        for process in self._processes:
            with contextlib.suppress(OSError):  # a process may end meanwhile
                yield from Path(f"/proc/{process}/task").iterdir()


def _cpu_s(task: Path) -> float:
    """Seconds that a thread was on a CPU: in nanoseconds there, where ``stat`` counts in hundredths
    of a second."""
    words = _read(task / "schedstat").split()
    return int(words[0]) / 1e9 if words else 0.0


def _title(process: int) -> str:
    return _read(Path(f"/proc/{process}/cmdline")).replace("\0", " ")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


REQUESTS: Final = 32
CONCURRENCY: Final = 8
PROMPT_TOKENS: Final = 192
OUTPUT_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one server."""

    tokens: int  # that came back
    wall_s: float  # how long it took
    cpu_s: float  # what the engine core's main thread and ours used meanwhile

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.wall_s

    @property
    def cpu_per_1000(self) -> float:
        """CPU seconds per 1,000 output tokens."""
        return 1000 * self.cpu_s / self.tokens


Rounds = dict[str, list[Round]]  # by arm, the rounds in the order of the pairs


def rounds_in_turns(
    plans: Sequence[ServerPlan],
    pairs: int,
    course: Course,
    share: float = 1.0,
    note: Callable[[str, Round], None] | None = None,
) -> Rounds:
    """Start all servers, and give each one round a pair."""
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
    """Output tokens per second of either server, once a pair, in turns."""
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
