"""What the records cost: the engine's step, the sidecar's ingest of it, and memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.evictions import TermsAtRanking
from kvgraph.graph.logs.history import History
from kvgraph.graph.ranking.order import front_terms
from kvgraph.graph.ranking.policy import View
from kvgraph.graph.tables.tables import GraphLimits, Tables
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)
from kvgraph.graph.wire.frames import encode_events

from ..figures import Figures

SIZE: Final = 16
RUNNING: Final = 32
PROMPT: Final = 64  # blocks of each of them: a thousand tokens
POOL: Final = 8_192
GHOSTS: Final = 65_536  # remembered blocks: the graph's default


class _Silent(History):
    """Remembers nothing: what ingest costs without logs."""

    def evicted(self, *said: Any) -> None:
        """Nothing."""

    def started(self, *said: Any) -> None:
        """Nothing."""

    def finished(self, *said: Any) -> None:
        """Nothing."""


def run(figures: Figures, quick: bool) -> None:
    rounds, turns = (20, 20) if quick else (200, 300)
    figures.add("logs_us_per_step", _engine_costs(RUNNING, PROMPT, rounds), "µs", "≤ 5")
    figures.add("logs_sidecar_us_per_step", _ingest_costs(RUNNING, 1, turns), "µs")
    graph = _churned(2 * GHOSTS)
    history, blocks = graph.tables.history, len(graph.tables.blocks)
    figures.add("logs_bytes_per_block", history.nbytes / blocks, "B", "≤ 24")


def _engine_costs(requests: int, blocks: int, rounds: int) -> list[float]:
    """µs: what the logs add to a step in which all of so many requests start: a number in each
    event. Other steps carry nothing for the logs, which read the events that were there already.
    """
    hashes = _keys(0, blocks)
    bare = _timed(lambda: _start(requests, hashes), rounds)
    full = _timed(lambda: _start(requests, hashes, SIZE), rounds)
    return [1e6 * (b - a) for a, b in zip(bare, full, strict=True)]


def _start(requests: int, hashes: bytes, loading: int = 0) -> None:
    events: list[AnyEvent] = [
        RequestStarted("r", hashes, 2 * len(hashes), 0, SIZE, "s", loading_tokens=loading)
        for _ in range(requests)
    ]
    encode_events(1, events)


def _timed(function: Callable[[], None], rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        took = []
        for _ in range(15):
            start = time.perf_counter()
            function()
            took.append(time.perf_counter() - start)
        found.append(min(took))
    return found


def _ingest_costs(requests: int, blocks: int, turns: int) -> list[float]:
    """µs of a step in which so many requests start, as many end, and as many blocks leave as come:
    what logs add to it; two graphs are told each step in turn.
    """
    now = [0.0]
    graphs = [_graph(now, kind) for kind in (History, _Silent)]
    added = []
    steps = itertools.islice(_steps(requests, blocks), 2 * POOL // (requests * blocks) + turns)
    for number, step in enumerate(steps):
        now[0] += 0.05
        took = []
        for graph in graphs if number % 2 else graphs[::-1]:
            start = time.thread_time()
            graph.apply("e", step)
            took.append(time.thread_time() - start)
        full, without = took if number % 2 else took[::-1]
        added.append(1e6 * (full - without))
    return added[-turns:]


def _graph(now: list[float], history: Callable[[Tables], History] = History) -> KVCacheGraph:
    graph = KVCacheGraph(limits=GraphLimits(max_ghosts=GHOSTS), clock=lambda: now[0])
    graph.apply("e", [EngineHello("e", "m", SIZE, POOL, "v")])
    graph.tables.history = history(graph.tables)
    return graph


def _steps(requests: int, blocks: int) -> Iterator[list[AnyEvent]]:
    """Steps without end, of an engine whose pool is full from some time on."""
    return (_step(number, requests, blocks) for number in itertools.count())


def _step(number: int, requests: int, blocks: int) -> list[AnyEvent]:
    told: list[AnyEvent] = []
    each = requests * blocks
    for request in range(requests):
        name, keys = f"{number}-{request}", _keys(number * each + request * blocks, blocks)
        told.append(RequestStarted(name, keys, SIZE * blocks + 1, 0, SIZE, f"s{request}"))
    told.append(BlocksStored(_keys(number * each, each), None, SIZE))
    gone = number * each - POOL
    if gone >= 0:
        told.append(BlocksRemoved(_keys(gone, each)))
    for request in range(requests if number else 0):
        keys = _keys((number - 1) * each + request * blocks, blocks)
        tokens = SIZE * blocks + 1
        name = f"{number - 1}-{request}"
        told.append(RequestFinished(name, keys, tokens, tokens, "stop", f"s{request}"))
    return told


def _churned(evictions: int) -> KVCacheGraph:
    """A graph whose pool turned over many times."""
    now = [0.0]
    graph, blocks = _graph(now), 16
    for step in itertools.islice(_steps(RUNNING, blocks), (evictions + POOL) // (RUNNING * blocks)):
        now[0] += 0.5
        graph.apply("e", step)
        _rank(graph)
    return graph


def _rank(graph: KVCacheGraph) -> None:
    ranking, view = graph.rank("e", POOL), View(graph.tables, graph.rules, 0, graph.clock())
    terms = TermsAtRanking.of(front_terms(view, graph.policy, graph.referee, ranking))
    graph.tables.history.ranked(0, ranking, graph.rules.protected_layers, terms)


def _keys(first: int, count: int) -> bytes:
    # Spread out as real hashes are.
    numbers = np.arange(first + 1, first + 1 + count, dtype=np.uint64)
    return (numbers * np.uint64(0x9E3779B97F4A7C15)).astype("<u8").tobytes()
