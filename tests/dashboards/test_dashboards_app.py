"""The HTTP surface: what it answers, and what it refuses."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import psutil
import pytest
from fastapi.testclient import TestClient
from hand_clock import Clock
from kvgraph.advisor.page.status import log_totals
from kvgraph.advisor.shadows.runner import ShadowRunner
from kvgraph.dashboards.metrics import cut
from kvgraph.dashboards.server import HttpServer, OddRequestFilter, TimeoutProtocol
from kvgraph.dashboards.source import BusyError, LogTotals, SidecarStatus
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import (
    AdviceApplied,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestHeld,
    RequestReleased,
    RequestStarted,
    TierReport,
)
from page_app import create_app, engine_status, sidecar_status
from prometheus_client.parser import text_string_to_metric_families
from small_world import page_over
from wire_keys import pack

BIG = (1 << 64) - 1
TIERS = TierReport(
    bytes_per_block=1000, warm_blocks=30, warm_capacity=40, cold_blocks=5, cold_capacity=60,
    spilled=70, spill_lost=1, spill_failed=2, passed_over=80, demoted=6, dropped=3, loaded=20,
    load_failed=4, stalls=9, stall_s=1.5, recomputed=7, prefetched=10, prefetch_useful=6,
    prefetch_wasted=2, prefetch_cancelled=11, load_bytes_per_s=3e9, spill_bytes_per_s=2e9,
    prefill_tokens_per_s=5e3,
)  # fmt: skip
NASTY = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "javascript:alert(1)",
    'a"}\n# HELP forged x\nforged 1',
    "../../etc/passwd",
    "\u202egnp.exe",
    "🦆",
    "back\\slash",
    "line\u2028separator",
    "a\0b",
]


TOKEN = "a token that nobody guesses"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


class Source:
    """A graph with three blocks and a session of each name."""

    def __init__(self, names: list[str]) -> None:
        self.graph = KVCacheGraph()
        self.healthy = True
        self.shadows = ShadowRunner(self.graph, time.monotonic)
        self.page = page_over(self.graph)
        hello = EngineHello(names[0], names[0], 16, 100, names[0])
        applied = AdviceApplied(3, 7, 1, 0, 0, 2)
        self.graph.apply("e1", [hello, Pressure(1, 1, 1, 1, 1), applied, TIERS])
        self.graph.apply("e1", [BlocksStored(pack(1, 2, BIG), None, 16, names[0])])
        for index, name in enumerate(names):
            self.graph.apply("e1", [BlocksStored(pack(100 + index), None, 16, name)])

    def is_healthy(self) -> bool:
        return self.healthy

    def not_ready(self) -> str | None:
        return None if self.healthy else "an engine to list its blocks"

    def totals(self) -> LogTotals:
        return log_totals(self.graph.tables, self.shadows)

    def status(self) -> SidecarStatus:
        stats = self.graph.stats()
        known, hello = stats.engines["e1"], stats.engines["e1"].hello
        named = {"name": hello.engine, "model": hello.model, "version": hello.version}
        engine = engine_status(self.graph, "e1", gaps=2, resyncs=1, tiers=known.tiers, **named)
        return sidecar_status(
            self.graph, engine, config={"error": None},
            counters={"ingest": {"messages": 12}, "graph": stats.counters},
            snapshot={"path": None, "age_s": 3.0, "error": None},
        )  # fmt: skip


@pytest.fixture
def source() -> Source:
    return Source(["chat", *NASTY])


@pytest.fixture
def client(source: Source) -> TestClient:
    app = create_app(source, {"127.0.0.1", "localhost"}, TOKEN)
    return TestClient(app, "http://127.0.0.1:8000", headers=AUTHORIZED)


def test_health_and_readiness_tell_a_stalled_sidecar(client: TestClient, source: Source) -> None:
    assert client.get("/healthz").status_code == client.head("/healthz").status_code == 200
    assert client.get("/readyz").json() == {"status": "ready"}
    source.healthy = False
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (503, {"status": "stalled"})
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()["for"]) == (503, "an engine to list its blocks")


@pytest.mark.parametrize("path", ["/health", "/live", "/livez", "/ping", "/ready", "/readyz"])
def test_probes_go_by_several_names(client: TestClient, source: Source, path: str) -> None:
    assert client.get(path).status_code == client.head(path).status_code == 200
    source.healthy = False
    assert client.get(path).status_code == client.head(path).status_code == 503


def test_status_names_engines_and_what_they_did(client: TestClient) -> None:
    status = client.get("/status").json()
    (engine,) = status["engines"]
    assert engine["graph"]["resident"] == 3 + 1 + len(NASTY)
    assert engine["graph"]["applied"]["dropped"] == 2
    assert engine["graph"]["hello"]["block_size"] == 16
    assert status["counters"]["ingest"]["messages"] == 12
    assert engine["tiers"] == msgspec.structs.asdict(TIERS)


def test_a_block_tells_where_its_copies_are(client: TestClient, source: Source) -> None:
    assert client.get("/blocks/1/explain").json()["copies"] == "none yet"
    source.graph.apply("e1", [BlocksSpilled(pack(1), tier, 1000) for tier in (2, 4)])
    assert client.get("/blocks/1/explain").json()["copies"] == "warm and cold on e1"


@pytest.mark.parametrize("key", [str(BIG), hex(BIG), "0XFFFFFFFFFFFFFFFF"])
def test_a_block_is_found_by_a_key_which_javascript_can_hold(client: TestClient, key: str) -> None:
    answer = client.get(f"/blocks/{key}/explain").json()
    assert answer["id"] == "0xffffffffffffffff"
    assert set(answer["terms"]) >= {"age", "degree", "importance"}


@pytest.mark.parametrize(
    "key", ["-1", "1.5", "0x", "0xg", "1_0", "abc", "%20", "nan", str(1 << 64), "٣", "0" * 23]
)
def test_what_is_no_key_is_refused(client: TestClient, key: str) -> None:
    answer = client.get(f"/blocks/{key}/explain")
    if key == "0" * 23:
        assert answer.status_code == 404  # a long way to write 0, which nobody stored
    else:
        assert answer.status_code == 400
        assert "a block key is" in answer.json()["detail"]


@pytest.mark.parametrize(
    "path",
    [
        f"/blocks/{'1' * 100}/explain",
        f"/sessions/{'x' * 300}/explain",
        f"/sessions/chat/explain?tenant={'x' * 300}",
    ],
)
def test_parameters_out_of_bounds_are_refused(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 422
    assert len(answer.text) < 300


def test_the_root_says_what_there_is(client: TestClient) -> None:
    """The engine's log names this address."""
    answer = client.get("/")
    assert answer.status_code == 200
    for path in ("/healthz", "/status", "/metrics"):
        assert path in answer.json()["see"]
        assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/blocks/77/explain", "/sessions/nobody/explain", "/nope", "/../etc/passwd", "/docs",
     "/%2e%2e/%2e%2e/etc/passwd"],
)  # fmt: skip
def test_the_unknown_is_404(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["detail"]


@pytest.mark.parametrize("name", ["chat", *NASTY])
def test_any_session_name_is_text(client: TestClient, name: str) -> None:
    answer = client.get(f"/sessions/{quote(name, safe='')}/explain")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["session"] == name


@pytest.mark.parametrize("name", NASTY)
def test_metrics_stay_valid_whatever_an_engine_is_called(name: str) -> None:
    client = TestClient(create_app(Source([name]), {"127.0.0.1"}, TOKEN), "http://127.0.0.1")
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "forged" not in families
    (info,) = families["kvgraph_engine_info"].samples
    assert info.labels["name"] == name


def test_engines_whose_long_ids_begin_alike_are_two_series() -> None:
    ids = [f"kv:tcp://vllm-{'a' * 60}-{number}.vllm.svc.cluster.local:5557" for number in (0, 1)]
    labels = {cut(each) for each in ids}
    assert len(labels) == 2
    assert {len(each) for each in labels} == {64}
    assert cut("kv:tcp://127.0.0.1:5557") == "kv:tcp://127.0.0.1:5557"


def test_metrics_are_few_and_tell_what_matters(client: TestClient) -> None:
    text = client.get("/metrics").text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    told = [([v for label, v in s.labels.items() if label != "engine"], s) for s in samples]
    values = {(s.name, *labels): s.value for labels, s in told}
    assert len(samples) < 110
    assert values["kvgraph_blocks",] == 4 + len(NASTY)
    assert values["kvgraph_ranking_age_seconds",] == 0.3
    assert values["kvgraph_engine_state", "synced"] == 1
    assert values["kvgraph_sequence_gaps_total",] == 2
    assert values["kvgraph_ingest_total", "messages"] == 12
    assert values["kvgraph_tier_blocks", "warm"] == 30
    assert values["kvgraph_tier_capacity_blocks", "cold"] == 60
    assert values["kvgraph_tier_events_total", "passed_over"] == 80
    assert values["kvgraph_tier_bytes_total", "load"] == (20 + 10) * 1000
    assert values["kvgraph_tier_bytes_per_second", "spill"] == 2e9
    assert values["kvgraph_stall_seconds_total",] == 1.5


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[::1]", "127.0.0.1@evil", "a b"]
)
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    assert client.get("/status", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:1"])
def test_an_own_host_is_served(client: TestClient, host: str) -> None:
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "file://"])
def test_a_foreign_origin_is_refused(client: TestClient, origin: str) -> None:
    answer = client.get("/status", headers={"Origin": origin})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def serving(source: Source) -> HttpServer:
    server = HttpServer(create_app(source, {"127.0.0.1"}, TOKEN), "127.0.0.1", 0)
    server.start()
    return server


