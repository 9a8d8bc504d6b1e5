"""What the client's thread computes beside an engine: events, their frames, and rankings taken in.

It takes the GIL for that, from the engine's thread; the compiled core gives most of it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from kvgraph.graph.wire import frames
from kvgraph.hooks.link.mailbox import HeldRanking
from kvgraph.hooks.settings import PYTHON
from kvgraph.hooks.vllm.core_choice import reason_against

from ..figures import Figures
from ..hotpath import a_ranking, cached_pool, connected
from .scheduler_steps import _core
from .step_figures import APPLY_POOL, BATCHED_TOKENS, BETWEEN_SESSIONS_S, REQUESTS, Clock
from .step_loop import Load, StepLoop, StepSidecar

_LOADS: Final = (Load(8, 8_000), Load(32, 8_000), Load(256, 30_000))
_STEPS: Final = 280
_TICK_S: Final = 0.2  # between two sendings, as the client has it
_RANKED: Final = 8_192
_REPEATS: Final = 25


def add_client(figures: Figures, say: Callable[[str], None]) -> None:
    """Add microseconds a step of the client's thread, and milliseconds that a ranking takes it."""
    compiled = reason_against() is None
    for load in _LOADS:
        say(f"the client's thread beside {load.running} requests")
        for core in ("", PYTHON) if compiled else (PYTHON,):
            name = f"client_us_per_step_{load.running}{f'_{core}' * (bool(core) and compiled)}"
            figures.add(name, measure_client(load, core), "us")
    say("a ranking of 8,192 keys taken in, in a pool of 100,000")
    figures.add("take_ranking_ms", measure_taking(compiled), "ms", "≤ 0.3")
    if compiled:
        figures.add("take_ranking_ms_python", measure_taking(compiled=False), "ms")


def measure_client(load: Load, core: str, steps: int = _STEPS) -> list[float]:
    """Microseconds a step of this thread that events and their frames take, one sample a tick."""
    clock = Clock()
    with _core(core):
        loop = StepLoop(load, lambda pool: connected(pool, None, clock, BATCHED_TOKENS, REQUESTS))
    sidecar = StepSidecar(loop.connector.side, clock)
    outbox = loop.connector.side.client.outbox
    took: list[float] = []
    take = outbox.take_all

    def timed() -> Any:
        began = time.thread_time()
        events = take()
        frames.encode_events(0, events)
        took.append(time.thread_time() - began)
        return events

    def settled() -> None:
        clock.now += BETWEEN_SESSIONS_S
        sidecar.hear()

    loop.fill(settled)
    outbox.take_all = timed
    every = max(1, round(_TICK_S / load.step_s))
    for number in range(1, steps + 1):
        loop.prepare()
        loop.step()
        clock.now += load.step_s
        if number % every == 0:
            sidecar.hear()
    return [seconds / every * 1e6 for seconds in took]


def measure_taking(compiled: bool) -> list[float]:
    """Milliseconds of the client's thread from a ranking to the blocks that it names."""
    _, keys, index = cached_pool(APPLY_POOL, compiled=compiled)
    shuffled, took = np.random.default_rng(1), []
    for epoch in range(1, _REPEATS + 1):
        order = shuffled.permutation(keys)[:_RANKED]
        ranking = a_ranking(order[256:], epoch, protected=order[:256])
        began = time.thread_time()
        HeldRanking.of(ranking, index.holders, copies=False)
        took.append((time.thread_time() - began) * 1e3)
    return took
