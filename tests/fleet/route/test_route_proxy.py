"""The proxy before stand-ins for engines: streams, sessions, and what fails."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import httpx
import pytest
from kvgraph.advisor.fleet import engines as health
from kvgraph.advisor.fleet import proxy
from kvgraph.advisor.fleet.upstream import EngineAddress
from kvgraph.advisor.process.process import log_for_people
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed
from waiting import soon


def served(fleet: Routed) -> list[int]:
    return [len(engine.got) for engine in fleet.engines]


async def test_an_answer_is_passed_on_as_it_comes(fleet: Routed) -> None:
    for engine in fleet.engines:
        engine.hold = asyncio.Event()
    body = {"model": "m", "prompt": "hello", "stream": True}
    async with fleet.client.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.aiter_text()
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        early = await anext(chunks)
        assert early.startswith("one ")
        for engine in fleet.engines:
            assert engine.hold is not None
            engine.hold.set()
        assert early + "".join([text async for text in chunks]) == "one two three"


def named(request: int, engine: StandInEngine) -> str:
    """The session's name as vLLM reads it: in the body, else in a header."""
    head = engine.headers[request].split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return str(engine.got[request].get("session_id") or fields.get("x-session-id", ""))


async def test_a_session_stays_at_home_whoever_names_it(fleet: Routed) -> None:
    for number in range(6):
        for turn in range(3):
            if number % 2:
                await fleet.complete(f"{turn}", headers={"X-Session-ID": f"s{number}"})
            else:
                await fleet.complete(f"{turn}", session_id=f"s{number}")
    homes = [{named(at, e) for at in range(len(e.got))} for e in fleet.engines]
    assert not homes[0] & homes[1]
    assert [len(names) for names in homes] == [3, 3]
    assert fleet.proxy.router.counts == {"new": 6, "home": 12}


async def test_an_answer_says_which_engine_gave_it(fleet: Routed) -> None:
    listed = (await fleet.client.get("/fleet")).json()["engines"]
    for number in range(4):
        answer = await fleet.complete(headers={"X-Session-ID": f"s{number}"})
        (said,) = (e for e in listed if str(e["number"]) == answer.headers["x-kvgraph-engine"])
        (engine,) = (e for e in fleet.engines if e.url == said["url"])
        assert named(-1, engine) == f"s{number}"


async def test_a_chat_that_nobody_names_is_known_by_its_messages(fleet: Routed) -> None:
    chats = [[{"role": "user", "content": f"chat {number}"}] for number in range(4)]
    for turn in range(3):
        for chat in chats:
            body = {"model": "m", "messages": chat}
            await fleet.client.post("/v1/chat/completions", json=body)
            chat.append({"role": "assistant", "content": "one two three"})
            chat.append({"role": "user", "content": f"turn {turn}"})
    said = [{body["messages"][0]["content"] for body in e.got} for e in fleet.engines]
    assert [len(names) for names in said] == [2, 2]
    assert not any("session" in head.lower() for e in fleet.engines for head in e.headers)
    assert fleet.proxy.router.counts == {"new": 4, "home": 8}


async def test_callers_with_other_keys_have_other_sessions(fleet: Routed) -> None:
    for key in ("a", "b"):
        for _ in range(2):
            headers = {"X-Session-ID": "same", "Authorization": f"Bearer {key}"}
            await fleet.complete(headers=headers)
    assert fleet.proxy.router.counts == {"new": 2, "home": 2}


async def test_a_body_reaches_the_engine_as_it_came(fleet: Routed) -> None:
    body = '{"model": "m", "prompt": "é", "seed": 123456789012345678901234567890, "t": 1.10} \n'
    await fleet.client.post("/v1/completions", content=body.encode())
    got = fleet.engines[0].got + fleet.engines[1].got
    assert got[0] == json.loads(body)


async def test_what_is_not_json_is_the_engines_to_judge(fleet: Routed) -> None:
    fleet.engines[0].healthy = fleet.engines[1].healthy = True
    answer = await fleet.client.get("/v1/models")
    assert answer.json() == {"data": [{"id": "m"}]}


