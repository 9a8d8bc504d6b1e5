"""What the proxy sends once more, what it leaves alone, and how long it keeps a body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast
from unittest import mock

import httpx
import pytest
from kvgraph.advisor.fleet import engines, relay
from kvgraph.advisor.fleet.board import EngineBoard
from kvgraph.advisor.fleet.callers import Callers
from kvgraph.advisor.fleet.upstream import NothingAnsweredError, OwnAnswer, SilentError, Upstream
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine
from stand_ins import TEXT, all_up, answer_of, hang, hold, served
from waiting import soon


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_only_what_is_posted_there_generates(fleet: Routed, method: str) -> None:
    for engine in fleet.engines:
        engine.drops = True
    answer = await fleet.client.request(method, "/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, sum(served(fleet))) == (502, 1)


async def test_one_answer_that_breaks_costs_no_other_request(fleet: Routed) -> None:
    engine = fleet.engines[0]
    fleet.engines[1].healthy = False
    await fleet.until(True, False)
    waits = hang(engine)
    asked = asyncio.create_task(fleet.complete("a"))
    await soon(lambda: sum(served(fleet)))
    engine.hangs, engine.cut = None, True
    with pytest.raises(httpx.RemoteProtocolError):
        await fleet.complete("b")
    engine.cut, fleet.engines[1].healthy = False, True
    await asyncio.sleep(0.2)
    waits.set()
    assert (await asked).text == TEXT
    assert served(fleet) == [2, 0]
    assert fleet.proxy.counts.retried == 0


@pytest.mark.parametrize(
    ("path", "tries"),
    [
        ("/v1/load_lora_adapter", 1),
        ("/v1/chat/completions?x=1", 2),
        ("/v1/responses", 1),
        ("/v1/messages", 2),
        ("/v1/embeddings", 2),
        ("/v1/messages/count_tokens", 2),
        ("/v2/rerank", 2),
        ("/v1/audio/transcriptions", 2),
    ],
)
async def test_what_was_sent_is_sent_again_only_if_it_generates(
    fleet: Routed, path: str, tries: int
) -> None:
    for engine in fleet.engines:
        engine.drops = True
    answer = await fleet.client.post(path, json={"lora_name": "a"})
    assert sum(served(fleet)) == tries
    assert answer.status_code == 502
    if tries == 1:
        assert "may have done what it asks" in answer.json()["error"]["message"]


MCP = {"type": "mcp", "server_label": "bank", "server_url": "http://bank/mcp"}
OWN = {"type": "function", "function": {"name": "f"}}
EFFECTS: list[tuple[str, dict[str, Any] | bytes]] = [
    ("/v1/responses", {"tools": [MCP], "store": False}),
    ("/v1/responses", {"tools": [OWN, {"type": "code_interpreter"}], "store": False}),
    ("/v1/responses", {"tools": {"type": "mcp"}, "store": False}),
    ("/v1/responses", {"store": True}),
    ("/v1/responses", {"store": None}),
    ("/v1/responses", {}),
    ("/v1/responses", {"store": False, "previous_response_id": "resp_1"}),
    ("/v1/responses", {"store": False, "conversation": {"id": "c"}}),
    ("/v1/responses", {"store": False, "background": True}),
    ("/v1/responses", {"store": False, "prompt": {"id": "pmpt_1", "version": "2"}}),
    ("/v1/chat/completions", {"store": True}),
    ("/v1/chat/completions", {"store": 1}),
    ("/v1/chat/completions", {"tools": [MCP]}),
    ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("/v1/messages", {"mcp_servers": [{"type": "url", "url": "http://bank/mcp"}]}),
    ("/v1/chat/completions/batch", {}),
    ("/v1/anything", {}),
    ("/v1/responses", b'{"input": "NaN is for engines", "store": false, "temperature": NaN}'),
    ("/v1/responses", '{"tools": [{"type": "mcp"}], "store": false}'.encode("utf-16")),
]
NO_EFFECTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"store": False, "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/chat/completions", {"tools": [OWN, {"type": "custom"}], "store": False}),
    ("/v1/messages", {"tools": [{"name": "bash", "input_schema": {}}]}),
    ("/v1/completions", {"background": None}),
    ("/v1/completions", {"prompt": "text"}),
    ("/v1/responses", {"store": False, "prompt": None}),
]


@pytest.mark.parametrize(
    ("path", "body", "repeatable"),
    [*((*each, False) for each in EFFECTS), *((*each, True) for each in NO_EFFECTS)],
)
def test_what_may_have_had_effects_is_never_repeated(
    path: str, body: dict[str, Any] | bytes, repeatable: bool
) -> None:
    data = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
    assert Callers().read("POST", path, [], data).repeatable is repeatable


@pytest.mark.parametrize(
    ("status", "body", "tries"),
    [
        (404, {"input": "a"}, 2),  # it was refused before anything was kept
        (503, {"input": "a"}, 1),
        (404, {"input": "a", "tools": [MCP]}, 1),
        (404, {"input": "a", "store": False}, 2),
        (503, {"input": "a", "store": False}, 2),
    ],
)
async def test_what_one_engine_refused_is_asked_of_another_unless_it_may_have_begun(
    fleet: Routed, status: int, body: dict[str, Any], tries: int
) -> None:
    for engine in fleet.engines:
        engine.raw["/v1/responses"] = answer_of(status)
    answer = await fleet.client.post("/v1/responses", json=body)
    assert answer.status_code == status
    assert sum(len(engine.headers) for engine in fleet.engines) == tries


async def test_what_no_engine_got_is_sent_to_another_one_whatever_it_is(fleet: Routed) -> None:
    fleet.engines[0].kill()
    for n in range(2):
        answer = await fleet.client.post("/v1/load_lora_adapter", json={"lora_name": f"{n}"})
        assert answer.status_code == 200
    assert served(fleet) == [0, 2]
    assert fleet.proxy.board.up.tolist() == [False, True], "at once"


async def test_what_waits_is_given_up_where_the_port_refuses_and_not_for_less(
    fleet: Routed,
) -> None:
    async def refused(*_: Any) -> OwnAnswer:
        nobody = Upstream(9, "http://localhost:1")
        try:
            return await nobody.ask("/health", 2.0)
        finally:
            await nobody.close()

    _, hung = (hang(engine) for engine in fleet.engines)
    asked = [asyncio.create_task(fleet.complete(f"{n}")) for n in range(2)]
    await soon(lambda: sum(served(fleet)) >= 2)
    first = fleet.proxy.engines.upstreams[0]
    for kind in (SilentError, NothingAnsweredError):
        first.ask = mock.AsyncMock(side_effect=kind("not refused"))
        await fleet.proxy.health.check(first)
        await asyncio.sleep(0.05)
    assert served(fleet) == [1, 1]
    first.ask = refused
    await fleet.proxy.health.check(first)
    hung.set()
    assert [(await each).text for each in asked] == [TEXT] * 2
    assert served(fleet) == [1, 2]


class Watched(bytes):
    """Bytes that say when nobody has them any more."""

    alive = 0

    def __new__(cls, data: bytes) -> Watched:
        cls.alive += 1
        return super().__new__(cls, data)

    def __del__(self) -> None:
        Watched.alive -= 1


async def test_a_body_is_kept_until_its_answer_begins(
    fleet: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = relay.read_body

    async def watched(*asked: Any) -> bytes:
        return Watched(await real(*asked))

    async def chunks() -> AsyncIterator[str]:
        body = {"model": "m", "prompt": "x" * 100_000, "session_id": "s"}
        async with fleet.client.stream("POST", "/v1/completions", json=body) as answer:
            async for text in answer.aiter_text():
                yield text

    monkeypatch.setattr(relay, "read_body", watched)
    held, hung = hold(*fleet.engines), hang(*fleet.engines)
    texts = chunks()
    first = asyncio.ensure_future(anext(texts))
    await soon(lambda: sum(served(fleet)))
    assert Watched.alive == 1
    hung.set()
    text = await first
    await asyncio.sleep(0.05)
    assert Watched.alive == 0
    held.set()
    assert text + "".join([each async for each in texts]) == TEXT


async def test_a_moment_in_which_no_engine_takes_requests_costs_time_and_no_request(
    fleet: Routed,
) -> None:
    for engine in fleet.engines:
        engine.healthy = False
    await fleet.until(False, False)
    waiting = [asyncio.create_task(fleet.complete(f"{number}")) for number in range(5)]
    await asyncio.sleep(0.5)
    assert served(fleet) == [0, 0]
    fleet.engines[1].healthy = True
    assert [(await each).status_code for each in waiting] == [200] * 5
    assert served(fleet) == [0, 5]
    assert fleet.proxy.counts.unserved == 0


def test_an_engine_that_drops_a_request_while_it_is_admitted_stays_down() -> None:
    board = EngineBoard()
    number = board.add("an engine")
    board.up[number] = False
    watch = engines.HealthWatch(board)

    class Dropping:
        """Says that it is well, and drops a request while it is asked for its metrics."""

        url, is_silent = "an engine", False

        def __init__(self, number: int) -> None:
            self.number = number

        async def ask(self, path: str, timeout_s: float) -> OwnAnswer:
            if path == "/metrics":
                watch.dropped(cast(Upstream, self), "ReadError")
            return OwnAnswer(200, b'{"data": [{"id": "m"}]}')

    asyncio.run(watch.check(cast(Upstream, Dropping(number))))
    assert not board.up[number]


ERROR = b'{"error": {"message": "EngineCore encountered an issue.", "code": 500}}'
ANSWERS = {"whole": answer_of(500, ERROR), "streamed": answer_of(200, b"data: %s\n\n" % ERROR)}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("dead", [True, False])
async def test_an_engine_whose_core_died_behind_its_server_fails_no_request(
    answer: bytes, dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "INTERVAL_S", 60.0)  # nobody looks before the request comes
    async with all_up(StandInEngine(), StandInEngine()) as fleet:
        await soon(lambda: fleet.engines[0].looks >= 2)  # at the start, and when the watch begins
        fleet.engines[0].raw["/v1/completions"] = answer
        fleet.engines[0].healthy = not dead
        got = await fleet.complete()
        assert ("EngineCore" in got.text) is not dead, "an error of the request is its own"
        assert fleet.proxy.counts.retried == dead
        assert served(fleet) == [0, int(dead)]
