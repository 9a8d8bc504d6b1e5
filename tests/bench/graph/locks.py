"""How long one thing that an engine tells keeps everybody else waiting for the graph's lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ...graph.kvcache_graph import KVCacheGraph
from ...graph.messages.events import (
    AnyEvent,
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
_SHORT = BLOCK_SIZE // 2  # tokens
_BATCH = 8_192  # blocks that an engine stores and evicts between two batches


def add_sessions(graph: KVCacheGraph, count: int) -> None:
    """Sessions that had one turn each, too short for a block."""
    turns: list[AnyEvent] = []
    for number in range(count):
        name = f"short-{number}"
        turns.append(RequestStarted(name, b"", _SHORT, 0, BLOCK_SIZE, name))
        turns.append(RequestFinished(name, b"", _SHORT, _SHORT, "stop", name))
    graph.apply(ENGINE, turns)


def lock_seconds() -> dict[str, float]:
    """Seconds for which each of these holds the lock, in a graph of production size."""
    rng = np.random.default_rng(4)
    graph = build_graph(_BLOCKS, 0)
    add_sessions(graph, _SESSIONS)
    keys = graph.tables.blocks.keys[: graph.tables.blocks.size].copy()
    packed = keys.astype("<u8").tobytes()
    graph.apply(ENGINE, [BlocksSpilled(packed[: 8 * _COPIES], int(Tier.WARM), 1)])
    fresh = random_keys(rng, _BATCH).astype("<u8").tobytes()
    gone = packed[-8 * _BATCH :]
    hello = EngineHello(ENGINE, "synthetic", BLOCK_SIZE, _BLOCKS, "bench")
    churn: list[AnyEvent] = [BlocksStored(fresh, None, BLOCK_SIZE), BlocksRemoved(gone)]
    return {
        "a batch under pressure": _seconds(lambda: graph.apply(ENGINE, churn)),
        "a resync": _seconds(lambda: graph.apply(ENGINE, [hello, BlocksResident(packed)])),
        "blocks evicted, ghosts released": max(
            _seconds(partial(graph.apply, ENGINE, [BlocksRemoved(part)]))
            for part in _parts(packed, 8 * _BATCH)
        ),
        "an engine gone": _seconds(lambda: graph.forget_engine(ENGINE)),
    }


def _parts(packed: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(packed), size):
        yield packed[start : start + size]


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