async def test_an_engine_that_is_gone_before_it_answered_is_replaced(fleet: Routed) -> None:
    """Twenty in flight, none fails."""
    for engine in fleet.engines:
        engine.hangs = asyncio.Event()
    asked = [asyncio.create_task(fleet.complete(f"prompt {n}")) for n in range(20)]
    await soon(lambda: sum(served(fleet)) >= 20)
    assert min(served(fleet)) > 4
    fleet.engines[0].kill()
    assert fleet.engines[1].hangs is not None
    fleet.engines[1].hangs.set()
    answers = await asyncio.gather(*asked)
    assert Counter(answer.text for answer in answers) == {"one two three": 20}
    assert fleet.proxy.counts.retried == served(fleet)[0]
    assert fleet.proxy.counts.broken == 0


async def test_an_answer_that_had_begun_is_cut_and_not_begun_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_for_people()
    async with routed([StandInEngine(), StandInEngine()]) as fleet:
        for engine in fleet.engines:
            engine.cut = True
        with pytest.raises(httpx.RemoteProtocolError):
            await fleet.complete()
        assert sum(served(fleet)) == 1
        assert fleet.proxy.counts.broken == 1
    assert "in the middle of an answer" in caplog.text
    assert "ASGI" not in caplog.text, "the server's word for it helps nobody"


async def test_sessions_of_a_dead_engine_get_new_homes_at_once(fleet: Routed) -> None:
    for number in range(6):
        await fleet.complete(session_id=f"s{number}")
    fleet.engines[0].kill()
    before = served(fleet)[0]
    for number in range(6):
        assert (await fleet.complete(session_id=f"s{number}")).text == "one two three"
    assert fleet.proxy.router.counts["home_down"] == before
    assert fleet.proxy.board.up.tolist() == [False, True]


async def test_an_engine_that_is_slow_keeps_its_requests_and_gets_no_further_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "TIMEOUT_S", 0.1)
    async with routed([StandInEngine(), StandInEngine()]) as fleet:
        slow = fleet.engines[0]
        slow.hangs, slow.silent = asyncio.Event(), True
        asked = [asyncio.create_task(fleet.complete(f"{n}")) for n in range(2)]
        await fleet.until(False, True)
        for number in range(3):
            await fleet.complete(f"later {number}")
        await asyncio.sleep(0.3)
        slow.hangs.set()
        answers = await asyncio.gather(*asked)
        assert [answer.text for answer in answers] == ["one two three"] * 2
        assert served(fleet) == [1, 4]
        assert fleet.proxy.counts.retried == 0


async def test_an_engine_that_comes_back_is_used_again(fleet: Routed) -> None:
    fleet.engines[0].kill()
    await fleet.until(False, True)
    await fleet.engines[0].start()
    await fleet.until(True, True)
    for number in range(4):
        await fleet.complete(session_id=f"s{number}")
    assert min(served(fleet)) == 2


async def test_a_lying_health_endpoint_is_believed_less_and_less(fleet: Routed) -> None:
    """It says that it is well and drops every request: no request fails, and few are tried."""
    fleet.engines[0].drops = True
    for number in range(40):
        assert (await fleet.complete(session_id=f"s{number}")).status_code == 200
        await asyncio.sleep(0.02)
    assert served(fleet)[0] <= 3
    assert served(fleet)[1] == 40


async def test_an_engine_with_another_model_gets_nothing_and_is_named() -> None:
    async with routed([StandInEngine(), StandInEngine("other")]) as fleet:
        for number in range(6):
            await fleet.complete(session_id=f"s{number}")
        status = (await fleet.client.get("/fleet")).json()
        assert served(fleet) == [6, 0]
        assert "serves other, the others m: " in status["engines"][1]["refused"]


async def test_a_request_that_kills_engines_does_not_get_them_all() -> None:
    async with routed([StandInEngine() for _ in range(5)]) as fleet:
        for engine in fleet.engines:
            engine.drops = True
        answer = await fleet.complete()
        assert answer.status_code == 502
        assert sorted(served(fleet)) == [0, 0, 0, 1, 1]


async def test_where_no_engine_is_up_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PAUSE_S", 0.5)
    async with routed([StandInEngine(), StandInEngine()]) as fleet:
        for engine in fleet.engines:
            engine.healthy = False
        await fleet.until(False, False)
        answer = await fleet.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "no engine takes requests" in answer.json()["error"]["message"]
        assert (await fleet.client.get("/healthz")).status_code == 503


