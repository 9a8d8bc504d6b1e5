"""Sends finished requests as OpenTelemetry traces, if an endpoint is configured."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from .. import __version__
from ..graph.errors import ConfigError
from ..graph.kvcache_graph import KVCacheGraph
from .config.sections import TracingConfig
from .page.misses import RequestView, request_view
from .process.process import RateLimitedLog
from .words.times import UnixTime

logger = logging.getLogger(__name__)

BATCH: Final = 64  # requests per message, and per hold of the graph's lock; chosen
_EVERY_S: Final = 1.0  # chosen
_LAST_WORDS_S: Final = 1.0  # time that a sidecar's end waits for the last traces; chosen


class SpanFeed:
    """Takes finished requests from the log and sends them, on its own thread."""

    def __init__(
        self,
        graph: KVCacheGraph,
        sender: OtlpSender | None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._graph = graph
        self._sender = sender
        self._unix = UnixTime(clock, wall)
        self._log = RateLimitedLog(logger, clock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-traces", daemon=True)
        self._next = 0  # the first request of the log that was not read
        self._running: list[int] = []  # read, and not ended yet
        # Requests `sent`, `dropped` by the receiver, `overtaken` (the log forgot them before they
        # could be sent), and rounds that `failed`.
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        if self._sender is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._sender is not None:
            if self._thread.is_alive():
                self._thread.join(_LAST_WORDS_S)
            self._sender.close()

    def tick(self) -> None:
        assert self._sender is not None
        while ended := self._take():
            is_taken = self._sender.send(ended)
            self.counters["sent" if is_taken else "dropped"] += len(ended)
            if not is_taken:
                self._log.warn(
                    "dropped",
                    "no traces are taken at the OTLP endpoint: requests are left out of them",
                )

    def _take(self) -> list[RequestView]:
        """Up to ``BATCH`` requests that ended, the oldest first."""
        with self._graph.lock:
            history = self._graph.tables.history
            log = history.requests
            self._running += range(max(self._next, log.first), log.next)
            known = [number for number in self._running if number >= log.first]
            missed = max(0, log.first - self._next) + len(self._running) - len(known)
            self._next = log.next
            # NaN: it runs; below 0: its end was not heard of, or not yet.
            over = (n for n in known if log.record(n)["ran"] >= 0)
            ended = list(islice(over, BATCH))
            views = [request_view(history, number, self._unix) for number in ended]
        if missed:
            self.counters["overtaken"] += missed
        taken = set(ended)
        self._running = [number for number in known if number not in taken]
        return views

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self._tick_safely()
        self._tick_safely()

    def _tick_safely(self) -> None:
        try:
            self.tick()
        except Exception as error:
            self.counters["failed"] += 1
            self._log.failed("failed", "traces could not be made", error)


_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OURS: Final = "http/protobuf"
_PATH: Final = "/v1/traces"  # of OTLP/HTTP, below a base address
_INSTALL: Final = "pip install 'kvgraph[otel]'"


def sender_for(config: TracingConfig) -> OtlpSender | None:
    """A sender, by the configuration or by OpenTelemetry's variables; None without an endpoint.
    Raises ConfigError.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if (endpoint := config.endpoint) is not None:
        try:
            return OtlpSender(endpoint.rstrip("/").removesuffix(_PATH) + _PATH)
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint = {endpoint!r} needs OpenTelemetry ({error}): {_INSTALL}"
            ) from None
    # Variables may have been set for the engine that started the sidecar: what they lack is only a
    # warning.
    named = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    return None if named is None else _by_variable(named)


def _by_variable(named: str) -> OtlpSender | None:
    spoken = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), _OURS)
    if spoken != _OURS:
        logger.warning(
            "%s is set for the protocol %s: the sidecar sends traces by %s only, and sends none",
            named,
            spoken,
            _OURS,
        )
        return None
    try:
        return OtlpSender(None)
    except ImportError as error:
        logger.warning(
            "%s is set, but OpenTelemetry is not installed (%s): no traces are sent; %s",
            named,
            error,
            _INSTALL,
        )
        return None


Span = tuple[str, float, float, dict[str, Any]]
"""Its name, begin and end in Unix seconds, and attributes; those that are None are left out."""


def spans_of(request: RequestView) -> list[Span]:
    """Return a request's own span, and then those within it.

    Names and keys are those of the HTTP API. vLLM's own traces have ``kvgraph.request``, with a
    random part added by the engine, as ``gen_ai.request.id``.
    """
    ended = request.at if request.ended_at is None else max(request.at, request.ended_at)
    attributes = {
        **_told(request, "request", "engine", "session", "tenant", "prompt_tokens", "block_size",
                "finished", "expected_pause_s"),
        **_told(request.blocks, "asked", "computed", below="blocks."),
        "kvgraph.remedies": " ".join(each.text for each in request.remedies) or None,
    }  # fmt: skip
    return [("request", request.arrived, ended, attributes), *_within(request)]


def _within(request: RequestView) -> Iterator[Span]:
    at, blocks = request.at, request.blocks
    if (wait := request.wait) is not None:
        held = _told(wait, "held_s", "sentence", below="wait.")
        held["kvgraph.wait.held_until"] = wait.until
        yield ("wait", request.arrived, at, held)
    # Lookup, load and miss take no time by the engine's account.
    found = _told(blocks, "asked", "pool", "prefetched", below="blocks.")
    yield ("lookup", at, at, found)
    if blocks.loaded:
        yield ("load", at, at, _told(blocks, "loaded", below="blocks."))
    if (miss := request.miss) is not None:
        why = _told(miss, "reason", "sentence", "key", "session", "tenant", "engine", "evicted_at",
                    below="miss.")  # fmt: skip
        yield ("miss", at, at, {**why, "kvgraph.miss.block": miss.index})


def _told(of: object, *names: str, below: str = "") -> dict[str, Any]:
    """These of an object's attributes, as a span has them."""
    return {f"kvgraph.{below}{name}": getattr(of, name) for name in names}


_NS: Final = 1_000_000_000


class OtlpSender:
    """Sends requests as spans over OTLP/HTTP, with OpenTelemetry's own encoder and client.

    Samplers, headers, certificates and timeouts are read from OpenTelemetry's variables, and so is
    the address if ``url`` is empty.
    """

    def __init__(self, url: str | None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

        class Ended(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                ended.append(span)

        # Its failures are ours to tell, once for many.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._ended = ended = deque[ReadableSpan]()  # until they are sent
        resource = Resource.create(
            {
                "service.name": "kvgraph",
                "service.version": __version__,
                "service.instance.id": str(os.getpid()),
            }
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Ended())
        self._tracer = provider.get_tracer("kvgraph", __version__)

    def send(self, requests: Sequence[RequestView]) -> bool:
        """Send a trace of each request; returns whether the receiver accepted them."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        for request in requests:
            self._make(spans_of(request))
        spans = [*self._ended]
        self._ended.clear()
        return not spans or self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Abort a transfer in progress, including retries."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _make(self, spans: Sequence[Span]) -> None:
        """Make a trace: the first span is the parent of the others."""
        from opentelemetry.trace import set_span_in_context

        context, ends = None, []
        for name, begin, end, attributes in spans:
            known = {key: value for key, value in attributes.items() if value is not None}
            span = self._tracer.start_span(name, context, attributes=known, start_time=_ns(begin))
            context = context or set_span_in_context(span)
            ends.append((span, end))
        for span, end in reversed(ends):
            span.end(_ns(end))


def _ns(at: float) -> int:
    return round(at * _NS)
