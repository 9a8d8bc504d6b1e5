"""aither-kvcache beside us: the same blocks and edges, the same question."""

from __future__ import annotations

import statistics
import time
from typing import Any

from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import LAYER_NAMES

from .graphs import ENGINE, build_graph

_BLOCKS, _EDGES, _VICTIMS = 2_000, 6_000, 256


def peer_speedups(pairs: int = 7) -> list[float]:
    """How many times faster our ranking is, side by side, once a pair.

    Raises:
        ModuleNotFoundError: The peer is not installed (``pip install 'kvgraph[bench]'``).
    """
    ours = build_graph(_BLOCKS, _EDGES)
    theirs = _copied(ours)
    return [
        _seconds(lambda: theirs.suggest_eviction(_VICTIMS), 1)
        / _seconds(lambda: ours.suggest_eviction(_VICTIMS, ENGINE), 20)
        for _ in range(pairs)
    ]


def _copied(graph: KVCacheGraph) -> Any:
    """The peer's graph with our nodes (by row) and edges."""
    from aither_kvcache.kvcache_graph import EdgeType as PeerEdge
    from aither_kvcache.kvcache_graph import KVCacheGraph as PeerGraph

    peer = PeerGraph(protected_sources={"axioms", "identity", "rules"})
    blocks = graph.tables.blocks
    for row in blocks.live_rows().tolist():
        label, importance = LAYER_NAMES[blocks.layer[row]], float(blocks.importance[row])
        peer.add_block(row, label, importance, (0, int(blocks.tokens[row])))
    for edge in graph.tables.all_edges.all():
        peer.add_edge(edge.source, edge.target, PeerEdge.CO_ATTEND, edge.weight)
    return peer


def _seconds(action: Any, repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
