"""Prometheus metrics of a sidecar: few series, and labels whose values are ours and bounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .source import EngineStatus, SidecarStatus, StatusSource

_LABEL_LENGTH = 64


class SidecarCollector(Collector):
    """Reads ``source`` at each scrape; nothing is kept between scrapes."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Every family, from one look at the status."""
        status = self._source.status()
        yield _gauge("kvgraph_uptime_seconds", "Seconds since the sidecar started", status.uptime_s)
        yield from _graph(status)
        yield from _engines(status.engines)
        yield from _counters(status)


def _graph(status: SidecarStatus) -> Iterator[Metric]:
    graph = status.graph
    yield _gauge("kvgraph_blocks", "Blocks known, resident or not", graph.blocks)
    yield _gauge("kvgraph_graph_bytes", "Memory of the graph", graph.bytes)
    yield _labelled("kvgraph_edges", "Edges by type", "type", graph.edges)
    yield _labelled("kvgraph_sessions", "Sessions by state", "state", graph.sessions)
    written = status.snapshot.get("age_s")
    if written is not None:
        yield _gauge("kvgraph_snapshot_age_seconds", "Age of the last good snapshot", written)


def _engines(engines: tuple[EngineStatus, ...]) -> Iterator[Metric]:
    info = InfoMetricFamily("kvgraph_engine", "Who an engine is", labels=["engine"])
    state = GaugeMetricFamily("kvgraph_engine_state", "1 for the state it is in",
                              labels=["engine", "state"])  # fmt: skip
    age = GaugeMetricFamily("kvgraph_ranking_age_seconds", "Age of its ranking", labels=["engine"])
    blocks = GaugeMetricFamily("kvgraph_resident_blocks", "Blocks in its prefix cache",
                               labels=["engine", "layer"])  # fmt: skip
    gaps = CounterMetricFamily("kvgraph_sequence_gaps", "Gaps in its events", labels=["engine"])
    for engine in engines:
        label = [_cut(engine.id)]
        names = {"name": _cut(engine.name), "model": _cut(engine.model),
                 "version": _cut(engine.version), "kind": engine.kind}  # fmt: skip
        info.add_metric(label, names)
        state.add_metric([*label, engine.state], 1)
        gaps.add_metric(label, engine.gaps)
        if engine.ranking_age_s is not None:
            age.add_metric(label, engine.ranking_age_s)
        for layer, count in (engine.graph.layers if engine.graph else {}).items():
            blocks.add_metric([*label, layer], count)
    yield from (info, state, age, blocks, gaps)


def _counters(status: SidecarStatus) -> Iterator[Metric]:
    for group, counts in status.counters.items():
        family = CounterMetricFamily(f"kvgraph_{group}", f"Counted by {group}", labels=["what"])
        for what, count in counts.items():
            family.add_metric([what], count)
        yield family


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value=value)


def _labelled(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _cut(text: str) -> str:
    return text[:_LABEL_LENGTH]
