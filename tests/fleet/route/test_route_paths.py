"""The proxy passes on no path that leads past what it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from kvgraph.advisor.fleet.callers import BadRequestError, Body, Call
from kvgraph.advisor.fleet.upstream import Upstream
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine


async def asked_raw(fleet: Routed, path: str, *headers: bytes, body: bytes = b"{}") -> str:
    """The answer to a POST whose path and headers no client has put in order."""
    at = urlsplit(fleet.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: x", b"connection: close", *headers]
    writer.write(b"\r\n".join([*lines, b"content-length: %d" % len(body), b"", body]))
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer.decode()


ELSEWHERE = [
    "/v1/../../reset_prefix_cache", "/v1/./completions", "/v1/..",
    "/v1/%2e%2e/reset_prefix_cache", "/v1/.%2E/reset_prefix_cache",
    "/v1%2f..%2freset_prefix_cache", "/v1/%252e%252e/reset_prefix_cache",
    "/v1/%25252e%25252e/reset_prefix_cache", "/v1/..%5creset_prefix_cache",
    "/%761/../v1/completions", "/%761/completions",
]  # fmt: skip


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_a_path_that_leads_elsewhere_is_refused_in_words(single: Routed, path: str) -> None:
    answer = await asked_raw(single, path)
    assert answer.startswith("HTTP/1.1 400"), answer
    assert "the path " in answer
    assert single.engines[0].got == []
    assert single.proxy.counts.refused == 1
    assert single.proxy.board.waiting.tolist() == [0]


@pytest.mark.parametrize("path", ["/v1/a..b", "/v1/...", "/v1/a?q=/../b", "/tokenize", "/v1/x%20y"])
async def test_a_path_with_dots_elsewhere_is_passed_on(single: Routed, path: str) -> None:
    assert (await asked_raw(single, path)).startswith("HTTP/1.1 200")
    assert single.engines[0].headers[0].split(" ")[1] == path


async def test_a_web_socket_is_refused_in_words_and_other_upgrades_are_passed_by(
    single: Routed,
) -> None:
    url = single.url + "/v1/realtime"
    headers = {"Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABk"}
    refused = await single.client.get(url, headers={**headers, "Upgrade": "websocket"})
    assert (refused.status_code, single.engines[0].got) == (501, [])
    assert "WebSockets are not passed on" in refused.text
    answer = await single.client.post(  # as Java's client asks first
        single.url + "/v1/completions", json={"prompt": "a"}, headers={**headers, "Upgrade": "h2c"}
    )
    assert answer.status_code == 200
    for path in ("/v1/", "/pooling", "/rerank"):  # vLLM asks for no key at the last two
        assert (await single.client.post(single.url + path, json={})).status_code == 404


@pytest.mark.parametrize("base", ["http://127.0.0.1:9", "http://127.0.0.1:9/below"])
async def test_what_goes_out_is_looked_at_again(base: str) -> None:
    upstream = Upstream(0, base)
    with pytest.raises(BadRequestError, match="the path has a segment"):
        await upstream.begin(Call("POST", "/v1/../../reset_prefix_cache", [], Body(b"{}")))
    await upstream.close()


async def test_an_engine_gets_its_clients_headers_and_no_others(single: Routed) -> None:
    own = [b"X-Twice: 1", b"X-Twice: 2", b"Cookie: a=b", "X-Utf-8: é".encode()]
    latin = "X-Latin-1: é".encode("latin-1")
    assert (await asked_raw(single, "/v1/x", *own, latin)).startswith("HTTP/1.1 200")
    lines = single.engines[0].headers[0].encode("latin-1").lower().split(b"\r\n")[1:]
    named = {line for line in lines if line}
    host = b"host: " + single.engines[0].url.removeprefix("http://").encode()
    sent = {each.lower() for each in [*own, latin]}
    assert named == {host, b"content-length: 2", *sent}, "to the byte"


@pytest.mark.parametrize("size", [2, 1 << 16, 1 << 20])
@pytest.mark.parametrize("odd", [b"\xe9", b"\xc3\xa9", b"\xc3\xa9\xe9\xff\x80", b"a\tb"])
async def test_the_bytes_of_headers_and_the_body_pass_unchanged(
    single: Routed, odd: bytes, size: int
) -> None:
    numbers = b'"n": 123456789012345678901234567890, "t": 1.10'  # as no parser of ours writes them
    body = b'{%s, "a":"\xc3\xa9' % numbers + b"\\r\\n" * (size // 4) + b'"} \n'
    for _ in range(2):  # the second on the connection of the first
        answer = await asked_raw(single, "/v1/x", b"X-Odd: " + odd, body=body)
        assert answer.startswith("HTTP/1.1 200")
        head = single.engines[0].headers[-1].encode("latin-1")
        assert b"\r\nx-odd: " + odd + b"\r\n" in head
        assert single.engines[0].got[-1] == json.loads(body)


class InPieces(Body):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self.data), 8):
            yield self.data[at : at + 8]


async def test_what_follows_odd_headers_piece_by_piece_is_a_body() -> None:
    engine, said = StandInEngine(), {"a": "€" * 9}
    await engine.start()
    upstream = Upstream(0, engine.url)
    body = InPieces(json.dumps(said, ensure_ascii=False).encode())
    reply = await upstream.begin(Call("POST", "/v1/x", [(b"x-odd", b"\xe9")], body))
    assert reply.status == 200
    assert engine.got == [said]
    reply.close()
    await upstream.close()
    engine.kill()
