"""What computing saved is counted at: the rate that engines measured, with tiers or without."""

from __future__ import annotations

from kvgraph.advisor.page.now import prefill_rate
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import Tables
from kvgraph.graph.wire.events import EngineHello, Pressure


def tables_of(**rates: float) -> Tables:
    graph = KVCacheGraph()
    for name, rate in rates.items():
        hello = EngineHello(name, "m", 16, 100, "v")
        graph.apply(name, [hello, Pressure(1, 1, 1, 1, 1, rate)])
    return graph.tables


def test_an_engine_without_tiers_tells_its_rate_with_its_load() -> None:
    tables = tables_of(a=3000.0, b=0.0, c=1000.0)
    assert prefill_rate(tables) == 2000.0
    assert [tables.history.words(name).prefill_tokens_per_s for name in ("a", "b", "gone")] == [
        3000.0,
        0.0,
        0.0,
    ]


def test_nobody_measured_it_yet() -> None:
    assert prefill_rate(tables_of(a=0.0)) is None
