"""How long one thing that an engine tells keeps everybody else waiting for the graph's lock."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.events import (
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)
from ...graph.types import Tier
from .graphs import BLOCK_SIZE, ENGINE, build_graph, random_keys

_BLOCKS, _SESSIONS, _COPIES = 1_000_000, 100_000, 260_000
_BATCH = 8_192  # blocks that an engine stores and evicts between two batches


def add_sessions(graph: KVCacheGraph, count: int, rng: np.random.Generator) -> None:
    """Sessions that had one turn each, of one block that none other walks."""
    keys = random_keys(rng, count)
    for start in range(0, count, 4096):
        turns = []
        for number, key in enumerate(keys[start : start + 4096], start):
            name, packed = f"one-{number}", key.astype("<u8").tobytes()
            turns += [
                RequestStarted(name, packed, BLOCK_SIZE, 0, BLOCK_SIZE, name),
                RequestFinished(name, packed, BLOCK_SIZE, BLOCK_SIZE, "stop", name),
            ]
        graph.apply(ENGINE, turns)


def lock_seconds() -> dict[str, float]:
    """Seconds for which each of these holds the lock, in a graph of production size."""
    rng = np.random.default_rng(4)
    graph = build_graph(_BLOCKS, 0)
    add_sessions(graph, _SESSIONS, rng)
    keys = graph.tables.blocks.keys[: graph.tables.blocks.size].copy()
    packed = keys.astype("<u8").tobytes()
    graph.apply(ENGINE, [BlocksSpilled(packed[: 8 * _COPIES], int(Tier.WARM), 1)])
    fresh = random_keys(rng, _BATCH).astype("<u8").tobytes()
    gone = packed[-8 * _BATCH :]
    hello = EngineHello(ENGINE, "synthetic", BLOCK_SIZE, _BLOCKS, "bench")
    churn = [BlocksStored(fresh, None, BLOCK_SIZE), BlocksRemoved(gone)]
    return {
        "a batch under pressure": _seconds(lambda: graph.apply(ENGINE, churn)),
        "a resync": _seconds(lambda: graph.apply(ENGINE, [hello, BlocksResident(packed)])),
        "ghosts released": _seconds(lambda: graph.apply(ENGINE, [BlocksRemoved(packed)])),
        "an engine gone": _seconds(lambda: graph.forget_engine(ENGINE)),
    }


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
