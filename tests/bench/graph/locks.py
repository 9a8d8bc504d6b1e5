"""How long one thing that an engine tells keeps everybody else waiting for the graph's lock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestStarted,
)

from .graphs import BLOCK_SIZE, ENGINE, add_random_edges, build_graph, random_keys

_BLOCKS, _SESSIONS, _COPIES, _LINKS = 1_000_000, 100_000, 260_000, 500_000
_SHORT = BLOCK_SIZE // 2  # tokens
_BATCH = 8_192  # blocks that an engine stores and evicts between two batches
_LATER_S = 100.0  # after which links fade
_CHURN = 80  # of those batches: until ghosts were released, and tables grew and were rebuilt


def add_sessions(graph: KVCacheGraph, count: int) -> None:
    """Sessions that had one turn each, too short for a block."""
    turns: list[AnyEvent] = []
    for number in range(count):
        name = f"short-{number}"
        turns.append(RequestStarted(name, b"", _SHORT, 0, BLOCK_SIZE, name))
        turns.append(RequestFinished(name, b"", _SHORT, _SHORT, "stop", name))
    graph.apply(ENGINE, turns)


def lock_seconds() -> dict[str, float]:
    """The longest time for which each of these holds the lock, in a graph of production size.

    Work that is done in slices holds it for one slice at a time.
    """
    rng = np.random.default_rng(4)
    graph = build_graph(_BLOCKS, 0)
    add_random_edges(graph, _LINKS, rng)
    add_sessions(graph, _SESSIONS)
    packed = graph.tables.blocks.keys[: graph.tables.blocks.size].astype("<u8").tobytes()
    hello = EngineHello(ENGINE, "synthetic", BLOCK_SIZE, _BLOCKS, "bench")
    copies = BlocksSpilled(packed[: 8 * _COPIES], int(Tier.WARM), 1)
    found = {
        "copies": _longest(graph, [copies]),
        "a resync": _longest(graph, [hello, BlocksResident(packed), copies]),
        "batches under pressure": max(
            _longest(graph, batch) for batch in _pressure(rng, packed, _CHURN)
        ),
    }
    graph.clock = lambda: time.monotonic() + _LATER_S
    found["links fading"] = _longest(graph, [Pressure(_BLOCKS, 0, _BLOCKS, 0, 0)])
    first = random_keys(rng, _BLOCKS // 2).astype("<u8").tobytes()
    found["another's first list"] = _longest(graph, [BlocksResident(first)], "another")
    found["an engine gone"] = _longest_slice(graph.forgetting(ENGINE))
    found["its ghosts released"] = max(
        _longest(graph, [BlocksStored(random_keys(rng, _BATCH).tobytes(), None, BLOCK_SIZE)])
        for _ in range(_CHURN // 2)
    )
    return found


def _pressure(rng: np.random.Generator, packed: bytes, count: int) -> Iterator[list[AnyEvent]]:
    """Batches that store as many new blocks as they evict."""
    size = 8 * _BATCH
    for start in range(0, count * size, size):
        fresh = random_keys(rng, _BATCH).astype("<u8").tobytes()
        yield [BlocksStored(fresh, None, BLOCK_SIZE), BlocksRemoved(packed[start : start + size])]


def _longest(graph: KVCacheGraph, events: list[AnyEvent], engine: str = ENGINE) -> float:
    """Seconds that the longest slice takes."""
    return _longest_slice(graph.slices(engine, events))


def _longest_slice(slices: Iterator[None]) -> float:
    longest, more = 0.0, True
    while more:
        started = time.perf_counter()
        more = next(slices, False) is not False
        longest = max(longest, time.perf_counter() - started)
    return longest
