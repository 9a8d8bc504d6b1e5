"""Prometheus metrics of the logs: misses by reason, regrets, shadows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from .labels import cut
from .source import LogTotals


def log_metrics(totals: LogTotals) -> Iterator[Metric]:
    """Metric families whose labels are the sidecar's own words and engines' ids."""
    yield GaugeMetricFamily("kvgraph_log_bytes", "Memory of the logs", value=totals.log_bytes)
    tokens = CounterMetricFamily(
        "kvgraph_prompt_tokens", "Prompt tokens by where they came from", labels=["source"]
    )
    for source, count in totals.tokens.items():
        tokens.add_metric([source], count)
    misses = CounterMetricFamily(
        "kvgraph_misses", "Requests by why they found no more", labels=["reason"]
    )
    blocks = CounterMetricFamily(
        "kvgraph_missed_blocks", "Blocks that they computed for it", labels=["reason"]
    )
    for reason, (requests, missed) in totals.reasons.items():
        misses.add_metric([reason], requests)
        blocks.add_metric([reason], missed)
    lost = CounterMetricFamily(
        "kvgraph_recomputed_blocks", "Blocks computed again, by whose they were", labels=["whose"]
    )
    for whose, count in totals.lost.items():
        lost.add_metric([whose], count)
    yield from (tokens, misses, blocks, lost, *_by_rule(totals), *_by_shadow(totals))


def _by_rule(totals: LogTotals) -> Iterator[Metric]:
    left = CounterMetricFamily(
        "kvgraph_evictions", "Blocks that left a pool, by what decided it",
        labels=["engine", "rule"],
    )  # fmt: skip
    wanted = CounterMetricFamily(
        "kvgraph_regrets", "Of these: wanted again within ten minutes", labels=["engine", "rule"]
    )
    for (engine, rule), (evicted, regretted) in totals.rules.items():
        left.add_metric([cut(engine), rule], evicted)
        wanted.add_metric([cut(engine), rule], regretted)
    yield from (left, wanted)


def _by_shadow(totals: LogTotals) -> Iterator[Metric]:
    asked = CounterMetricFamily(
        "kvgraph_shadow_asked_blocks", "Blocks that shadows were asked for",
        labels=["engine", "shadow"],
    )  # fmt: skip
    found = CounterMetricFamily(
        "kvgraph_shadow_found_blocks", "Of these: found", labels=["engine", "shadow"]
    )
    for (engine, shadow), (wanted, hits) in totals.shadows.items():
        asked.add_metric([cut(engine), shadow], wanted)
        found.add_metric([cut(engine), shadow], hits)
    yield from (asked, found)