@pytest.fixture
def server(source: Source) -> Iterator[HttpServer]:
    server = serving(source)
    yield server
    server.stop()


def test_a_body_of_a_hundred_megabytes_is_not_kept(server: HttpServer) -> None:
    """It is refused by its head, and what follows is let go or cut off."""
    before = psutil.Process().memory_info().rss
    head = b"POST /status HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000\r\n\r\n"
    with connection(server.url) as client:
        client.settimeout(10)
        client.sendall(head)
        with contextlib.suppress(OSError):
            for _ in range(100):
                client.sendall(b"x" * 1_000_000)
        with contextlib.suppress(ConnectionResetError):
            answer = client.recv(65536)
            assert answer.split(b" ", 2)[1] == b"413"
    assert psutil.Process().memory_info().rss - before < 30_000_000


def connection(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def raw(url: str, request: bytes) -> bytes:
    with connection(url) as asking:
        asking.sendall(request)
        answer = b""
        while chunk := asking.recv(65536):
            answer += chunk
    return answer


def test_a_server_that_is_stopped_ends(source: Source) -> None:
    for pause in (0, 0.05):
        server = serving(source)
        time.sleep(pause)
        server.stop()
        assert not server.is_serving
    server = serving(source)
    assert b"200 OK" in raw(server.url, HEALTH)
    server.stop()
    with pytest.raises(OSError, match="refused"):
        raw(server.url, HEALTH)


@pytest.mark.parametrize(
    "path",
    [
        "/blocks/1/explain",
        "/sessions/chat/explain",
        "/memories/m-17/explain",
        "/waiting",
        "/blocks/nonsense/explain",
    ],
)
@pytest.mark.parametrize(
    "header", [None, "", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", "Bearer \u00e4"]
)
def test_names_and_blocks_need_the_token(source: Source, path: str, header: str | None) -> None:
    client = TestClient(create_app(source, {"127.0.0.1"}, TOKEN), "http://127.0.0.1")
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in answer.text
    assert "chat" not in answer.text


def test_health_status_and_metrics_need_no_token_and_name_no_caller(source: Source) -> None:
    client = TestClient(create_app(source, {"127.0.0.1"}, TOKEN), "http://127.0.0.1")
    for key in range(100, 110):
        asked = RequestStarted(f"r{key}", pack(key), 16, 0, 16, "wanda", "acme-corp")
        source.graph.apply("e1", [asked])
    source.graph.apply("e1", [RequestHeld("of wanda", 7, "wanda", "acme-corp")])
    for path in ("/healthz", "/status", "/metrics"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert "wanda" not in answer.text
        assert "acme" not in answer.text


def test_who_waits_is_listed_by_request(client: TestClient, source: Source) -> None:
    assert client.get("/waiting").json() == {}
    source.graph.apply("e1", [RequestHeld("cmpl-a-0", 7, "s"), RequestHeld("cmpl-b-0", 7)])
    source.graph.apply("e1", [RequestReleased("cmpl-a-0", 1.0, "room")])
    ((name, seconds),) = client.get("/waiting").json().items()
    assert name == "cmpl-b-0"
    assert 0 <= seconds < 60


def test_too_many_questions_are_answered_with_503(client: TestClient, source: Source) -> None:
    def busy(*_: object) -> dict[str, Any]:
        raise BusyError("many ask", 15)

    source.graph.explain = busy  # type: ignore[method-assign]
    answer = client.get("/blocks/1/explain")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "15")
    assert answer.json() == {"detail": "many ask; try again in 15 s"}


@pytest.fixture
def impatient(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> HttpServer:
    """A server whose deadline is a second."""
    monkeypatch.setattr(TimeoutProtocol, "deadline_s", 1.0)
    return server


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
QUESTION = (
    f"GET /blocks/1/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
).encode()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /healthz HTT",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000000\r\n\r\nx",
        HEALTH.replace(b"Connection: close\r\n", b"") + b"GET /hea",
    ],
)
def test_a_client_that_does_not_end_its_request_is_cut(impatient: HttpServer, sent: bytes) -> None:
    with connection(impatient.url) as silent:
        silent.sendall(sent)
        silent.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(65536):
                pass


@pytest.mark.parametrize("end", [b"-5\r\nabcde\r\n", b"f" * 30 + b"\r\n", b"0\r\n\x00: 1\r\n\r\n"])
def test_what_is_no_http_fills_no_log(
    impatient: HttpServer, end: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for path in (b"healthz", b"nowhere"):
        head = b" HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        with contextlib.suppress(ConnectionResetError):
            raw(impatient.url, b"POST /" + path + head + end)
    assert raw(impatient.url, HEALTH).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_a_kind_of_odd_requests_is_a_line_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    odd, log = OddRequestFilter(clock), logging.getLogger("tests.uvicorn")
    log.addFilter(odd)
    for _ in range(3):
        for _ in range(50):
            log.warning("Invalid HTTP request received.")
            log.warning("Unsupported upgrade request.")
        clock.now += 11.0
    try:
        raise RuntimeError("ours")
    except RuntimeError:
        log.exception("Exception in ASGI application")
        log.exception("Exception in ASGI application")
    assert Counter(each.getMessage() for each in caplog.records) == {
        "Invalid HTTP request received.": 3,
        "Unsupported upgrade request.": 3,
        "Exception in ASGI application": 2,
    }


def test_a_client_that_does_not_read_is_cut(
    impatient: HttpServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source.graph, "explain", lambda *_: {"nodes": ["x" * 1000] * 20_000})
    with connection(impatient.url) as slow:
        slow.sendall(QUESTION)
        deadline = time.monotonic() + 10
        time.sleep(0.2)
        while impatient.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not impatient.connections
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while chunk := slow.recv(1 << 20):
                received += len(chunk)
    assert received < 20_000_000, "the rest is gone with the connection"


def test_a_client_is_cut_though_the_kernel_took_its_whole_answer_in(
    impatient: HttpServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeoutProtocol, "deadline_s", 6.0)  # longer than an idle connection lasts
    monkeypatch.setattr(source.graph, "explain", lambda *_: {"nodes": ["x" * 1000] * 1_000})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = impatient.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        slow.sendall(QUESTION)
        deadline = time.monotonic() + 10
        while is_established(slow) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_established(slow), "it would wait for an answer that nobody sends"


def is_established(connection: socket.socket) -> bool:
    """Whether its peer has neither closed nor cut it, without reading from it."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1


def test_hundreds_of_silent_clients_keep_nobody_out(server: HttpServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connection(server.url))
        for _ in range(5):
            assert b"200 OK" in raw(server.url, HEALTH)
        assert server.connections <= 257


def test_one_whose_request_we_are_late_to_read_is_not_cut_as_silent(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraph.dashboards.server.MAX_CONNECTIONS", 20)
    server = HttpServer(create_app(source, {"127.0.0.1"}, TOKEN), "127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        asking = stack.enter_context(connection(server.url))
        asking.sendall(HEALTH)
        for _ in range(60):
            stack.enter_context(connection(server.url))
        server.start()  # it accepts them all before it reads from any
        assert b"200 OK" in asking.recv(65536)
    server.stop()
