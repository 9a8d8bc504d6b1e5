"""Prometheus metrics of a sidecar: few series, and labels whose values are ours and bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..graph.wire.advice import AdmissionAdvice
from ..graph.wire.events import HOLD_ENDS, AdmissionReport
from .source import EngineStatus, LogTotals, SidecarStatus, StatusSource

# Label values that come from engines.

_LENGTH: Final = 64  # characters; chosen


def cut(text: str) -> str:
    """The start of a label value; all families cut alike, so that their labels match."""
    return text[:_LENGTH]


# Prometheus metrics of the logs: misses by reason, regrets, shadows.


def log_metrics(totals: LogTotals) -> Iterator[Metric]:
    yield _value("kvgraph_log_bytes", "Memory of the logs", totals.log_bytes)
    tokens = _counter("kvgraph_prompt_tokens", "Prompt tokens by where they came from", "source")
    for source, count in totals.tokens.items():
        tokens.add_metric([source], count)
    misses = _counter("kvgraph_misses", "Requests by why they found no more", "reason")
    blocks = _counter("kvgraph_missed_blocks", "Blocks that they computed for it", "reason")
    for reason, (requests, missed) in totals.reasons.items():
        misses.add_metric([reason], requests)
        blocks.add_metric([reason], missed)
    lost = _counter(
        "kvgraph_recomputed_blocks", "Blocks computed again, by whose they were", "whose"
    )
    for whose, count in totals.lost.items():
        lost.add_metric([whose], count)
    yield from (tokens, misses, blocks, lost, *_by_rule(totals), *_by_shadow(totals))


def _by_rule(totals: LogTotals) -> Iterator[Metric]:
    left = _counter(
        "kvgraph_evictions", "Blocks that left a pool, by what decided it", "engine", "rule"
    )
    wanted = _counter(
        "kvgraph_regrets", "Of these: wanted again within ten minutes", "engine", "rule"
    )
    for (engine, rule), (evicted, regretted) in totals.rules.items():
        left.add_metric([cut(engine), rule], evicted)
        wanted.add_metric([cut(engine), rule], regretted)
    yield from (left, wanted)


def _by_shadow(totals: LogTotals) -> Iterator[Metric]:
    asked = _counter(
        "kvgraph_shadow_asked_blocks", "Blocks that shadows were asked for", "engine", "shadow"
    )
    found = _counter("kvgraph_shadow_found_blocks", "Of these: found", "engine", "shadow")
    for (engine, shadow), (wanted, hits) in totals.shadows.items():
        asked.add_metric([cut(engine), shadow], wanted)
        found.add_metric([cut(engine), shadow], hits)
    yield from (asked, found)


# Prometheus metrics of requests that engines hold until there is room for them.

_PREFIX: Final = "kvgraph_admission_"
_LEVELS: Final = (
    ("waiting", "waiting", "Requests that are held now"),
    ("waiting_blocks", "waiting_blocks", "Blocks of context that they want"),
    ("oldest_seconds", "oldest_s", "How long the first of them waits"),
    ("longest_seconds", "longest_s", "The longest that any was held since the engine's start"),
    ("queued_share", "queued_share", "Share of the latest requests that met others in the queue"),
)
_COUNTS: Final = (
    ("held", "held", "Requests that were held"),
    ("not_held", "not_held", "Requests that started without being held"),
    ("waited_seconds", "waited_s", "Seconds that requests were held in all"),
)


def admission_metrics(reports: Sequence[tuple[str, AdmissionReport]]) -> Iterator[Metric]:
    for name, field, text in _LEVELS:
        level = _gauge(_PREFIX + name, text, "engine")
        for label, report in reports:
            level.add_metric([label], getattr(report, field))
        yield level
    for name, field, text in _COUNTS:
        count = _counter(_PREFIX + name, text, "engine")
        for label, report in reports:
            count.add_metric([label], getattr(report, field))
        yield count
    ends = _counter(
        _PREFIX + "released", "Held requests by why they wait no longer", "engine", "reason"
    )
    for label, report in reports:
        for reason, released in zip(HOLD_ENDS, report.released, strict=False):
            ends.add_metric([label, reason], released)
    yield ends


def room_metrics(said: Sequence[tuple[str, AdmissionAdvice]]) -> Iterator[Metric]:
    """Metric families of engines' advice, by label; room only where it is limited."""
    live = _gauge(_PREFIX + "live_sessions", "Sessions that are live", "engine")
    fits = _gauge(_PREFIX + "fitting_sessions", "Sessions that fit", "engine")
    shut = _gauge(_PREFIX + "closed", "1: new context needs room", "engine")
    again = _gauge(_PREFIX + "computed_again", "Share of the latest prompts", "engine")
    lifted = _gauge(
        _PREFIX + "lifted_pools",
        "Pools' worth of prompts without a limit: one saved nothing",
        "engine",
    )
    room = _gauge(_PREFIX + "room_blocks", "Blocks of new context that may start", "engine")
    for label, advice in said:
        live.add_metric([label], advice.live_sessions)
        fits.add_metric([label], advice.fitting_sessions)
        shut.add_metric([label], int(advice.room_blocks is not None))
        again.add_metric([label], advice.again)
        lifted.add_metric([label], advice.lifted_pools)
        if advice.room_blocks is not None:
            room.add_metric([label], advice.room_blocks)
    yield from (live, fits, shut, again, lifted, room)


