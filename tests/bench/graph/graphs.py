"""Synthetic graphs of a given size, the same ones for us and for the peer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import EdgeType, Keys, Rows, SourceLayer
from kvgraph.graph.wire.events import BlocksStored, EngineHello, RequestStarted, Segment

CHAIN_BLOCKS = 64
BLOCK_SIZE = 16
ENGINE = "bench"


def random_keys(rng: np.random.Generator, count: int) -> Keys:
    """Distinct block keys, uniform like the low bits of a SHA-256."""
    return rng.integers(1, 1 << 63, size=count, dtype=np.uint64)


def chain_events(keys: Keys) -> Iterator[RequestStarted | BlocksStored]:
    """Requests whose prompts store these blocks, ``CHAIN_BLOCKS`` at a time.

    Each prompt opens with a protected block; layers and importances vary by chain.
    """
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
    """A graph of ``blocks`` resident blocks in chains and ``edges`` edges of three types."""
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
