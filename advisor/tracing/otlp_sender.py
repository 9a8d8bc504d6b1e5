"""Sends requests as spans over OTLP/HTTP, with OpenTelemetry's own encoder and client."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import set_span_in_context

from ... import __version__
from ...dashboards.answers.misses import RequestView
from .request_spans import SpanRecord, spans_of

_NS: Final = 1_000_000_000


class _Ended(SpanProcessor):
    """Keeps spans that ended until they are taken."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        """All of them, and forget them."""
        taken, self._spans = self._spans, []
        return taken


class OtlpSender:
    """Implements ``span_feed.Sender``.

    Samplers, headers, certificates and timeouts are those of OpenTelemetry's own variables.

    Args:
        url: Where to send, with its path; None: where OpenTelemetry's variables say.
    """

    def __init__(self, url: str | None) -> None:
        # Its failures are ours to tell, once for many.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._ended = _Ended()
        resource = Resource.create({
            "service.name": "kvgraph",
            "service.version": __version__,
            "service.instance.id": str(os.getpid()),
        })  # fmt: skip
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("kvgraph", __version__)

    def send(self, requests: Sequence[RequestView]) -> bool:
        """Send a trace of each; returns whether the receiver took them."""
        for request in requests:
            self._make(spans_of(request))
        spans = self._ended.take()
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """End what is under way, retries included."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, told: Sequence[SpanRecord]) -> None:
        """Make spans: the first is the parent of the others."""
        first, *children = told
        parent = self._tracer.start_span(
            first.name, attributes=_known(first.attributes), start_time=_ns(first.begin)
        )
        context = set_span_in_context(parent)
        for each in children:
            span = self._tracer.start_span(
                each.name, context, attributes=_known(each.attributes), start_time=_ns(each.begin)
            )
            span.end(_ns(each.end))
        parent.end(_ns(first.end))


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _ns(at: float) -> int:
    return round(at * _NS)
