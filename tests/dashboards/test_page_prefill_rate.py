"""What computing saved is counted at: the rate that engines measured, with tiers or without."""

from __future__ import annotations

from kvgraph.advisor.page.now_view import prefill_rate
from kvgraph.dashboards.source import EngineStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.messages.events import EngineHello, Pressure


def engine(name: str, rate: float) -> EngineStatus:
    graph = KVCacheGraph()
    hello = EngineHello(name, "m", 16, 100, "v")
    graph.apply(name, [hello, Pressure(1, 1, 1, 1, 1, rate)])
    return EngineStatus(
        id=name, name=name, model="m", version="v", kind="hook", state="synced", silent_s=0.1,
        gaps=0, resyncs=0, ranking_epoch=4, ranking_age_s=0.3, ranked=3, ranked_protected=0,
        graph=graph.stats().engines[name], tiers=None,
    )  # fmt: skip


def test_an_engine_without_tiers_tells_its_rate_with_its_load() -> None:
    assert prefill_rate((engine("a", 3000.0), engine("b", 0.0), engine("c", 1000.0))) == 2000.0


def test_nobody_measured_it_yet() -> None:
    assert prefill_rate((engine("a", 0.0),)) is None
