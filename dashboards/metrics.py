"""Prometheus metrics of a sidecar: few series, with label values from a bounded set of our own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..graph.wire.events import HOLD_ENDS
from .source import EngineStatus, LogTotals, SidecarStatus, StatusSource

_LENGTH: Final = 64  # characters; chosen
_DIGEST: Final = 4  # bytes


def cut(text: str) -> str:
    """Return a label value, shortened alike in all families, so that their labels match."""
    if len(text) <= _LENGTH:
        return text
    # Engines whose ids begin alike, as of hosts in one cluster, must not become one series.
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=_DIGEST).hexdigest()
    return f"{text[: _LENGTH - 1 - len(digest)]}~{digest}"


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
    yield from (tokens, misses, blocks, lost)
    left = "kvgraph_evictions", "Blocks that left a pool, by what decided it"
    regretted = "kvgraph_regrets", "Of these: computed again within ten minutes"
    yield from _pair(left, regretted, "rule", totals.rules)
    asked = "kvgraph_shadow_asked_blocks", "Blocks that shadows were asked for"
    found = "kvgraph_shadow_found_blocks", "Of these: found"
    yield from _pair(asked, found, "shadow", totals.shadows)


def _pair(
    whole: tuple[str, str],  # name and text of the first counter, and then of the second
    part: tuple[str, str],
    label: str,
    counts: Mapping[tuple[str, str], tuple[int, int]],  # by engine and label
) -> Iterator[Metric]:
    all_, some = _counter(*whole, "engine", label), _counter(*part, "engine", label)
    for (engine, what), (count, of_these) in counts.items():
        all_.add_metric([cut(engine), what], count)
        some.add_metric([cut(engine), what], of_these)
    yield from (all_, some)


# Metrics of engines: each family takes a part of an engine's status, and makes samples of it.

_Samples = Iterable[tuple[Any, ...]]  # further labels, and the value


class _OfEngines(NamedTuple):
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    text: str
    part: str  # path in ``EngineStatus``, with dots; if it is None, the engine has no sample
    samples: Callable[[Any], _Samples]
    labels: tuple[str, ...]

    def of(self, engines: Iterable[EngineStatus]) -> Metric:
        family = self.kind(self.name, self.text, labels=["engine", *self.labels])
        for engine in engines:
            part: Any = engine
            for name in filter(None, self.part.split(".")):
                part = None if part is None else getattr(part, name)
            for *labels, value in () if part is None else self.samples(part):
                family.add_metric([cut(engine.id), *labels], value)
        return family


def _itself(value: float) -> _Samples:
    return [(value,)]


def _gauge(
    name: str, text: str, part: str, samples: Callable[[Any], _Samples] = _itself, *labels: str
) -> _OfEngines:
    return _OfEngines(GaugeMetricFamily, name, text, part, samples, labels)


def _count(
    name: str, text: str, part: str, samples: Callable[[Any], _Samples] = _itself, *labels: str
) -> _OfEngines:
    return _OfEngines(CounterMetricFamily, name, text, part, samples, labels)


def _fields(*names: str) -> Callable[[Any], _Samples]:
    return lambda part: [(name, getattr(part, name)) for name in names]


def _levels(engine: EngineStatus) -> Iterator[tuple[str, int, int]]:
    """An engine's tiers, their blocks and how many fit; none where it has no colder ones."""
    tiers, graph = engine.tiers, engine.graph
    if tiers is not None:
        if graph is not None and graph.pressure is not None:
            yield "hot", graph.resident, graph.pressure.total_blocks
        yield "warm", tiers.warm_blocks, tiers.warm_capacity
        yield "cold", tiers.cold_blocks, tiers.cold_capacity


