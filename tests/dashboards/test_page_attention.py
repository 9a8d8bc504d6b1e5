"""What the first screen says needs attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from kvgraph.advisor.page.needs_attention import notices
from kvgraph.dashboards.source import EngineStatus, SidecarStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.messages.events import EngineHello


class Status:
    """What a sidecar says of one engine and of itself."""

    def __init__(self, *engines: EngineStatus) -> None:
        self.engines = engines
        self.config: dict[str, Any] = {}
        self.snapshot: dict[str, Any] = {}


@pytest.fixture
def graph() -> KVCacheGraph:
    graph = KVCacheGraph()
    graph.apply("e", [EngineHello("gpu-0", "m", 16, 100, "v")])
    return graph


def said(graph: KVCacheGraph, **limited: int) -> list[str]:
    stats = graph.stats().engines["e"]
    known = replace(stats, limited={**stats.limited, **limited})
    engine = EngineStatus(
        id="e", name="gpu-0", model="m", version="v", kind="hook", state="synced", silent_s=0.1,
        gaps=0, resyncs=0, ranking_epoch=4, ranking_age_s=0.3, ranked=3, ranked_protected=0,
        graph=known, tiers=None,
    )  # fmt: skip
    status = cast(SidecarStatus, Status(engine))
    return [notice.text for notice in notices(graph.tables, status)]


def test_nothing_does_where_all_is_well(graph: KVCacheGraph) -> None:
    assert said(graph) == []


def test_the_limit_of_protection_that_was_hit_is_named(graph: KVCacheGraph) -> None:
    (text,) = said(graph, tenant=55)
    assert text.startswith("gpu-0: More blocks are marked as protected than may be: 55 beyond a")
    assert "score.tenant_share" in text
    assert "score.protected_share" not in text
    (text,) = said(graph, tenant=5, all=1_200)
    assert "1,200 beyond the share of the pool (score.protected_share)" in text


def test_what_the_graph_infers_by_itself_needs_nobody(graph: KVCacheGraph) -> None:
    assert said(graph, inferred=40) == []
