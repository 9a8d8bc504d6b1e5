"""The proxy before stand-ins for engines: streams, sessions, and what fails."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from kvgraph.advisor.fleet import engines as health
from kvgraph.advisor.fleet.upstream import EngineAddress
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed
from stand_ins import TEXT, codes, hang, hold, served, status_of
from waiting import soon

STREAMED = {"model": "m", "prompt": "hello", "stream": True}


async def test_an_answer_is_passed_on_as_it_comes(fleet: Routed) -> None:
    held = hold(*fleet.engines)
    async with fleet.client.stream("POST", "/v1/completions", json=STREAMED) as answer:
        chunks = answer.aiter_text()
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        early = await anext(chunks)
        assert early.startswith("one ")
        held.set()
        assert early + "".join([text async for text in chunks]) == TEXT


def named(request: int, engine: StandInEngine) -> str:
    """The session's name as vLLM reads it: in the body, else in a header."""
    head = engine.headers[request].split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return str(engine.got[request].get("session_id") or fields.get("x-session-id", ""))


@pytest.mark.parametrize("name", ["s{}", "org/a@b\\" + "x" * 129 + "{}"], ids=["plain", "odd"])
async def test_a_session_stays_at_home_whoever_names_it(fleet: Routed, name: str) -> None:
    for number in range(6):
        said = name.format(number)
        for turn in range(3):
            by = {"headers": {"X-Session-ID": said}} if number % 2 else {"session_id": said}
            assert (await fleet.complete(f"{turn}", **by)).status_code == 200
    homes = [{named(at, e) for at in range(len(e.got))} for e in fleet.engines]
    assert not homes[0] & homes[1]
    assert [len(names) for names in homes] == [3, 3]
    assert fleet.proxy.router.counts == {"new": 6, "home": 12}


async def test_an_answer_says_which_engine_gave_it(fleet: Routed) -> None:
    listed = await status_of(fleet)
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
            chat.append({"role": "assistant", "content": TEXT})
            chat.append({"role": "user", "content": f"turn {turn}"})
    said = [{body["messages"][0]["content"] for body in e.got} for e in fleet.engines]
    assert [len(names) for names in said] == [2, 2]
    assert not any("session" in head.lower() for e in fleet.engines for head in e.headers)
    assert fleet.proxy.router.counts == {"new": 4, "home": 8}


async def test_what_has_no_body_is_passed_on(fleet: Routed) -> None:
    assert (await fleet.client.get("/v1/models")).json() == {"data": [{"id": "m"}]}


async def test_an_engine_that_is_gone_before_it_answered_is_replaced(fleet: Routed) -> None:
    """Twenty in flight, none fails."""
    hung = hang(*fleet.engines)
    asked = [asyncio.create_task(fleet.complete(f"prompt {n}")) for n in range(20)]
    await soon(lambda: sum(served(fleet)) >= 20)
    assert min(served(fleet)) > 4
    fleet.engines[0].kill()
    hung.set()
    answers = await asyncio.gather(*asked)
    assert Counter(answer.text for answer in answers) == {TEXT: 20}
    assert fleet.proxy.counts.retried == served(fleet)[0]
    assert fleet.proxy.counts.broken == 0


async def test_an_engine_that_is_slow_keeps_its_requests_and_gets_no_further_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "TIMEOUT_S", 0.1)
    async with routed([StandInEngine(), StandInEngine()]) as fleet:
        slow = fleet.engines[0]
        hung, slow.silent = hang(slow), True
        asked = [asyncio.create_task(fleet.complete(f"{n}")) for n in range(2)]
        await fleet.until(False, True)
        for number in range(3):
            await fleet.complete(f"later {number}")
        await asyncio.sleep(0.3)
        hung.set()
        assert [(await each).text for each in asked] == [TEXT] * 2
        assert served(fleet) == [1, 4]
        assert fleet.proxy.counts.retried == 0