_TIER_COUNTS: Final = _fields(
    "spilled", "spill_lost", "spill_failed", "passed_over", "demoted", "dropped", "loaded",
    "load_failed", "stalls", "recomputed", "prefetched", "prefetch_useful", "prefetch_wasted",
    "prefetch_cancelled", "shared", "share_failed", "store_loaded", "store_failed",
)  # fmt: skip
_FAMILIES: Final = (
    _gauge("kvgraph_engine_state", "1 for the state it is in", "state", lambda s: [(s, 1)],
           "state"),
    _gauge("kvgraph_ranking_age_seconds", "Age of its ranking", "ranking_age_s"),
    _gauge("kvgraph_resident_blocks", "Blocks in its prefix cache", "graph.layers",
           lambda layers: layers.items(), "layer"),
    _gauge("kvgraph_policy_rules", "1 while the policy ranks, 0 while LRU does",
           "ruling.policy_rules"),
    _gauge("kvgraph_policy_ahead_blocks", "Blocks that the policy found more than LRU, lately",
           "ruling.ahead"),
    _count("kvgraph_ruling_changes", "Times that LRU and policy changed", "ruling.changes"),
    _count("kvgraph_sequence_gaps", "Gaps in its events", "gaps"),
    # Engines report these since their own start.
    _count("kvgraph_advice_applied", "What an engine did with rankings", "graph.applied",
           _fields("moved", "recycled", "stale", "protected_evicted"), "what"),
    _count("kvgraph_events_dropped", "Events that its full queue dropped",
           "graph.applied.dropped"),
    _gauge("kvgraph_protection_blocks", "Blocks that are named to be kept, by whether they are",
           "graph", lambda graph: [("yes", graph.kept), ("no", graph.over_share)], "kept"),
    _gauge("kvgraph_protection_share", "Of a pool, that may be kept", "graph.kept_share"),
    _gauge("kvgraph_protection_price_points", "Points of what is found that this costs, lately",
           "graph.budget.points"),
    _gauge("kvgraph_tier_blocks", "Blocks in a tier", "",
           lambda engine: [(tier, held) for tier, held, _ in _levels(engine)], "tier"),
    _gauge("kvgraph_tier_capacity_blocks", "Blocks that fit into a tier", "",
           lambda engine: [(tier, room) for tier, _, room in _levels(engine)], "tier"),
    _count("kvgraph_tier_events", "Counted by an engine's tiers", "tiers", _TIER_COUNTS, "what"),
    _count("kvgraph_tier_bytes", "Moved between tiers, on one worker", "tiers",
           lambda tiers: [("spill", tiers.spilled * tiers.bytes_per_block),
                          ("load", (tiers.loaded + tiers.prefetched) * tiers.bytes_per_block)],
           "direction"),
    _gauge("kvgraph_tier_bytes_per_second", "What a transfer reaches", "tiers",
           lambda tiers: [("spill", tiers.spill_bytes_per_s), ("load", tiers.load_bytes_per_s)],
           "direction"),
    _gauge("kvgraph_prefill_tokens_per_second", "What computing reaches",
           "tiers.prefill_tokens_per_s"),
    _count("kvgraph_stall_seconds", "Requests waited for loads", "tiers.stall_s"),
    _gauge("kvgraph_admission_waiting", "Requests that are held now", "graph.admission.waiting"),
    _gauge("kvgraph_admission_waiting_blocks", "Blocks of context that they want",
           "graph.admission.waiting_blocks"),
    _gauge("kvgraph_admission_oldest_seconds", "How long the first of them waits",
           "graph.admission.oldest_s"),
    _gauge("kvgraph_admission_longest_seconds",
           "The longest that any was held since the engine's start", "graph.admission.longest_s"),
    _gauge("kvgraph_admission_queued_share",
           "Share of the latest requests that met others in the queue",
           "graph.admission.queued_share"),
    _count("kvgraph_admission_held", "Requests that were held", "graph.admission.held"),
    _count("kvgraph_admission_not_held", "Requests that started without being held",
           "graph.admission.not_held"),
    _count("kvgraph_admission_waited_seconds", "Seconds that requests were held in all",
           "graph.admission.waited_s"),
    _count("kvgraph_admission_released", "Held requests by why they wait no longer",
           "graph.admission.released", lambda n: zip(HOLD_ENDS, n, strict=False), "reason"),
    _gauge("kvgraph_admission_live_sessions", "Sessions that are live", "room.live_sessions"),
    _gauge("kvgraph_admission_fitting_sessions", "Sessions that fit", "room.fitting_sessions"),
    _gauge("kvgraph_admission_closed", "1: new context needs room", "room",
           lambda room: [(int(room.room_blocks is not None),)]),
    _gauge("kvgraph_admission_computed_again", "Share of the latest prompts", "room.again"),
    _gauge("kvgraph_admission_lifted_pools",
           "Pools' worth of prompts without a limit: one saved nothing", "room.lifted_pools"),
    _gauge("kvgraph_admission_room_blocks", "Blocks of new context that may start",
           "room.room_blocks"),
)  # fmt: skip


def engine_metrics(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    info = InfoMetricFamily("kvgraph_engine", "Who an engine is", labels=["engine"])
    for engine in engines:
        names = {"name": cut(engine.name), "model": cut(engine.model),
                 "version": cut(engine.version), "kind": engine.kind}  # fmt: skip
        info.add_metric([cut(engine.id)], names)
    yield info
    yield from (family.of(engines) for family in _FAMILIES)


class SidecarCollector(Collector):
    """Reads ``source`` at each scrape and keeps nothing."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        status = self._source.status()
        yield _value("kvgraph_uptime_seconds", "Seconds since the sidecar started", status.uptime_s)
        yield from _graph(status)
        yield from engine_metrics(status.engines)
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


def _counters(status: SidecarStatus) -> Iterator[Metric]:
    for group, counts in status.counters.items():
        family = _counter(f"kvgraph_{group}", f"Counted by {group}", "what")
        for what, count in counts.items():
            family.add_metric([what], count)
        yield family


def _value(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=labels)


def _labelled(name: str, help_text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
