"""What the proxy counts as sent, held and measured, and whom it believes."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import numpy as np
import orjson
import pytest
from kvgraph.advisor.fleet import engines as health
from kvgraph.advisor.fleet import proxy as fleet_proxy
from kvgraph.advisor.fleet.board import EngineBoard
from kvgraph.advisor.fleet.callers import Callers
from kvgraph.advisor.fleet.prompts import BINARY_TOKENS, PromptReader
from kvgraph.advisor.fleet.router import FleetRouter, Holdings, RoutingRequest
from kvgraph.advisor.fleet.upstream import EngineAddress
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed
from waiting import soon

LONG = "x" * 40_000


def answer_of(status: int, body: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_engines_with_api_keys_are_not_shut_out() -> None:
    """vLLM answers 401 to whoever asks for its models without its key."""
    guarded = StandInEngine()
    guarded.raw["/v1/models"] = answer_of(401)
    async with routed([guarded, StandInEngine()]) as fleet:
        await fleet.until(True, True)
        assert [(await fleet.complete(session_id=f"s{n}")).status_code for n in range(4)] == [
            200, 200, 200, 200,
        ]  # fmt: skip


@pytest.mark.parametrize("status", [404, 500])
async def test_an_engine_that_lists_no_models_is_refused_in_words(status: int) -> None:
    bare = StandInEngine()
    bare.raw["/v1/models"] = answer_of(status, b'{"data": [{"id": "m"}]}')
    async with routed([StandInEngine(), bare]) as fleet:
        await fleet.until(True, False)
        refused = (await fleet.client.get("/fleet")).json()["engines"][1]["refused"]
        assert refused == "serves nothing that it lists, the others m: no request goes there"


async def test_another_model_does_not_take_the_place_of_one_that_is_away() -> None:
    async with routed([StandInEngine("good"), StandInEngine("other")]) as fleet:
        await fleet.until(True, False)
        fleet.engines[0].healthy = False
        await fleet.until(False, False)
        await asyncio.sleep(3 * health.INTERVAL_S)
        assert not fleet.proxy.board.up.any()
        fleet.engines[0].healthy = True
        await fleet.until(True, False)


async def test_all_engines_may_change_their_model() -> None:
    async with routed([StandInEngine("old"), StandInEngine("old")]) as fleet:
        await fleet.until(True, True)
        for engine in fleet.engines:
            engine.healthy = False
        await fleet.until(False, False)
        for engine in fleet.engines:
            engine.model, engine.healthy = "new", True
        await fleet.until(True, True)


async def test_a_model_that_nobody_serves_for_long_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "REPLACED_S", 0.5)
    async with routed([StandInEngine("gone"), StandInEngine("other")]) as fleet:
        await fleet.until(True, False)
        fleet.engines[0].kill()
        await fleet.until(False, True)


async def test_one_death_is_one_reason_to_doubt(single: Routed) -> None:
    began = time.monotonic()
    for _ in range(7):
        single.proxy.health.dropped(single.proxy.engines.upstreams[0], "one of seven in flight")
    await single.until(True)
    assert time.monotonic() - began < 5, "once, and not seven times, as long"


@pytest.mark.parametrize("status", [401, 429])
async def test_what_an_engine_refused_is_not_held_there(single: Routed, status: int) -> None:
    kept, other = "k" * 9_000, "o" * 9_000
    single.proxy.board.pool[0] = 4_000
    await single.complete(kept, session_id="kept")
    single.engines[0].raw["/v1/completions"] = answer_of(status)
    for number in range(20):
        answer = await single.complete(other + str(number), session_id=f"s{number}")
        assert answer.status_code == status
    board, homes = single.proxy.board, single.proxy.router.homes
    assert (len(homes), int(board.live[0])) == (1, 2_250)
    assert homes.return_rate == 0.5, "one began, and none came back"
    assert len(single.proxy.pools) == 8, "of what was answered; it was not displaced"


async def test_a_retry_is_no_return(fleet: Routed) -> None:
    fleet.engines[0].drops = True
    for number in range(6):
        await fleet.complete(session_id=f"s{number}")
    homes = fleet.proxy.router.homes
    assert fleet.proxy.counts.retried >= 1
    assert homes.return_rate == pytest.approx(1 / 7)
    assert fleet.proxy.board.live.tolist() == [0, 6 * 2]


async def test_an_error_in_the_form_of_a_stream_says_nothing_of_speed(single: Routed) -> None:
    before = float(single.proxy.board.compute_s[0])
    body = b'data: {"error": {"message": "no"}}\n\n'
    single.engines[0].raw["/v1/completions"] = answer_of(200, body)
    await single.complete(LONG, stream=True)
    assert float(single.proxy.board.compute_s[0]) == before
    assert len(single.proxy.router.homes) == 0


def test_what_generates_nothing_is_no_turn() -> None:
    callers = Callers()
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    for path in ("/tokenize", "/v1/load_lora_adapter", "/v1/embeddings"):
        assert callers.read("POST", path, [], body).turn is None
    told = callers.read("POST", "/v1/messages", [(b"X-Session-ID", b"s")], body)
    assert told.turn is not None
    assert told.turn.name == "s"
    assert told.body.data == body, "that API has no field for it"


def test_a_response_in_the_background_is_sent_once() -> None:
    body = b'{"model": "m", "input": "hello", "background": true}'
    assert not Callers().read("POST", "/v1/responses", [], body).repeatable


def test_anthropics_keys_tell_callers_apart_too() -> None:
    callers, body = Callers(), b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    sessions = set()
    for key in (b"one", b"two"):
        headers = [(b"x-api-key", key), (b"x-session-id", b"same")]
        turn = callers.read("POST", "/v1/messages", headers, body).turn
        assert turn is not None
        sessions.add(turn.session)
    assert len(sessions) == 2


def test_a_session_has_its_name_of_somebody_or_of_nobody() -> None:
    callers, body = Callers(), b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}'
    for headers in ([(b"x-session-id", b"~ s")], []):
        turn = callers.read("POST", "/v1/chat/completions", headers, body).turn
        assert turn is not None
        assert turn.is_named == bool(headers)
        callers = Callers()


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_400_000}}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, BINARY_TOKENS),
        ({"prompt": [[1] * 4_000] * 8}, 32_000),
        ({"prompt": ["x" * 16_000] * 8}, 32_000),
        ({"tools": [{"name": LONG}], "messages": [{"role": "user", "content": "a"}]}, 10_000),
        ({"system": LONG, "messages": [{"role": "user", "content": "a"}]}, 10_000),
    ],
)
def test_prompts_have_about_their_size(body: dict[str, Any], tokens: int) -> None:
    assert PromptReader().read(body, b"").tokens == pytest.approx(tokens, rel=0.05)


def test_a_context_that_shrank_costs_no_less_than_nothing() -> None:
    board = EngineBoard()
    home, other = board.add("home"), board.add("other")
    router = FleetRouter(board)
    router.route(RoutingRequest("s", 100_000), Holdings(), 0.0)
    board.waiting[home] = 60_000
    held = np.array([100_000, 0])
    choice = router.choose(RoutingRequest("s", 8_000), Holdings(held, held))
    assert router.costs(RoutingRequest("s", 8_000), Holdings(held, held)).min() >= 0.0
    assert choice.engine == other


def test_an_engine_that_began_slowly_gets_requests_again() -> None:
    board = EngineBoard()
    cold, warm = board.add("cold"), board.add("warm")
    router = FleetRouter(board)
    board.measured(cold, 600, 20.0)
    board.measured(warm, 600, 0.03)
    chosen = [router.route(RoutingRequest(n, 2_000), Holdings(), 0.0).engine for n in range(40)]
    assert chosen.count(cold) >= 4


async def test_an_engine_off_the_list_is_forgotten_and_may_come_back(fleet: Routed) -> None:
    proxy, (one, two) = fleet.proxy, fleet.engines
    await fleet.until(True, True)
    proxy.engines.list_again([EngineAddress(one.url)])
    await fleet.until(True, False)
    assert [each["url"] for each in (await fleet.client.get("/fleet")).json()["engines"]] == [
        one.url
    ]
    assert len(proxy.engines.watched) == 1
    proxy.engines.list_again([EngineAddress(one.url), EngineAddress(two.url)])
    await fleet.until(True, True)
    assert len(proxy.engines.upstreams) == 2


async def test_waiting_for_an_engine_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_proxy, "PAUSE_S", 0.3)
    async with routed([StandInEngine()]) as fleet:
        fleet.engines[0].healthy = False
        await fleet.until(False)
        answer = await fleet.complete()
        assert answer.json()["error"]["message"] == (
            "no engine takes requests: 1 down, 0 draining, 0 refused; GET /fleet says why"
        )
        assert len(fleet.proxy.decided_s) == 0


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_an_engine_that_refuses_quickly_does_not_get_them_all(status: int) -> None:
    bad = StandInEngine()
    bad.raw["/v1/completions"] = answer_of(status)
    async with routed([bad, StandInEngine()]) as fleet:
        await fleet.until(True, True)
        answers = [await fleet.complete(session_id=f"s{number}") for number in range(30)]
        failed = sum(answer.status_code != 200 for answer in answers)
        assert failed == (status == 500), "one error may be the request's own"
        assert len(bad.headers) <= 8
        assert fleet.proxy.counts.turned_away == len(bad.headers) - failed


async def test_a_session_leaves_a_home_that_turned_bad(fleet: Routed) -> None:
    await fleet.complete(session_id="s")
    home = next(engine for engine in fleet.engines if engine.got)
    home.raw["/v1/completions"] = answer_of(500)
    codes = [(await fleet.complete(session_id="s")).status_code for _ in range(4)]
    assert codes.count(200) >= 3
    assert codes[-1] == 200


async def test_what_all_engines_refuse_is_answered_as_they_do() -> None:
    bad = [StandInEngine(), StandInEngine(), StandInEngine()]
    for engine in bad:
        engine.raw["/v1/completions"] = answer_of(429, b"later")
    async with routed(bad) as fleet:
        await fleet.until(True, True, True)
        answer = await fleet.complete()
        assert (answer.status_code, answer.text) == (429, "later")
        assert sum(len(engine.headers) for engine in bad) == 2, "one other, and not all"


def test_a_refused_turn_does_not_undo_a_later_one() -> None:
    board = EngineBoard()
    board.add("a")
    homes = FleetRouter(board).homes
    homes.settle("s", 0, 1_000, 0.0)
    first = homes.of("s")
    homes.settle("s", 0, 3_000, 1.0)
    homes.put_back("s", first, None)
    home = homes.of("s")
    assert home is not None
    assert (home.tokens, int(board.live[0]), homes.return_rate) == (3_000, 3_000, 1.0)


async def test_a_response_begins_with_its_first_token() -> None:
    engine = StandInEngine()
    engine.pieces = [
        "event: response.created\ndata: {}\n\n", "event: response.in_progress\ndata: {}\n\n",
        "event: response.output_text.delta\ndata: {}\n\n",
    ]  # fmt: skip
    async with routed([engine]) as fleet:
        await fleet.until(True)
        engine.hold = asyncio.Event()
        body = {"model": "m", "input": "x" * 4_000, "stream": True}
        asked = asyncio.create_task(fleet.client.post("/v1/responses", json=body))
        await soon(lambda: fleet.engines[0].got)
        await asyncio.sleep(0.3)
        assert int(fleet.proxy.board.waiting[0]) > 900, "nothing is computed yet"
        engine.hold.set()
        answer = await asked
        assert answer.text == "".join(engine.pieces)
        assert int(fleet.proxy.board.waiting[0]) == 0


async def test_a_slash_at_the_end_is_no_way_around_the_proxy(single: Routed) -> None:
    answer = await single.client.post("/v1/completions/", json={"model": "m", "prompt": "a"})
    assert answer.status_code == 200
    engine = single.engines[0]
    sent = f"HTTP/1.1 307 x\r\nlocation: {engine.url}/v1/x\r\ncontent-length: 0\r\n\r\n"
    engine.raw["/v1/completions"] = sent.encode()
    answer = await single.complete()
    assert answer.headers["location"] == "/v1/x"


async def test_an_engine_with_an_adapter_serves_the_same_model() -> None:
    adapted = StandInEngine()
    models = b'{"data": [{"id": "m"}, {"id": "adapter", "parent": "m"}]}'
    adapted.raw["/v1/models"] = answer_of(200, models)
    async with routed([StandInEngine(), adapted]) as fleet:
        await fleet.until(True, True)


def test_headers_that_a_connection_names_stay_there_and_names_are_utf8() -> None:
    headers = [(b"Connection", b"close, X-Own"), (b"X-Own", b"1"), (b"X-Session-ID", "é".encode())]
    asked = Callers().read("POST", "/v1/completions", headers, b'{"prompt": "a"}')
    assert [key for key, _ in asked.headers] == [b"X-Session-ID"]
    assert asked.turn is not None
    assert asked.turn.name == "é"


@pytest.mark.parametrize("sent", ["é".encode(), "é".encode("latin-1")])
def test_an_engine_knows_a_session_by_the_bytes_that_it_is_sent(sent: bytes) -> None:
    asked = Callers().read("POST", "/v1/completions", [(b"X-Session-ID", sent)], b'{"prompt": "a"}')
    assert asked.turn is not None
    assert asked.turn.name == "é", "one session, in either encoding"
    assert asked.turn.engine_name == sent.decode("latin-1")
    assert asked.headers == [(b"X-Session-ID", sent)]


def test_a_prompt_nested_deeply_is_the_engines_to_judge() -> None:
    content: Any = "x"
    for _ in range(600):
        content = [content]
    body = {"messages": [{"role": "user", "content": content}]}
    with pytest.raises(orjson.JSONEncodeError):
        PromptReader().read(body, b"")
    told = Callers().read("POST", "/v1/chat/completions", [], json.dumps(body).encode())
    assert told.turn is None


REFUSALS = [(404, 401, 404), (429, 403, 429), (401, 404, 404), (503, 429, 429)]


@pytest.mark.parametrize(("first", "second", "told"), REFUSALS)
async def test_a_wanted_key_does_not_hide_why_an_engine_refused(
    fleet: Routed, first: int, second: int, told: int
) -> None:
    await fleet.complete(session_id="s")
    home = next(engine for engine in fleet.engines if engine.got)
    for engine in fleet.engines:
        engine.raw["/v1/completions"] = answer_of(first if engine is home else second)
    assert (await fleet.complete(session_id="s")).status_code == told
    status = (await fleet.client.get("/fleet")).json()["engines"]
    assert [(each["asked"], each["running"]) for each in status] == [(0, 0), (0, 0)]


async def test_a_refusal_stands_where_the_other_engine_is_gone(fleet: Routed) -> None:
    await fleet.complete(session_id="s")
    for engine in fleet.engines:
        engine.drops = not engine.got
        if engine.got:
            engine.raw["/v1/completions"] = answer_of(429)
    assert (await fleet.complete(session_id="s")).status_code == 429


async def test_the_status_says_why_an_engine_is_down_and_whether_it_wants_a_key() -> None:
    guarded = StandInEngine()
    guarded.raw["/v1/models"] = answer_of(401)
    async with routed([StandInEngine(), guarded]) as fleet:
        await fleet.until(True, True)
        fleet.engines[0].kill()
        await fleet.until(False, True)
        one, two = (await fleet.client.get("/fleet")).json()["engines"]
        assert one["why"]
        assert (two["why"], two["wants_key"], one["wants_key"]) == (None, True, False)
        assert two["prefill_tokens_per_s"] is None, "nothing was measured"
        assert "kvgraph_route_engine_in_flight" in (await fleet.client.get("/metrics")).text
