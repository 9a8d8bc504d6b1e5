"""Prometheus metrics of requests that engines hold until there is room for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ..graph.messages.advice import AdmissionAdvice
from ..graph.messages.events import HOLD_ENDS, AdmissionReport

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
    """Metric families, from engines' labels and their reports."""
    for name, field, text in _LEVELS:
        level = GaugeMetricFamily(_PREFIX + name, text, labels=["engine"])
        for label, report in reports:
            level.add_metric([label], getattr(report, field))
        yield level
    for name, field, text in _COUNTS:
        count = CounterMetricFamily(_PREFIX + name, text, labels=["engine"])
        for label, report in reports:
            count.add_metric([label], getattr(report, field))
        yield count
    ends = CounterMetricFamily(
        _PREFIX + "released", "Held requests by why they wait no longer",
        labels=["engine", "reason"],
    )  # fmt: skip
    for label, report in reports:
        for reason, released in zip(HOLD_ENDS, report.released, strict=False):
            ends.add_metric([label, reason], released)
    yield ends


def room_metrics(said: Sequence[tuple[str, AdmissionAdvice]]) -> Iterator[Metric]:
    """Metric families, from engines' labels and the advice that they got; room only if it is
    limited."""
    live = GaugeMetricFamily(_PREFIX + "live_sessions", "Sessions that are live", labels=["engine"])
    fits = GaugeMetricFamily(_PREFIX + "fitting_sessions", "Sessions that fit", labels=["engine"])
    shut = GaugeMetricFamily(_PREFIX + "closed", "1: new context needs room", labels=["engine"])
    again = GaugeMetricFamily(
        _PREFIX + "computed_again", "Share of the latest prompts", labels=["engine"]
    )
    lifted = GaugeMetricFamily(
        _PREFIX + "lifted_pools", "Pools' worth of prompts without a limit: one saved nothing",
        labels=["engine"],
    )  # fmt: skip
    room = GaugeMetricFamily(
        _PREFIX + "room_blocks", "Blocks of new context that may start", labels=["engine"]
    )
    for label, word in said:
        live.add_metric([label], word.live_sessions)
        fits.add_metric([label], word.fitting_sessions)
        shut.add_metric([label], int(word.room_blocks is not None))
        again.add_metric([label], word.again)
        lifted.add_metric([label], word.lifted_pools)
        if word.room_blocks is not None:
            room.add_metric([label], word.room_blocks)
    yield from (live, fits, shut, again, lifted, room)