async def test_a_client_that_leaves_is_told_to_the_engine(fleet: Routed) -> None:
    for engine in fleet.engines:
        engine.hangs = asyncio.Event()
    asked = asyncio.create_task(fleet.complete())
    await soon(lambda: sum(served(fleet)))
    asked.cancel()
    await soon(lambda: sum(engine.left for engine in fleet.engines))
    assert fleet.proxy.counts.left == 1
    assert fleet.proxy.board.waiting.tolist() == [0, 0]


async def test_a_client_that_leaves_in_the_middle_is_told_too(fleet: Routed) -> None:
    for engine in fleet.engines:
        engine.hold = asyncio.Event()
    body = {"model": "m", "prompt": "hello", "stream": True}
    async with fleet.client.stream("POST", "/v1/completions", json=body) as answer:
        await anext(answer.aiter_text())
    await soon(lambda: sum(engine.left for engine in fleet.engines))
    assert [each.running for each in fleet.proxy.engines.upstreams] == [0, 0]


async def test_a_drained_engine_gets_no_further_requests_and_finishes_its_own(
    fleet: Routed,
) -> None:
    for number in range(4):
        await fleet.complete(session_id=f"s{number}")
    first, second = (EngineAddress(engine.url) for engine in fleet.engines)
    fleet.proxy.engines.list_again([first._replace(drains=True), second])
    for number in range(4):
        await fleet.complete(session_id=f"s{number}")
    assert served(fleet) == [2, 6]
    assert fleet.proxy.router.counts["home_drains"] == 2
    fleet.proxy.engines.list_again([first])
    await fleet.complete(session_id="s9")
    assert served(fleet) == [3, 6]


@pytest.mark.parametrize("name", ["x" * 129, "a@b", "a/b", "a\\b"])
async def test_a_name_that_vllm_takes_is_passed_on_and_stays_home(fleet: Routed, name: str) -> None:
    for said in ({"headers": {"X-Session-ID": name}}, {"session_id": name}) * 2:
        answer = await fleet.complete(**said)
        assert answer.status_code == 200
    assert sorted(served(fleet)) == [0, 4]


async def test_a_header_of_ten_megabytes_is_refused_and_costs_nothing(fleet: Routed) -> None:
    try:
        answer = await fleet.complete(headers={"X-Session-ID": "x" * (10 << 20)})
        assert answer.status_code == 400
    except httpx.TransportError:
        pass  # it was cut while it still sent
    assert (await fleet.complete()).text == "one two three"
    assert sum(served(fleet)) == 1


async def test_a_thousand_sessions_of_one_home_do_not_stay_there_when_it_is_overloaded(
    fleet: Routed,
) -> None:
    router = fleet.proxy.router
    for number in range(1000):
        router.homes.settle(f"pinned {number}", 0, 100, 0.0)
    fleet.proxy.board.waiting[0] = 10_000_000
    await fleet.complete(session_id="s")
    assert served(fleet) == [0, 1]


async def test_engines_with_a_queue_are_measured_too(fleet: Routed) -> None:
    for engine in fleet.engines:
        engine.hangs = asyncio.Event()
    sessions = [{"session_id": f"s{number}", "stream": True} for number in range(4)]
    asked = [
        asyncio.create_task(fleet.complete(f"{n} " * 2000, **more))
        for n, more in enumerate(sessions)
    ]
    await soon(lambda: sum(served(fleet)) == len(asked))
    await asyncio.sleep(0.5)
    for engine in fleet.engines:
        assert engine.hangs is not None
        engine.hangs.set()
    await asyncio.gather(*asked)
    assert (1 / fleet.proxy.board.compute_s <= 2 * 1000 / 0.5).all()


async def test_an_engine_that_refuses_what_it_does_not_know_is_sent_nothing_of_ours(
    fleet: Routed,
) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ):
        for headers in ({}, {"X-Session-ID": "s"}, {"X-Claude-Code-Session-Id": "s"}):
            await fleet.client.post(path, json={"model": "m", **body}, headers=headers)
    for engine in fleet.engines:
        assert not {key for got in engine.got for key in got} - {
            "model", "prompt", "messages", "input",
        }  # fmt: skip
