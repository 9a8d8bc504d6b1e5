"""What stands before `kvgraph route` and `kvgraph memory`: hosts, methods, probes, and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from command_line import kvgraph
from kvgraph.advisor.cli import main
from kvgraph.advisor.fleet import command as route_command
from kvgraph.advisor.fleet import relay
from kvgraph.advisor.fleet.app import route_app
from kvgraph.advisor.fleet.engines import EngineRoster
from kvgraph.advisor.fleet.proxy import FleetProxy
from kvgraph.advisor.fleet.relay import BodyRoom, BodyShare, FullError
from kvgraph.advisor.fleet.upstream import EngineAddress
from kvgraph.advisor.memory import command as memory_command
from kvgraph.advisor.process.process import ApiGate, HeadDeadline, log_for_people
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine
from kvgraph_bench.serving.listening import free_port, listening
from stand_ins import TEXT, all_up, hold
from starlette.routing import Router
from waiting import soon

LOCAL = ["127.0.0.1"]


@contextlib.asynccontextmanager
async def fronted(hosts: list[str] | None) -> AsyncIterator[tuple[ApiGate, httpx.AsyncClient]]:
    """A proxy before one engine, as the command serves it, and a client of it."""
    engine = StandInEngine()
    await engine.start()
    front = ApiGate(route_app(FleetProxy([EngineAddress(engine.url)])), hosts)
    async with (
        listening(front, "on") as url,
        httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield front, client
    engine.kill()


@pytest.mark.parametrize("method", ["TRACE", "PROPFIND", "get", "M-SEARCH", "CONNECT"])
@pytest.mark.parametrize("path", ["/v1/models", "/fleet", "/health"])
async def test_other_methods_than_those_of_apis_are_refused(method: str, path: str) -> None:
    async with fronted(LOCAL) as (_, client):
        at = client.base_url
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 15)
        assert head.startswith(b"HTTP/1.1 405")
        assert b"allow: get, head, post" in head.lower()
        writer.close()


async def test_a_name_that_is_not_allowed_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = [
        (400, {"Host": "evil.example:80"}),
        (400, {"Host": "evil.example:80"}),
        (400, {"Host": "x\x1b[31m"}),
        (200, {"Host": "LLM.example.com", "Origin": "https://llm.example.com"}),
        (200, {"Host": "llm.example.com.:443"}),
        (403, {"Host": "llm.example.com", "Origin": "https://evil.example"}),
    ]
    with caplog.at_level(logging.WARNING):
        async with fronted([*LOCAL, "llm.example.com"]) as (_, client):
            for status, headers in asked:
                answer = await client.get("/v1/models", headers=headers)
                assert answer.status_code == status, headers
    assert caplog.text.count("'evil.example:80' is refused") == 1
    assert "--allowed-host" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("name", ["http://a", "a:80", "", "a b", "a/b", "*"])
@pytest.mark.parametrize("command", ["route", "memory"])
def test_what_is_no_name_of_a_host_is_refused(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--budget", "100"] if command == "memory" else []
    with pytest.raises(SystemExit):
        main([command, "http://127.0.0.1:1", *more, "--allowed-host", name])
    assert "--allowed-host" in capsys.readouterr().err


@pytest.mark.parametrize("command", [route_command, memory_command])
def test_a_free_port_is_named_in_the_log(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served: list[int] = []

    async def serve_at(app: Router, host: str, port: int, hosts: list[str]) -> None:
        async with app.lifespan_context(app):
            served.append(port)

    monkeypatch.setattr(command, "serve_at", serve_at)
    words = ["route"] if command is route_command else ["memory", "--budget", "100"]
    with caplog.at_level(logging.INFO):
        assert kvgraph(*words, "http://127.0.0.1:1", "--port", "0").returncode == 0
    assert served[0] > 0
    assert f"at http://127.0.0.1:{served[0]}" in caplog.text.replace("behind", "at")


@pytest.mark.parametrize("probe", ["/health", "/healthz", "/ping", "/ready", "/readyz"])
async def test_probes_are_answered_under_any_name_and_hear_first_that_it_ends(probe: str) -> None:
    async with fronted(LOCAL) as (front, client):
        async with asyncio.timeout(15):
            while (await client.get(probe, headers={"Host": "10.1.2.3"})).status_code != 200:
                await asyncio.sleep(0.02)
        front.leaving = True
        assert (await client.get(probe)).status_code == 503
        assert (await client.get("/v1/models")).status_code == 200, "it serves all the same"


@pytest.mark.parametrize("probe", ["/live", "/livez"])
async def test_it_lives_without_engines_and_until_its_end(probe: str) -> None:
    """A restart would bring no engine back."""
    proxy = FleetProxy([EngineAddress("http://127.0.0.1:1")])
    front = ApiGate(route_app(proxy), LOCAL)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(front), base_url="http://127.0.0.1"
    ) as client:
        assert (await client.get("/readyz")).status_code == 503
        front.leaving = True
        for method in ("GET", "HEAD"):
            answer = await client.request(method, probe, headers={"Host": "10.1.2.3"})
            assert answer.status_code == 200
    await proxy.close()


async def test_a_pipe_in_the_place_of_the_list_of_engines_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To read it would hold the loop up, and every request."""
    file, listed, address = tmp_path / "engines", list[Any](), EngineAddress("http://127.0.0.1:1")
    file.write_text("http://127.0.0.1:1\n")

    monkeypatch.setattr(route_command, "_REREAD_S", 0.01)
    monkeypatch.setattr(EngineRoster, "list_again", lambda _, engines: listed.append(engines))
    rereading = asyncio.create_task(route_command._reread(FleetProxy([address]), file))
    try:
        await asyncio.sleep(0.05)  # the file was looked at once
        file.unlink()
        os.mkfifo(file)
        threading.Thread(target=lambda: file.write_text("http://a:1\n"), daemon=True).start()
        await soon(lambda: "is no regular file" in caplog.text or listed[1:])
        file.unlink()
        file.write_text("http://b:1\n")
        await soon(lambda: listed[1:])
    finally:
        rereading.cancel()
    assert listed == [[address], [EngineAddress("http://b:1")]]


