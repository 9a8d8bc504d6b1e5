"""ProtectedKeys on a busy machine: are protected blocks lost while unprotected ones are free?

Some callers say where their system prompts lie, which makes those blocks protected; other processes
keep every core busy, so that rankings come late. The pool holds all that is protected, with what
stands before it in its prompts and is therefore kept too, beside all that runs at once: whatever
protected block is lost, an unprotected one was free. What was lost is read from vLLM's own KV
events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvgraph.graph.types import PROTECTED_LAYERS

from ..recorded.agents_requests import AgentRequest, Layers
from ..serving.cache_ledger import Tally
from ..serving.model import vocabulary_size
from ..serving.progress import DemoProgress
from ..serving.workload import BLOCK
from .agents_arms import BUSY, Room, longest
from .agents_lab import KEPT_BACK
from .agents_pass import AgentPass, side_by_side
from .agents_watch import kept_with, layers_by_block, watched

RUNNING: Final = 2
"""Requests that run at once."""

HEADS: Final = 8
"""Different heads whose callers say where they lie: as many as a small part of the pool holds."""


@dataclass(frozen=True, slots=True)
class BusyRun:
    """What the pool lost.

    Attributes:
        protected: Different blocks that were stated precious.
        kept: They, and those before them in their prompts.
    """

    pool: int
    protected: int
    kept: int
    passed: AgentPass
    tally: Tally


def run_busy(
    room: Room, requests: Sequence[AgentRequest], pace: float, shown: DemoProgress
) -> BusyRun:
    """Serve the fleet side by side while every core is kept busy.

    Args:
        room: Its pool is not used: this part has a size of its own.

    Raises:
        BenchError: The server did not start, a request was refused, or events were unreadable.
    """
    requests = with_few_heads(requests)
    known = layers_by_block(requests, vocabulary_size(room.model))
    protected = sum(layer in PROTECTED_LAYERS for layer in known.values())
    kept = len(kept_with(PROTECTED_LAYERS, requests, known))
    room = replace(room, pool=RUNNING * longest(requests) // BLOCK + kept + KEPT_BACK)
    shown.starting(BUSY.name)
    plan = replace(room.plan(BUSY, BUSY.name), max_num_seqs=RUNNING)
    with watched(plan, known) as (server, ledger), busy_cores():
        shown.passing(BUSY.name, "side by side", len(requests))
        passed = asyncio.run(side_by_side(server.url, requests, BUSY.telling, shown.answered, pace))
        return BusyRun(room.pool, protected, kept, passed, ledger.take())


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A process a core that does nothing but take time."""
    spin = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def with_few_heads(requests: Sequence[AgentRequest]) -> tuple[AgentRequest, ...]:
    """The requests, of which only the first ``HEADS`` different heads are stated."""
    heads: set[tuple[int, ...]] = set()
    kept = []
    for request in requests:
        head = request.prompt[: _head(request.layers)]
        if len(heads) < HEADS:
            heads.add(head)
        kept.append(request if head in heads else replace(request, layers=()))
    return tuple(kept)


def _head(layers: Layers) -> int:
    return max((end for _, _, end in layers), default=0)