async def test_a_lying_health_endpoint_is_believed_less_and_less(fleet: Routed) -> None:
    """It says that it is well and drops every request: no request fails, and few are tried."""
    fleet.engines[0].drops = True
    for number in range(40):
        assert (await fleet.complete(session_id=f"s{number}")).status_code == 200
        await asyncio.sleep(0.02)
    assert served(fleet)[0] <= 3
    assert served(fleet)[1] == 40


async def test_a_client_that_hangs_up_once_it_has_its_answer_did_not_leave(fleet: Routed) -> None:
    held = hold(*fleet.engines)
    for engine in fleet.engines:
        engine.pieces = ["one ", "data: [DONE]\n\n", "\n"]
    async with fleet.client.stream("POST", "/v1/completions", json=STREAMED) as answer:
        async for text in answer.aiter_text():
            if "[DONE]" in text:
                break
    assert (await status_of(fleet))[1], "the connection's end was read before this"
    held.set()
    counts = fleet.proxy.counts
    await soon(lambda: counts.answered or counts.left)
    assert (counts.answered, counts.left) == (1, 0)


@pytest.mark.parametrize("begun", [False, True], ids=["before", "in the middle of"])
async def test_a_client_that_leaves_its_answer_is_told_to_the_engine(
    fleet: Routed, begun: bool
) -> None:
    (hold if begun else hang)(*fleet.engines)
    asked = asyncio.create_task(fleet.complete(stream=True))
    await soon(lambda: sum(served(fleet)))
    if begun:
        await soon(lambda: not fleet.proxy.board.waiting.any())
    asked.cancel()
    await soon(lambda: sum(engine.left for engine in fleet.engines))
    assert fleet.proxy.counts.left == 1
    assert fleet.proxy.board.waiting.tolist() == [0, 0]
    assert [each.running for each in fleet.proxy.engines.upstreams] == [0, 0]


async def test_a_drained_engine_gets_no_further_requests_and_finishes_its_own(
    fleet: Routed,
) -> None:
    await codes(fleet, 4)
    first, second = (EngineAddress(engine.url) for engine in fleet.engines)
    fleet.proxy.engines.list_again([first._replace(drains=True), second])
    await codes(fleet, 4)
    assert served(fleet) == [2, 6]
    assert fleet.proxy.router.counts["home_drains"] == 2
    fleet.proxy.engines.list_again([first])
    await fleet.complete(session_id="s9")
    assert served(fleet) == [3, 6]


async def test_a_header_of_ten_megabytes_is_refused_and_costs_nothing(fleet: Routed) -> None:
    try:
        answer = await fleet.complete(headers={"X-Session-ID": "x" * (10 << 20)})
        assert answer.status_code == 400
    except httpx.TransportError:
        pass  # it was cut while it still sent
    assert (await fleet.complete()).text == TEXT
    assert sum(served(fleet)) == 1


async def test_engines_with_a_queue_are_measured_too(fleet: Routed) -> None:
    hung = hang(*fleet.engines)
    asked = [
        asyncio.create_task(fleet.complete(f"{n} " * 2000, session_id=f"s{n}", stream=True))
        for n in range(4)
    ]
    await soon(lambda: sum(served(fleet)) == len(asked))
    await asyncio.sleep(0.5)
    hung.set()
    await asyncio.gather(*asked)
    assert (1 / fleet.proxy.board.compute_s <= 2 * 1000 / 0.5).all()


@pytest.mark.parametrize("headers", [{}, {"X-Session-ID": "s"}, {"X-Claude-Code-Session-Id": "s"}])
async def test_an_engine_that_refuses_what_it_does_not_know_is_sent_nothing_of_ours(
    single: Routed, headers: dict[str, str]
) -> None:
    bodies = {
        "/v1/completions": {"model": "m", "prompt": "a"},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
        "/v1/responses": {"model": "m", "input": "a"},
    }
    for path, body in bodies.items():
        await single.client.post(path, json=body, headers=headers)
    assert single.engines[0].got == [*bodies.values()]
