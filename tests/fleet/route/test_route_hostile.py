"""Engines that lie, lists of engines that are none, and what one caller learns of another."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvgraph.advisor.cli import main
from kvgraph.advisor.fleet import upstream as asked_engines
from kvgraph.advisor.fleet.app import proxy_status
from kvgraph.advisor.fleet.engines import HealthWatch
from kvgraph.advisor.fleet.proxy import FleetProxy
from kvgraph.advisor.fleet.upstream import EngineAddress, SilentError, Upstream, engines_in
from kvgraph.graph.errors import ConfigError
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed
from stand_ins import all_up, answer_of, answering
from waiting import soon

ZIPPED = answer_of(200, b"none", "content-encoding: gzip")
COOKIE = answer_of(200, b"ok", "set-cookie: sid=alice; Path=/")


async def test_one_callers_cookie_reaches_no_other(single: Routed) -> None:
    (engine,) = single.engines
    engine.raw["/v1/completions"] = COOKIE
    for _ in range(2):
        async with httpx.AsyncClient(base_url=single.url, trust_env=False) as caller:
            answer = await caller.post("/v1/completions", json={"prompt": "a"})
            assert answer.headers["set-cookie"].startswith("sid=alice")
    assert len(engine.headers) == 2
    assert not any("sid=alice" in each for each in engine.headers)
    await single.complete("a", headers={"Cookie": "sid=bob"})
    assert "sid=bob" in engine.headers[-1]


async def test_a_first_look_that_fails_keeps_no_proxy_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look, failing = HealthWatch.check, [0, 1]

    async def fails_once(self: HealthWatch, upstream: Upstream) -> None:
        if upstream.number in failing:
            failing.remove(upstream.number)
            raise RuntimeError("what nobody thought of")
        await look(self, upstream)

    monkeypatch.setattr(HealthWatch, "check", fails_once)

    async with all_up(StandInEngine(), StandInEngine()):
        assert not failing


def hashing(name: str) -> StandInEngine:
    engine = StandInEngine()
    stated = 'block_size="16",num_gpu_blocks="9",prefix_caching_hash_algo'
    engine.metrics = f'vllm:cache_config_info{{{stated}="{name}"}} 1.0'
    return engine


LOST = "2026-01-01 ERROR all is lost\x1b[31m"


@pytest.mark.parametrize(
    ("engines", "field"),
    [
        ([StandInEngine(), StandInEngine(f"m\n{LOST}")], "refused"),
        ([hashing("sha256"), hashing(f"a\\n{LOST}")], "differs"),
    ],
    ids=["a model's", "a hash algorithm's"],
)
async def test_a_name_that_an_engine_says_forges_no_line(
    engines: list[StandInEngine], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever answers at an engine's address chooses it."""
    with caplog.at_level("INFO"):
        async with routed(engines) as fleet:
            await soon(lambda: "ERROR all is lost" in caplog.text)
            said = [each[field] for each in fleet_status(fleet) if each[field]]
    assert any("ERROR all is lost" in each for each in said)
    told = [each.getMessage() for each in caplog.records if "all is lost" in each.getMessage()]
    assert all(line.isprintable() for line in [*said, *told]), told


async def test_a_models_name_that_is_nested_deep_is_none(caplog: pytest.LogCaptureFixture) -> None:
    deep = b'{"data": [{"id": ' + b"[" * 1000 + b"]" * 1000 + b"}]}"
    async with routed([StandInEngine(), answering(answer_of(200, deep), "/v1/models")]) as fleet:
        await fleet.until(True, False)
        await soon(lambda: fleet_status(fleet)[1]["refused"] is not None)
        assert "nothing that it lists" in fleet_status(fleet)[1]["refused"]
    assert "Traceback" not in caplog.text


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
NO_HTTP = {
    "no chunk": CHUNKED + b"data: all that was said\r\n\r\n",
    "a chunk without its end": CHUNKED + b"11\r\nall that was saiddata: all that was said",
    "no head": b"all that was said\n",
    "more than it said": b"HTTP/1.1 200 OK\r\nx: all that was said\x00\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nx: all that was said\r\n",
}


@pytest.mark.parametrize("answer", NO_HTTP.values(), ids=NO_HTTP)
async def test_what_an_engine_answered_is_in_no_log(
    answer: bytes, single: Routed, caplog: pytest.LogCaptureFixture
) -> None:
    (engine,), (asked,) = single.engines, single.proxy.engines.upstreams
    engine.raw["/v1/completions"] = answer
    asking = asyncio.create_task(single.complete())
    await soon(lambda: bool(engine.headers))
    if answer is NO_HTTP["half a head"]:
        engine.kill()
    await soon(lambda: "dropped a request" in caplog.text or not up(single))
    status = fleet_status(single)[0]["why"]
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await soon(lambda: asked.asked == 0)
    assert ("is down" in caplog.text) == (answer is NO_HTTP["half a head"])
    assert "that was said" not in caplog.text + str(status)
    assert all(each.getMessage().isprintable() for each in caplog.records)


