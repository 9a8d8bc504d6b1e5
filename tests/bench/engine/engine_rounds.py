"""Servers that take turns of a few seconds, each with the same requests.

A machine that grows slower or faster meanwhile treats all alike. Whose turn it is not, its sidecar
included, is frozen: stock must not pay for the graph.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from ..errors import ServerError
from ..serving.completions import forced, open_client, send
from ..serving.model import vocabulary_size
from ..serving.vllm_server import Server, ServerPlan

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
        """CPU seconds so far of the core's main thread and of ours, but for threads that ended."""
        found = 0.0
        for task in self._tasks():
            if task.name == str(self.core) or _read(task / "comm").startswith(_OURS):
                found += _cpu_s(task)
        return found

    def _tasks(self) -> Iterator[Path]:
        for process in self._processes:
            with contextlib.suppress(OSError):  # a process may end meanwhile
                yield from Path(f"/proc/{process}/task").iterdir()


def _cpu_s(task: Path) -> float:
    """Seconds that a thread was on a CPU, in nanoseconds, where ``stat`` has hundredths."""
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
_SEGMENT: Final = {"layer": "user_turn", "start": 0, "end": PROMPT_TOKENS}
OUTPUT_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class Round:
    tokens: int  # that came back
    wall_s: float  # how long it took
    cpu_s: float  # what the engine core's main thread and ours used meanwhile

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_per_1000(self) -> float:
        return 1000 * self.cpu_s / self.tokens


Say = Callable[[str], None]
Rounds = dict[str, list[Round]]  # by arm, the rounds in the order of the pairs


def rounds_in_turns(
    plans: Sequence[ServerPlan],
    pairs: int,
    say: Say,
    note: Callable[[str, Round], None] = lambda arm, done: None,
) -> Rounds:
    turns = _turns(vocabulary_size(plans[0].model))
    rounds: Rounds = {plan.arm: [] for plan in plans}
    with contextlib.ExitStack() as stack:
        say(f"{len(plans)} servers start")
        servers = [stack.enter_context(_started(plan)) for plan in plans]
        for pair in range(pairs):
            for server in _in_order(servers, pair):
                done = _round(server, turns, pair)
                rounds[server.plan.arm].append(done)
                say(_told(pair, pairs, server.plan.arm, done))
                note(server.plan.arm, done)
    return rounds


def _in_order(servers: Sequence[Server], pair: int) -> Sequence[Server]:
    first = pair % len(servers)
    return (*servers[first:], *servers[:first])


def _told(pair: int, pairs: int, arm: str, done: Round) -> str:
    measured = f"{done.rate:,.0f} tok/s, {done.cpu_per_1000:.3f} CPU s per 1,000 tokens"
    return f"pair {pair + 1}/{pairs}  {arm}: {measured}"


@contextlib.contextmanager
def _started(plan: ServerPlan) -> Iterator[Server]:
    """A running server, frozen until its turn comes."""
    with Server(plan) as server:
        server.freeze()
        yield server


def _round(server: Server, turns: list[list[int]], pair: int) -> Round:
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


async def _send_all(url: str, turns: list[list[int]], run: str) -> int:
    """Send every request once, ``CONCURRENCY`` at a time; the output tokens that came back."""
    slots = asyncio.Semaphore(CONCURRENCY)
    async with open_client(url) as client:

        async def one(number: int, prompt: list[int]) -> int:
            session = f"{run}:caller-{number}"
            said = {"session": session, "segments": [_SEGMENT]}
            body = {**forced(prompt, OUTPUT_TOKENS), "cache_salt": run, "session_id": session,
                    "kv_transfer_params": {"kvgraph": said}}  # fmt: skip
            async with slots:
                return (await send(client, f"caller-{number}", body)).output_tokens

        return sum(await asyncio.gather(*(one(*each) for each in enumerate(turns))))


def _turns(vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    shape = (REQUESTS, PROMPT_TOKENS)
    prompts: list[list[int]] = random.integers(vocabulary // 8, vocabulary * 7 // 8, shape).tolist()
    return prompts