_TIER_COUNTS = (
    "spilled", "spill_lost", "spill_failed", "passed_over", "demoted", "dropped", "loaded",
    "load_failed", "stalls", "recomputed", "prefetched", "prefetch_useful", "prefetch_wasted",
    "prefetch_cancelled", "shared", "share_failed", "store_loaded", "store_failed",
)  # fmt: skip

_ADVICE_COUNTS = ("moved", "recycled", "stale", "protected_evicted")


class SidecarCollector(Collector):
    """Reads ``source`` at each scrape and keeps nothing."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        status = self._source.status()
        yield _value("kvgraph_uptime_seconds", "Seconds since the sidecar started", status.uptime_s)
        yield from _graph(status)
        yield from _engines(status.engines)
        yield from _reports(status.engines)
        yield from _protection(status.engines)
        yield from _tiers(status.engines)
        yield from admission_metrics(
            [
                (cut(engine.id), engine.graph.admission)
                for engine in status.engines
                if engine.graph is not None and engine.graph.admission is not None
            ]
        )
        yield from room_metrics(
            [(cut(engine.id), engine.room) for engine in status.engines if engine.room is not None]
        )
        yield from _counters(status)
        yield from log_metrics(self._source.totals())


def _graph(status: SidecarStatus) -> Iterator[Metric]:
    graph = status.graph
    yield _value("kvgraph_blocks", "Blocks known, resident or not", graph.blocks)
    yield _value("kvgraph_graph_bytes", "Memory of the graph", graph.bytes)
    yield _labelled("kvgraph_edges", "Edges by type", "type", graph.edges)
    yield _labelled("kvgraph_sessions", "Sessions by state", "state", graph.sessions)
    written = status.snapshot.get("age_s")
    if written is not None:
        yield _value("kvgraph_snapshot_age_seconds", "Age of the last good snapshot", written)


def _engines(engines: tuple[EngineStatus, ...]) -> Iterator[Metric]:
    info = InfoMetricFamily("kvgraph_engine", "Who an engine is", labels=["engine"])
    state = _gauge("kvgraph_engine_state", "1 for the state it is in", "engine", "state")
    age = _gauge("kvgraph_ranking_age_seconds", "Age of its ranking", "engine")
    blocks = _gauge("kvgraph_resident_blocks", "Blocks in its prefix cache", "engine", "layer")
    rules = _gauge("kvgraph_policy_rules", "1 while the policy ranks, 0 while LRU does", "engine")
    ahead = _gauge(
        "kvgraph_policy_ahead_blocks",
        "Blocks that the policy found more than LRU, lately",
        "engine",
    )
    changes = _counter("kvgraph_ruling_changes", "Times that LRU and policy changed", "engine")
    gaps = _counter("kvgraph_sequence_gaps", "Gaps in its events", "engine")
    for engine in engines:
        label = [cut(engine.id)]
        names = {"name": cut(engine.name), "model": cut(engine.model),
                 "version": cut(engine.version), "kind": engine.kind}  # fmt: skip
        info.add_metric(label, names)
        state.add_metric([*label, engine.state], 1)
        gaps.add_metric(label, engine.gaps)
        if engine.ranking_age_s is not None:
            age.add_metric(label, engine.ranking_age_s)
        if engine.ruling is not None:
            rules.add_metric(label, int(engine.ruling.policy_rules))
            ahead.add_metric(label, engine.ruling.ahead)
            changes.add_metric(label, engine.ruling.changes)
        for layer, count in (engine.graph.layers if engine.graph else {}).items():
            blocks.add_metric([*label, layer], count)
    yield from (info, state, age, blocks, rules, ahead, changes, gaps)


def _reports(engines: tuple[EngineStatus, ...]) -> Iterator[Metric]:
    """Counters that engines report, since their own start."""
    advice = _counter(
        "kvgraph_advice_applied", "What an engine did with rankings", "engine", "what"
    )
    dropped = _counter("kvgraph_events_dropped", "Events that its full queue dropped", "engine")
    for engine in engines:
        applied = engine.graph.applied if engine.graph is not None else None
        if applied is None:
            continue
        for what in _ADVICE_COUNTS:
            advice.add_metric([cut(engine.id), what], getattr(applied, what))
        dropped.add_metric([cut(engine.id)], applied.dropped)
    yield from (advice, dropped)


def _protection(engines: tuple[EngineStatus, ...]) -> Iterator[Metric]:
    blocks = _gauge(
        "kvgraph_protection_blocks",
        "Blocks that are named to be kept, by whether they are",
        "engine",
        "kept",
    )
    share = _gauge("kvgraph_protection_share", "Of a pool, that may be kept", "engine")
    price = _gauge(
        "kvgraph_protection_price_points",
        "Points of what is found that this costs, lately",
        "engine",
    )
    for engine in engines:
        known, label = engine.graph, cut(engine.id)
        if known is None:
            continue
        blocks.add_metric([label, "yes"], known.kept)
        blocks.add_metric([label, "no"], known.over_share)
        share.add_metric([label], known.kept_share)
        if known.budget is not None and known.budget.points is not None:
            price.add_metric([label], known.budget.points)
    yield from (blocks, share, price)


def _tiers(engines: tuple[EngineStatus, ...]) -> Iterator[Metric]:
    level = _gauge("kvgraph_tier_blocks", "Blocks in a tier", "engine", "tier")
    room = _gauge("kvgraph_tier_capacity_blocks", "Blocks that fit into a tier", "engine", "tier")
    counts = _counter("kvgraph_tier_events", "Counted by an engine's tiers", "engine", "what")
    moved = _counter(
        "kvgraph_tier_bytes", "Moved between tiers, on one worker", "engine", "direction"
    )
    rates = _gauge(
        "kvgraph_tier_bytes_per_second", "What a transfer reaches", "engine", "direction"
    )
    prefill = _gauge("kvgraph_prefill_tokens_per_second", "What computing reaches", "engine")
    stalls = _counter("kvgraph_stall_seconds", "Requests waited for loads", "engine")
    for engine in engines:
        tiers, known, label = engine.tiers, engine.graph, cut(engine.id)
        if tiers is None:
            continue
        if known is not None and known.pressure is not None:
            level.add_metric([label, "hot"], known.resident)
            room.add_metric([label, "hot"], known.pressure.total_blocks)
        for tier in ("warm", "cold"):
            level.add_metric([label, tier], getattr(tiers, f"{tier}_blocks"))
            room.add_metric([label, tier], getattr(tiers, f"{tier}_capacity"))
        for what in _TIER_COUNTS:
            counts.add_metric([label, what], getattr(tiers, what))
        back = tiers.loaded + tiers.prefetched
        for direction, blocks in (("spill", tiers.spilled), ("load", back)):
            moved.add_metric([label, direction], blocks * tiers.bytes_per_block)
            rates.add_metric([label, direction], getattr(tiers, f"{direction}_bytes_per_s"))
        prefill.add_metric([label], tiers.prefill_tokens_per_s)
        stalls.add_metric([label], tiers.stall_s)
    yield from (level, room, counts, moved, rates, prefill, stalls)


def _counters(status: SidecarStatus) -> Iterator[Metric]:
    for group, counts in status.counters.items():
        family = _counter(f"kvgraph_{group}", f"Counted by {group}", "what")
        for what, count in counts.items():
            family.add_metric([what], count)
        yield family


def _value(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def _labelled(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
