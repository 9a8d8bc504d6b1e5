"""Grafana's dashboard and Prometheus' alert rules ask for metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from kvgraph.dashboards.metrics import SidecarCollector
from kvgraph.dashboards.source import LogTotals, SidecarStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.policy import PolicyChoice
from kvgraph.graph.wire.events import AdmissionReport, AdviceApplied, EngineHello, Pressure
from page_app import engine_status, sidecar_status
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

GRAFANA = Path(__file__).parents[2] / "dashboards" / "grafana"
_METRIC = re.compile(r"\bkvgraph_[a-z_]+\b")
_TIERS = ["tier_blocks", "tier_capacity_blocks", "tier_events_total", "tier_bytes_total"]


class Source:
    """A sidecar with one engine of which everything is known but tiers."""

    def __init__(self, engine: str = "e1") -> None:
        self.engine = engine
        self.graph = KVCacheGraph()
        report = AdmissionReport(1, 2, 3.0, 4, (0,), 5.0, 6.0, 7)
        hello = EngineHello("e", "m", 16, 100, "v")
        self.graph.apply(
            engine, [hello, Pressure(1, 1, 1, 1, 1), AdviceApplied(1, 2, 3, 4, 5, 6), report]
        )

    def status(self) -> SidecarStatus:
        engine = engine_status(self.graph, self.engine, ruling=PolicyChoice(True, 1.0, 1))
        counters, snapshot = {"ingest": {"events_refused": 1}}, {"age_s": 1.0}
        return sidecar_status(self.graph, engine, counters=counters, snapshot=snapshot)

    def totals(self) -> LogTotals:
        two = {(self.engine, "lru"): (2, 1)}
        return LogTotals(
            tokens={"pool": 1}, reasons={"evicted": (1, 1)}, lost={"multi_turn": 1}, rules=two,
            shadows=two, log_bytes=1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def known() -> set[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(Source()))  # type: ignore[arg-type]
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = {sample.name for family in families for sample in family.samples}
    return samples | {f"kvgraph_{name}" for name in _TIERS}


def test_every_query_of_the_dashboard_names_metrics_that_exist(known: set[str]) -> None:
    dashboard = json.loads((GRAFANA / "kvgraph.json").read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        named = set(_METRIC.findall(query))
        assert named, query
        assert named <= known, query


def test_every_alert_names_metrics_that_exist(known: set[str]) -> None:
    rules = (GRAFANA / "alerts.yml").read_text()
    alerts = rules.split("- alert: ")[1:]
    assert len(alerts) >= 6
    for alert in alerts:
        expression = alert.partition("expr: ")[2].partition("\n        labels")[0]
        named = set(_METRIC.findall(expression))
        assert named, alert
        assert named <= known, alert
        assert "summary:" in alert
        assert "description:" in alert


def test_the_rules_are_yaml_of_prometheus_shape() -> None:
    yaml = pytest.importorskip("yaml")
    rules = yaml.safe_load((GRAFANA / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in {"info", "warning", "critical"}


def test_no_panel_lies_over_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((GRAFANA / "kvgraph.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_what_engines_report_of_advice_is_metrics() -> None:
    families = SidecarCollector(Source()).collect()  # type: ignore[arg-type]
    samples = [sample for family in families for sample in family.samples]
    applied = [each for each in samples if each.name == "kvgraph_advice_applied_total"]
    kinds = {"moved", "recycled", "stale", "protected_evicted"}
    assert {each.labels["what"] for each in applied} == kinds
    (dropped,) = [each.value for each in samples if each.name == "kvgraph_events_dropped_total"]
    assert dropped == 6


def test_families_call_an_engine_alike_however_long_its_id_is() -> None:
    """Or no query could join them."""
    families = SidecarCollector(Source("e" * 100)).collect()  # type: ignore[arg-type]
    labels = {
        (family.name, sample.labels["engine"])
        for family in families
        for sample in family.samples
        if "engine" in sample.labels
    }
    assert {name for name, _ in labels} > {"kvgraph_evictions", "kvgraph_shadow_asked_blocks"}
    (called,) = {engine for _, engine in labels}
    assert len(called) == 64