@pytest.mark.parametrize("status", ["101 Switching Protocols", "000 x", "099 x", "600 x", "999 x"])
async def test_a_status_that_ends_no_answer_is_none(
    status: str, fleet: Routed, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fleet.engines[0]
    answer = f"HTTP/1.1 {status}\r\ncontent-length: 2\r\n\r\n{{}}".encode()
    engine.raw["/v1/completions"] = answer
    for number in range(4):
        assert (await fleet.complete(f"{number} " * 400)).status_code == 200
    assert engine.headers, "it was asked"
    assert "Traceback" not in caplog.text


def fleet_status(fleet: Routed) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = proxy_status(fleet.proxy)["engines"]
    return engines


def up(fleet: Routed) -> bool:
    return bool(fleet.proxy.board.up.any())


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
async def test_an_answer_that_cannot_be_read_ends_no_watch(path: str) -> None:
    engine = StandInEngine()
    engine.healthy = False
    async with routed([engine]) as fleet:
        engine.raw[path], engine.healthy = ZIPPED, True
        # It need not say how large its pool is.
        await soon(lambda: up(fleet) or sum(f" {path} " in each for each in engine.headers) >= 2)
        engine.raw.clear()
        await fleet.until(True)


async def test_an_engines_answer_to_the_proxy_is_bounded_and_not_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asked_engines, "MOST_ANSWER", 1 << 16)
    packed = gzip.compress(bytes(1 << 20))
    engine = answering(answer_of(200, packed, "content-encoding: gzip"), "/metrics")
    async with all_up(engine) as fleet:  # it need not say how large its pool is
        (asked,) = fleet.proxy.engines.upstreams
        assert (await asked.ask("/metrics", 20.0)).content == packed
        engine.raw.clear()
        engine.metrics = "x" * (1 << 17)
        with pytest.raises(asked_engines.NothingAnsweredError, match="more than 0 MiB"):
            await asked.ask("/metrics", 20.0)


async def test_an_answer_that_drips_is_waited_for_no_longer_than_another() -> None:
    over = asyncio.Event()

    async def drips(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        over.set()

    server = await asyncio.start_server(drips, "127.0.0.1", 0)
    upstream = Upstream(0, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(SilentError):
        await upstream.ask("/health", 0.2)
    await upstream.close()
    await over.wait()
    server.close()


NO_ADDRESSES = [
    "http://[::1", "http://h:99999", "http://h:abc", "http://h:0", "http://h:1/?x", "http://h:1/#x",
    "ftp://h", "http://", "http://a b", "h:1", "http://h:1 drain twice",
]  # fmt: skip


@pytest.mark.parametrize("words", NO_ADDRESSES)
def test_a_line_that_is_no_address_is_named(words: str, tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text(f"http://127.0.0.1:1\n{words}\n")
    with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
        engines_in(path)


@pytest.mark.parametrize(
    "words", ["", "http://\u202e:1", f"http://{'a' * 70_000}"], ids=["none", "sign", "long"]
)
def test_the_command_line_names_it_too(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["route", words, "--port", "0"])
    assert "engine " in capsys.readouterr().err


async def test_a_list_with_one_bad_address_changes_nothing() -> None:
    proxy = FleetProxy([EngineAddress("http://127.0.0.1:1")])
    with pytest.raises(ConfigError):
        proxy.engines.list_again(
            [EngineAddress("http://127.0.0.1:2"), EngineAddress("http://\u202e:1")]
        )
    assert len(proxy.board) == len(proxy.engines.upstreams) == 1
    assert not proxy.board.draining.any()
    await proxy.close()


@pytest.mark.parametrize("field", ["model", "cache_salt", "messages", "prompt", "input", "content"])
async def test_what_is_nested_too_deep_is_the_engines_to_judge(single: Routed, field: str) -> None:
    deep = f'{{"{field}": {"[" * 900}{"]" * 900}}}'
    if field == "content":
        deep = f'{{"messages": [{{"role": "user", {deep[1:]}]}}'
    answer = await single.client.post("/v1/chat/completions", content=deep)
    assert answer.status_code == 200
    assert field in json.dumps(single.engines[0].got[0])
