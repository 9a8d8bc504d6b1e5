"""``kvgraph bench graph`` puts the graph under the load that its figures name."""

from __future__ import annotations

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph_bench.graph.churned import churned_graph, ranking_seconds
from kvgraph_bench.graph.graphs import ENGINE, build_graph
from kvgraph_bench.graph.locks import add_sessions
from kvgraph_bench.graph.steady import Traffic


def test_under_pressure_whatever_is_stored_evicts_as_much() -> None:
    graph, pool = KVCacheGraph(), 4096
    for batch in Traffic(pool).batches(5 * 8192):
        graph.apply(ENGINE, batch)
        assert graph.resident_count(ENGINE) == pool
    assert graph.counters["blocks_stored"] == 5 * 8192
    assert graph.counters["blocks_removed"] == 5 * 8192 - pool
    assert graph.counters["requests"] == 5 * 32
    graph.check_integrity()


def test_a_graph_of_so_many_blocks_edges_and_sessions() -> None:
    graph = build_graph(2_000, 6_000)
    add_sessions(graph, 500)
    stats = graph.stats()
    assert stats.blocks == stats.engines[ENGINE].resident == 2_000
    assert sum(stats.edges.values()) == 6_000
    assert sum(stats.sessions.values()) == 500 + 32
    graph.check_integrity()


def test_a_churned_table_has_ghosts_and_a_ranking_holds_the_lock_for_a_part_of_it_only() -> None:
    graph, churn = churned_graph(2_000)
    assert graph.resident_count(ENGINE) == pytest.approx(2_000, abs=100)
    assert len(graph.tables.blocks) > 3_900
    took, longest_s = ranking_seconds(graph, churn, 3)
    assert len(took) == 3
    assert 0 < longest_s < max(took)
    assert graph.policy.name == "lifecycle"
    graph.check_integrity()