@pytest.mark.parametrize(("command", "twice"), [("route", False), ("memory", True)])
async def test_a_service_that_is_told_to_stop_finishes_what_runs(command: str, twice: bool) -> None:
    """Told once, it ends when probes will have heard of it, seconds later; told twice, at once."""
    if command == "memory":
        pytest.importorskip("bm25s")
    engine = StandInEngine()
    await engine.start()
    held = hold(engine)
    port = free_port()
    more = ["--budget", "100"] if command == "memory" else ["--no-sidecars"]
    words = [sys.executable, "-m", "kvgraph", command, engine.url, *more, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*words)
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        async with asyncio.timeout(120):
            while await probed(client) != 200:
                assert process.returncode is None
                await asyncio.sleep(0.1)
        body = {"model": "m", "prompt": "a"}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await soon(lambda: engine.got)
        process.send_signal(signal.SIGTERM)
        while await probed(client) != 503:
            await asyncio.sleep(0.02)
        async with httpx.AsyncClient(base_url=url, trust_env=False) as late:
            assert (await late.get("/v1/models")).status_code == 200
        if twice:
            process.send_signal(signal.SIGTERM)
        held.set()
        assert (await running).text == TEXT
    async with asyncio.timeout(60):
        await process.wait()
    engine.kill()


async def probed(client: httpx.AsyncClient) -> int:
    try:
        return (await client.get("/health")).status_code
    except httpx.TransportError:
        return 0


def test_room_for_bodies_is_bounded_and_large_ones_leave_some() -> None:
    room = BodyRoom(8 << 20)
    large = [BodyShare(room) for _ in range(3)]
    for each in large:
        each.take(2 << 20)
    with pytest.raises(FullError):
        BodyShare(room).take(2 << 20)
    small = BodyShare(room)
    small.take(1 << 20)
    with pytest.raises(FullError):
        small.take(1)
    for each in (*large, *large, small):
        each.release()
    assert room.taken == 0


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n"


async def begun(
    fleet: Routed, size: int, body: bytes, **more: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request with the beginning of a body of so many bytes, or all of it."""
    at = httpx.URL(fleet.url)
    reader, writer = await asyncio.open_connection(at.host, at.port, **more)
    with contextlib.suppress(ConnectionError):
        writer.write(HEAD % size + body)
        await writer.drain()
    return reader, writer


async def test_bodies_that_never_end_keep_nobody_out_and_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "MOST_BODIES", 4 << 20)
    monkeypatch.setattr(relay, "BODY_S", 4.0)
    async with all_up(StandInEngine()) as fleet:
        room: Any = fleet.room
        unfinished = [await begun(fleet, 60 << 20, b"[" * (5 << 18)) for _ in range(6)]
        answers = [asyncio.create_task(r.readuntil(b"\r\n\r\n")) for r, _ in unfinished]
        await soon(lambda: sum(each.done() for each in answers) >= 4)  # there is room for two
        assert 0 < room.taken <= 4 << 20
        assert (await fleet.complete("small")).status_code == 200
        heads = await asyncio.wait_for(asyncio.gather(*answers), 30)
        full = [head for head in heads if b" 503 " in head and b"retry-after" in head]
        assert len(full) == 4
        assert sum(b" 408 " in head for head in heads) == 2, "they did not come in time"
        for _, writer in unfinished:
            writer.close()
        assert (await fleet.complete("x" * (2 << 20))).status_code == 200
        assert room.taken == 0
        assert fleet.proxy.counts.refused == 6


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_stops_reading_is_cut_and_its_request_runs_no_more(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """One that reads slowly, and reads, is not."""
    monkeypatch.setattr(HeadDeadline, "read_s", 0.5)
    engine = StandInEngine()
    engine.pieces = ["x" * 100_000] * 400
    body = b'{"model": "m", "prompt": "a", "stream": true}'
    async with all_up(engine) as fleet:
        reader, writer = await begun(fleet, len(body), body, limit=1024)
        upstream = fleet.proxy.engines.upstreams[0]
        await soon(lambda: upstream.running)
        transport: Any = writer.transport
        got, until = 0, time.monotonic() + 3
        while reads and time.monotonic() < until:  # faster than the least, slower than it comes
            got += len(await reader.read(60_000))
            await asyncio.sleep(0.02)
        assert (upstream.running == 1) or not reads
        transport.pause_reading()
        await soon(lambda: not upstream.running and fleet.proxy.counts.left == 1)
        assert fleet.proxy.counts.answered == 0
        writer.close()


def test_odd_requests_are_a_line_of_each_kind_in_a_proxys_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uvicorns = logging.getLogger("uvicorn.error")
    # Whatever servers of other tests made of it, whose log level stays behind.
    caplog.set_level(logging.INFO, uvicorns.name)
    as_new = {"filters": [], "handlers": [caplog.handler], "propagate": False, "disabled": False}
    for name, value in as_new.items():
        monkeypatch.setattr(uvicorns, name, value)
    log_for_people()
    for _ in range(5):
        uvicorns.warning("Invalid HTTP request received.")
    uvicorns.warning("Something else.")
    said = [each.getMessage() for each in caplog.records]
    assert said.count("Invalid HTTP request received.") <= 1
    assert said[-1] == "Something else."
