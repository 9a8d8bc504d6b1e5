"""Traces of requests, received over OTLP/HTTP and decoded."""

from __future__ import annotations

import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from http_answers import Asked, HttpAnswers
from kvgraph.advisor.config.config import load
from kvgraph.advisor.config.sections import TracingConfig
from kvgraph.advisor.page.misses import RequestView
from kvgraph.advisor.tracing import SpanFeed, sender_for
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.logs.requests import LIMIT
from kvgraph.graph.wire.events import (
    BlocksResident,
    BlocksSpilled,
    EngineHello,
    RequestFinished,
    RequestStarted,
)
from kvgraph.hooks.fake import FakeEngine
from page_sidecar import BLOCK, PageSidecar, serve_agents
from small_world import SIZE, World, pack
from waiting import until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

VARIABLES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED",
    "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Receiver:
    """An OTLP/HTTP receiver; ``status`` is what it answers, and while ``stuck`` it does not."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self.paths: set[str] = set()
        self.status = 200
        self.stuck = threading.Event()
        self.stuck.set()  # it is not
        self._server = HttpAnswers(self._take)
        self.url = self._server.url

    def _take(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        self.stuck.wait(30)
        if self.status == 200:
            self.paths.add(asked.path)
            for resource in ExportTraceServiceRequest.FromString(asked.body).resource_spans:
                self.resource = attributes(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        answer = ExportTraceServiceResponse().SerializeToString()
        return self.status, {"Content-Type": "application/x-protobuf"}, answer

    def close(self) -> None:
        self.stuck.set()
        self._server.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    opened = Receiver()
    yield opened
    opened.close()


def attributes(pairs: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}


def request_of(span: Span) -> str | None:
    found: str | None = attributes(span.attributes).get("kvgraph.request")
    return found


@pytest.fixture
def feed(receiver: Receiver, world: World) -> SpanFeed:
    sender = sender_for(TracingConfig(endpoint=receiver.url))
    return SpanFeed(world.graph, sender, lambda: world.now, lambda: world.now + 1e9)


def test_a_request_is_a_trace_with_what_it_found_and_missed(
    receiver: Receiver, world: World, feed: SpanFeed
) -> None:
    world.serve(1, 2, 3, 4)
    world.tell(BlocksSpilled(pack(3), 2, 100))
    world.evict(4, 3)
    began = world.now + 1
    name = world.serve(1, 2, 3, 4, found=2, loading=1)
    world.start(1, 2, found=2)  # runs on
    feed.tick()
    assert receiver.paths == {"/v1/traces"}
    assert receiver.resource["service.name"] == "kvgraph"
    traces: dict[bytes, list[Span]] = {}
    for span in receiver.spans:
        traces.setdefault(span.trace_id, []).append(span)
    assert len(traces) == 2
    (parent,) = [span for span in receiver.spans if request_of(span) == name]
    told = attributes(parent.attributes)
    assert (parent.name, parent.parent_span_id) == ("request", b"")
    assert told["kvgraph.session"] == "s"
    assert told["kvgraph.engine"] == "a"
    assert (told["kvgraph.prompt_tokens"], told["kvgraph.blocks.computed"]) == (4 * SIZE + 5, 1)
    assert parent.start_time_unix_nano == pytest.approx((began + 1e9) * 1e9, abs=1e6)
    assert parent.end_time_unix_nano - parent.start_time_unix_nano == pytest.approx(2e9, abs=1e6)
    children = {s.name: s for s in traces[parent.trace_id] if s.parent_span_id == parent.span_id}
    assert set(children) == {"lookup", "load", "miss"}
    assert attributes(children["lookup"].attributes)["kvgraph.blocks.pool"] == 2
    assert attributes(children["load"].attributes) == {"kvgraph.blocks.loaded": 1}
    miss = attributes(children["miss"].attributes)
    assert (miss["kvgraph.miss.reason"], miss["kvgraph.miss.block"]) == ("evicted", 3)
    assert miss["kvgraph.miss.key"] == f"{4:#018x}"
    assert "left the pool" in miss["kvgraph.miss.sentence"]
    assert feed.counters == {"sent": 2}
    feed.tick()
    assert len(receiver.spans) == 3 + 4


def test_a_request_that_waited_is_a_trace_from_its_arrival_on(
    receiver: Receiver, world: World, feed: SpanFeed
) -> None:
    late = RequestStarted("late", pack(9), 20, 0, SIZE, "s", waited_s=9.0)
    world.tell(late, RequestFinished("late", pack(9), 20, 20, "stop", "s"))
    feed.tick()
    spans = {span.name: span for span in receiver.spans}
    request, wait = spans["request"], spans["wait"]
    assert wait.parent_span_id == request.span_id
    assert wait.start_time_unix_nano == request.start_time_unix_nano
    assert wait.end_time_unix_nano - wait.start_time_unix_nano == pytest.approx(9e9, abs=1e6)
    told = attributes(wait.attributes)
    assert told["kvgraph.wait.sentence"].startswith("While it waited")
    assert "`kvgraph route`" in attributes(request.attributes)["kvgraph.remedies"]


def test_a_request_is_sent_once_at_its_end(
    receiver: Receiver, world: World, feed: SpanFeed
) -> None:
    names = [world.start(n + 1) for n in range(200)]
    feed.tick()
    assert not receiver.spans
    for name in names:
        world.tell(RequestFinished(name, pack(1), 21, 30, "stop", "s"))
    feed.tick()
    feed.tick()
    sent = [request_of(span) for span in receiver.spans]
    assert sorted(filter(None, sent)) == sorted(names)
    assert feed.counters == {"sent": 200}


def test_what_the_receiver_does_not_take_is_counted(
    receiver: Receiver, world: World, feed: SpanFeed, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    receiver.status = 400
    for number in range(3):
        world.serve(number + 1)
        feed.tick()
    assert feed.counters == {"dropped": 3}
    assert caplog.text.count("left out") == 1
    receiver.status = 200
    world.serve(9)
    feed.tick()
    assert feed.counters == {"dropped": 3, "sent": 1}


def test_what_the_log_forgets_first_is_counted(world: World, feed: SpanFeed) -> None:
    first = world.start(1)
    feed.tick()
    world.tell(*(RequestStarted(f"x{n}", pack(n + 2), 21, 0, SIZE, "s") for n in range(LIMIT + 99)))
    world.tell(RequestFinished(first, pack(1), 21, 30, "stop", "s"))
    feed.tick()
    assert feed.counters == {"overtaken": 100}


def test_a_request_that_ran_through_a_gap_is_sent_when_its_end_is_heard_of(
    receiver: Receiver, world: World, feed: SpanFeed
) -> None:
    name = world.start(1)
    feed.tick()
    world.tell(EngineHello("host:a", "model", SIZE, 100, "vllm"), BlocksResident(pack(1)))
    feed.tick()
    assert not receiver.spans
    world.end(name, 1)
    feed.tick()
    assert name in map(request_of, receiver.spans)
    assert feed.counters == {"sent": 1}


def test_a_request_whose_end_is_never_heard_of_is_counted(world: World, feed: SpanFeed) -> None:
    world.start(1)
    world.graph.forget_engine("a")
    feed.tick()
    assert feed.counters == {}
    late = (RequestStarted(f"x{n}", pack(n + 2), 21, 0, SIZE, "s") for n in range(LIMIT))
    world.tell(*late, engine="b")
    feed.tick()
    assert feed.counters == {"overtaken": 1}


class Fallible:
    def __init__(self) -> None:
        self.sent = 0
        self.closed = False

    def send(self, requests: Sequence[RequestView]) -> bool:
        if not self.sent:
            self.sent += 1
            raise ValueError("a secret prompt")
        self.sent += len(requests)
        return True

    def close(self) -> None:
        self.closed = True


def test_an_error_of_ours_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    world, sender = World(), Fallible()
    feed = SpanFeed(world.graph, sender, lambda: world.now)
    world.serve(1)
    feed.start()
    until(lambda: feed.counters["failed"])
    world.serve(2)
    feed.stop()
    assert sender.sent == 2
    assert sender.closed
    assert "ValueError" in caplog.text
    assert "secret" not in caplog.text


def counted(sidecar: PageSidecar) -> dict[str, int]:
    return dict(sidecar.get("/status")["counters"]["tracing"])


def served(sidecar: PageSidecar, what: str, names: list[str]) -> dict[str, int]:
    """Serve agents until the sidecar counts so many traces under ``what``; all counts then."""
    with FakeEngine(sidecar.endpoint, 160, BLOCK, "engine-one") as engine:
        sidecar.links(engine)
        serve_agents(engine, names, turns=2)
        until(lambda: counted(sidecar).get(what, 0) >= 2 * len(names))
    return counted(sidecar)


@pytest.fixture
def traced(socket_directory: Path, receiver: Receiver) -> Iterator[PageSidecar]:
    file = socket_directory / "kvgraph.toml"
    file.write_text(f"[tracing]\nendpoint = '{receiver.url}'\n")
    sidecar = PageSidecar(socket_directory, file)
    sidecar.start()
    yield sidecar
    sidecar.stop()


def test_a_sidecar_sends_traces(traced: PageSidecar, receiver: Receiver) -> None:
    names = [f"agent-{n}" for n in range(4)]
    assert served(traced, "sent", names) == {"sent": 8}
    sessions = {attributes(s.attributes).get("kvgraph.session") for s in receiver.spans}
    assert set(names) <= sessions
    with urllib.request.urlopen(f"{traced.url}/metrics", timeout=10) as answer:
        assert 'kvgraph_tracing_total{what="sent"} 8.0' in answer.read().decode()


def test_a_receiver_that_hangs_holds_nobody_up(
    traced: PageSidecar, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.stuck.clear()
    names = [f"agent-{n}" for n in range(4)]
    with FakeEngine(traced.endpoint, 160, BLOCK, "engine-one") as engine:
        traced.links(engine)
        for _ in range(5):
            serve_agents(engine, names, turns=2)
            with urllib.request.urlopen(f"{traced.url}/healthz", timeout=5) as answer:
                assert answer.status == 200
            time.sleep(0.4)
        until(lambda: traced.get("/status")["engines"][0]["ranking_age_s"] < 2, "it ranks no more")
    began = time.monotonic()
    traced.stop()
    assert time.monotonic() - began < 10


def test_variables_of_opentelemetry_are_heeded(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sender_for(TracingConfig()) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    world, sender = World(), sender_for(TracingConfig())
    world.serve(1)
    SpanFeed(world.graph, sender, lambda: world.now).tick()
    assert receiver.paths == {"/v1/traces"}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert sender_for(TracingConfig()) is None
    assert "http/protobuf only" in caplog.text
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert sender_for(TracingConfig(endpoint=receiver.url)) is None


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "kvgraph.advisor.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"kvgraph\[otel\]"):
        sender_for(TracingConfig(endpoint="http://127.0.0.1:4318"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert sender_for(TracingConfig()) is None
    assert "kvgraph[otel]" in caplog.text


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "grpc://x", "http://", "http://a b"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        load(None, {"tracing.endpoint": wrong})
