"""Synthetic graphs of a given size."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import numpy as np
from kvgraph.advisor.policies.lifecycle import LifecyclePolicy
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import EdgeType, Keys, Rows, SourceLayer
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
    Segment,
)

CHAIN_BLOCKS = 64
BLOCK_SIZE = 16
ENGINE = "bench"


def random_keys(rng: np.random.Generator, count: int) -> Keys:
    """Distinct block keys, uniform like the low bits of a SHA-256."""
    return rng.integers(1, 1 << 63, size=count, dtype=np.uint64)


def chain_events(keys: Keys) -> Iterator[RequestStarted | BlocksStored]:
    """Prompts that store these blocks, ``CHAIN_BLOCKS`` at a time, each with a protected first."""
    for number, start in enumerate(range(0, len(keys), CHAIN_BLOCKS)):
        packed = keys[start : start + CHAIN_BLOCKS].astype("<u8").tobytes()
        tokens = len(packed) // 8 * BLOCK_SIZE
        layer = int(SourceLayer.CONTEXT) + number % 4
        segments = (
            Segment(int(SourceLayer.RULES), 0, BLOCK_SIZE),
            Segment(layer, BLOCK_SIZE, tokens, (number % 10) / 10),
        )
        yield RequestStarted(
            f"r{number}", packed, tokens, 0, BLOCK_SIZE, f"s{number}", None, segments
        )
        yield BlocksStored(packed, None, BLOCK_SIZE, f"s{number}")


def build_graph(blocks: int, edges: int, seed: int = 1) -> KVCacheGraph:
    rng = np.random.default_rng(seed)
    graph = KVCacheGraph()
    graph.apply(ENGINE, [EngineHello(ENGINE, "synthetic", BLOCK_SIZE, blocks, "bench")])
    graph.apply(ENGINE, list(chain_events(random_keys(rng, blocks))))
    _use(graph, rng)
    add_random_edges(graph, edges - sum(graph.stats().edges.values()), rng)
    return graph


def add_random_edges(graph: KVCacheGraph, count: int, rng: np.random.Generator) -> None:
    """Exactly ``count`` further CO_ATTEND edges between random blocks."""
    edges, size = graph.tables.edges, graph.tables.blocks.size
    goal = len(edges) + count
    while len(edges) < goal:
        pairs = _pairs(rng, size, goal - len(edges))
        weights = rng.uniform(3, 30, len(pairs)).astype(np.float32)
        edges.upsert(EdgeType.CO_ATTEND, pairs[:, 0], pairs[:, 1], weights, 0.0)


def _pairs(rng: np.random.Generator, size: int, count: int) -> Rows:
    drawn = rng.integers(0, size, size=(count, 2), dtype=np.int32)
    drawn.sort(axis=1)
    pairs: Rows = drawn[drawn[:, 0] != drawn[:, 1]]
    return pairs


def _use(graph: KVCacheGraph, rng: np.random.Generator) -> None:
    """Spread ages and hits as an hour of traffic would."""
    blocks = graph.tables.blocks
    chains = -(-blocks.size // CHAIN_BLOCKS)
    age = np.repeat(rng.uniform(0, 3600, chains), CHAIN_BLOCKS)[: blocks.size]
    blocks.last_attended[: blocks.size] -= age
    blocks.hit_count[: blocks.size] = np.repeat(rng.poisson(1, chains), CHAIN_BLOCKS)[: blocks.size]


RANKED: Final = 8_192  # blocks of a ranking, as a sidecar asks by default
# All chosen.
_BEGINS: Final = 100  # blocks of a session's first prompt
_GROWS: Final = 20  # by which each of its turns is longer
_ENDS: Final = 400  # blocks from which on it does not come back
_LIVE: Final = 40  # sessions that take turns
_AGAIN: Final = 0.8  # of requests are a turn of one of these; the others begin a session
_BATCH: Final = 50  # requests that are told together
_TURNED: Final = 2.0  # pools' worth of blocks that were stored


class Churn:
    """An engine whose sessions take turns; it evicts the longest unused blocks."""

    def __init__(self, pool: int, scale: int = 1) -> None:
        self._pool, self._scale = pool, scale
        self._rng = np.random.default_rng(7)
        self._live: deque[tuple[str, Keys]] = deque(maxlen=_LIVE)
        self._stored: deque[Keys] = deque()  # the longest ago first
        self._held = 0
        self._numbers = itertools.count()

    def batch(self, requests: int = _BATCH) -> list[AnyEvent]:
        return [event for _ in range(requests) for event in self._request()]

    def _request(self) -> Iterator[AnyEvent]:
        number = next(self._numbers)
        name, before, new = self._turn(number)
        chain = np.concatenate([before, new])
        packed, tokens = chain.tobytes(), len(chain) * BLOCK_SIZE + 1
        parent = int(before[-1]) if len(before) else None
        cached = len(before) * BLOCK_SIZE
        yield RequestStarted(f"r{number}", packed, tokens, cached, BLOCK_SIZE, name)
        yield BlocksStored(new.tobytes(), parent, BLOCK_SIZE, name)
        self._stored.append(new)
        self._held += len(new)
        gone = list[Keys]()
        while self._held > self._pool:
            gone.append(self._stored.popleft())
            self._held -= len(gone[-1])
        if gone:
            yield BlocksRemoved(np.concatenate(gone).tobytes())
        yield RequestFinished(f"r{number}", packed, tokens, tokens, "stop", name)
        if len(chain) < _ENDS * self._scale:
            self._live.append((name, chain))

    def _turn(self, number: int) -> tuple[str, Keys, Keys]:
        if self._live and self._rng.random() < _AGAIN:
            at = int(self._rng.integers(len(self._live)))
            name, before = self._live[at]
            del self._live[at]
            return name, before, random_keys(self._rng, _GROWS * self._scale)
        begun = random_keys(self._rng, _BEGINS * self._scale)
        return f"s{number}", begun[:0], begun


def churned_graph(blocks: int) -> tuple[KVCacheGraph, Churn]:
    """A graph with the default policy, of which an engine stored twice what its pool holds."""
    now = itertools.count(1_000.0, 0.25)
    at = [next(now)]
    graph = KVCacheGraph(policy=LifecyclePolicy(), clock=lambda: at[0])
    graph.apply(ENGINE, [EngineHello(ENGINE, "synthetic", BLOCK_SIZE, blocks + 1, "bench")])
    churn = Churn(blocks, scale=max(1, blocks // 100_000))
    while graph.counters["blocks_stored"] < _TURNED * blocks:
        graph.apply(ENGINE, churn.batch())
        at[0] = next(now)
    return graph, churn


def ranking_seconds(graph: KVCacheGraph, churn: Churn, rounds: int) -> tuple[list[float], float]:
    """Seconds of each of some rankings, a batch of requests apart, and the longest lock."""
    lock, took = TimedLock(), list[float]()
    for number in range(rounds + 1):
        graph.apply(ENGINE, churn.batch(5))
        if number:  # the first one is not counted
            graph.lock = lock  # type: ignore[assignment] # as much of one as is needed
        began = time.perf_counter()
        graph.rank(ENGINE, RANKED)
        took.append(time.perf_counter() - began)
    return took[1:], lock.longest_s


class TimedLock:
    """A lock that notes for how long it was held at most."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._since = 0.0
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.longest_s = max(self.longest_s, time.perf_counter() - self._since)
        self._lock.release()
