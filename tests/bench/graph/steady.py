"""An engine under pressure: whatever is stored evicts as much, among the requests that ask."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import Keys
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)

from .graphs import BLOCK_SIZE, ENGINE, random_keys

_POOL = 131_072
_PROMPT = 512  # blocks: a turn of a coding agent, of which half is new
_NEW = _PROMPT // 2
_REQUESTS_A_STEP = 4
_STEPS_A_BATCH = 8


def steady_rates(rounds: int = 5, blocks: int = 400_000) -> list[float]:
    """Blocks per second that a graph with a full pool applies, once a round.

    Each step of the engine four requests start, each the next turn of a session, four end, 1,024
    blocks are stored and as many evicted, the longest unused; eight steps are one batch.
    """
    traffic = Traffic()
    graph = KVCacheGraph()
    graph.apply(ENGINE, [EngineHello(ENGINE, "", BLOCK_SIZE, _POOL, "bench")])
    for batch in traffic.batches(2 * _POOL):  # until the pool is full, and ghosts are many
        graph.apply(ENGINE, batch)
    return [_rate(graph, list(traffic.batches(blocks))) for _ in range(rounds)]


def _rate(graph: KVCacheGraph, batches: list[list[AnyEvent]]) -> float:
    before, started = graph.counters["blocks_stored"], time.perf_counter()
    for batch in batches:
        graph.apply(ENGINE, batch)
    elapsed = time.perf_counter() - started
    return (graph.counters["blocks_stored"] - before) / elapsed


class Traffic:
    """Sessions that take turns: each second turn extends the one before it.

    Args:
        pool: Blocks that the engine holds.
    """

    def __init__(self, pool: int = _POOL) -> None:
        self._pool = pool
        self._rng = np.random.default_rng(6)
        self._held: list[Keys] = []  # what the pool holds, the longest unused first
        self._held_blocks = 0
        self._requests = 0

    def batches(self, blocks: int) -> Iterator[list[AnyEvent]]:
        """As many batches as store ``blocks``."""
        for _ in range(blocks // (_NEW * _REQUESTS_A_STEP * _STEPS_A_BATCH)):
            batch: list[AnyEvent] = []
            for _ in range(_STEPS_A_BATCH):
                batch += self._step()
            yield batch

    def _step(self) -> list[AnyEvent]:
        turns = [self._turn() for _ in range(_REQUESTS_A_STEP)]
        started, stored, finished = zip(*turns, strict=True)
        return [*started, *self._evicted(), *stored, *finished]

    def _turn(self) -> tuple[RequestStarted, BlocksStored, RequestFinished]:
        keys = random_keys(self._rng, _NEW)
        number, self._requests = self._requests, self._requests + 1
        old = self._held[-1] if number % 2 and self._held else keys[:0]
        self._held.append(keys)
        self._held_blocks += _NEW
        chain = np.concatenate([old, keys]).astype("<u8").tobytes()
        session, tokens = f"s{number // 2}", len(chain) // 8 * BLOCK_SIZE
        parent = int(old[-1]) if len(old) else None
        name = f"r{number}"
        return (
            RequestStarted(name, chain, tokens, len(old) * BLOCK_SIZE, BLOCK_SIZE, session),
            BlocksStored(keys.astype("<u8").tobytes(), parent, BLOCK_SIZE, session),
            RequestFinished(name, chain, tokens, tokens, "stop", session),
        )

    def _evicted(self) -> list[AnyEvent]:
        gone: list[Keys] = []
        while self._held_blocks > self._pool:
            gone.append(self._held.pop(0))
            self._held_blocks -= _NEW
        return [BlocksRemoved(np.concatenate(gone).astype("<u8").tobytes())] if gone else []
