"""What the proxy counts as sent, held and measured, and whom it believes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from kvgraph.advisor.fleet import engines as health
from kvgraph.advisor.fleet import proxy as fleet_proxy
from kvgraph.advisor.fleet.callers import Callers
from kvgraph.advisor.fleet.prompts import BINARY_TOKENS, PromptReader
from kvgraph.advisor.fleet.upstream import EngineAddress
from kvgraph_bench.fleet.stand_in_engine import Routed, StandInEngine, routed
from stand_ins import all_up, answer_of, answering, codes, hold, status_of
from waiting import soon

LONG = "x" * 40_000
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
ADAPTED = b'{"data": [{"id": "m"}, {"id": "adapter", "parent": "m"}]}'


@pytest.mark.parametrize(
    "models", [answer_of(401), answer_of(200, ADAPTED)], ids=["with API keys", "with an adapter"]
)
@pytest.mark.parametrize("first", [True, False])
async def test_an_engine_is_not_shut_out(models: bytes, first: bool) -> None:
    """vLLM answers 401 to whoever asks for its models without its key."""
    engines = [answering(models, MODELS), StandInEngine()]
    async with all_up(*engines if first else reversed(engines)) as fleet:
        assert await codes(fleet, 4) == [200] * 4


@pytest.mark.parametrize("status", [404, 500])
async def test_an_engine_that_lists_no_models_is_refused_in_words(status: int) -> None:
    bare = answering(answer_of(status, b'{"data": [{"id": "m"}]}'), MODELS)
    async with routed([StandInEngine(), bare]) as fleet:
        await fleet.until(True, False)
        refused = (await status_of(fleet))[1]["refused"]
        assert refused == "serves nothing that it lists, the others m: no request goes there"


async def test_another_model_does_not_take_the_place_of_one_that_is_away() -> None:
    async with routed([StandInEngine("good"), StandInEngine("other")]) as fleet:
        await fleet.until(True, False)
        assert "serves other, the others good: " in (await status_of(fleet))[1]["refused"]
        fleet.engines[0].healthy = False
        await fleet.until(False, False)
        await asyncio.sleep(3 * health.INTERVAL_S)
        assert not fleet.proxy.board.up.any()
        fleet.engines[0].healthy = True
        await fleet.until(True, False)


async def test_all_engines_may_change_their_model(fleet: Routed) -> None:
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
    single.engines[0].raw[COMPLETIONS] = answer_of(status)
    for number in range(20):
        answer = await single.complete(other + str(number), session_id=f"s{number}")
        assert answer.status_code == status
    board, homes = single.proxy.board, single.proxy.router.homes
    assert (len(homes), int(board.live[0])) == (1, 2_250)
    assert homes.return_rate == 0.5, "one began, and none came back"
    assert len(single.proxy.pools) == 8, "of what was answered; it was not displaced"


async def test_a_retry_is_no_return(fleet: Routed) -> None:
    fleet.engines[0].drops = True
    await codes(fleet, 6)
    assert fleet.proxy.counts.retried >= 1
    assert fleet.proxy.router.homes.return_rate == pytest.approx(1 / 7)
    assert fleet.proxy.board.live.tolist() == [0, 6 * 2]


async def test_an_error_in_the_form_of_a_stream_says_nothing_of_speed(single: Routed) -> None:
    before = float(single.proxy.board.compute_s[0])
    single.engines[0].raw[COMPLETIONS] = answer_of(200, b'data: {"error": {"message": "no"}}\n\n')
    await single.complete(LONG, stream=True)
    assert float(single.proxy.board.compute_s[0]) == before
    assert len(single.proxy.router.homes) == 0


@pytest.mark.parametrize("path", ["/tokenize", "/v1/load_lora_adapter", "/v1/embeddings"])
def test_what_generates_nothing_is_no_turn(path: str) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    assert Callers().read("POST", path, [], body).turn is None


def asks(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_400_000}}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (asks([IMAGE]), BINARY_TOKENS),
        ({"prompt": [[1] * 4_000] * 8}, 32_000),
        ({"prompt": ["x" * 16_000] * 8}, 32_000),
        ({"tools": [{"name": LONG}], **asks("a")}, 10_000),
        ({"system": LONG, **asks("a")}, 10_000),
    ],
    ids=["an image", "token ids", "texts", "tools", "a system text"],
)
def test_prompts_have_about_their_size(body: dict[str, Any], tokens: int) -> None:
    assert PromptReader().read(body, b"").tokens == pytest.approx(tokens, rel=0.05)


async def test_an_engine_off_the_list_is_forgotten_and_may_come_back(fleet: Routed) -> None:
    engines, (one, two) = fleet.proxy.engines, [EngineAddress(each.url) for each in fleet.engines]
    engines.list_again([one])
    await fleet.until(True, False)
    assert [each["url"] for each in await status_of(fleet)] == [one.url]
    assert len(engines.watched) == 1
    engines.list_again([one, two])
    await fleet.until(True, True)
    assert len(engines.upstreams) == 2


async def test_where_no_engine_is_up_the_answer_says_so_and_nothing_is_decided(
    single: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_proxy, "PAUSE_S", 0.3)
    single.engines[0].healthy = False
    await single.until(False)
    answer = await single.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == (
        "no engine takes requests: 1 down, 0 draining, 0 refused; GET /fleet says why"
    )
    assert (await single.client.get("/healthz")).status_code == 503
    assert len(single.proxy.decided_s) == 0


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
async def test_an_engine_that_refuses_quickly_does_not_get_them_all(status: int) -> None:
    bad = answering(answer_of(status))
    async with all_up(bad, StandInEngine()) as fleet:
        failed = sum(code != 200 for code in await codes(fleet, 30))
        assert failed == (status == 500), "one error may be the request's own"
        assert len(bad.headers) <= 8
        assert fleet.proxy.counts.turned_away == len(bad.headers) - failed


async def home_of(fleet: Routed, session: str = "s") -> StandInEngine:
    """The engine that a session's first turn went to."""
    await fleet.complete(session_id=session)
    return next(engine for engine in fleet.engines if engine.got)


async def test_a_session_leaves_a_home_that_turned_bad(fleet: Routed) -> None:
    (await home_of(fleet)).raw[COMPLETIONS] = answer_of(500)
    found = await codes(fleet, 4, "s")
    assert found.count(200) >= 3
    assert found[-1] == 200


async def test_what_all_engines_refuse_is_answered_as_they_do() -> None:
    async with all_up(*(answering(answer_of(429, b"later")) for _ in range(3))) as fleet:
        answer = await fleet.complete()
        assert (answer.status_code, answer.text) == (429, "later")
        assert sum(len(engine.headers) for engine in fleet.engines) == 2, "one other, and not all"


async def test_a_response_begins_with_its_first_token(single: Routed) -> None:
    (engine,) = single.engines
    engine.pieces = [
        f"event: response.{name}\ndata: {{}}\n\n"
        for name in ("created", "in_progress", "output_text.delta")
    ]
    held = hold(engine)
    body = {"model": "m", "input": "x" * 4_000, "stream": True}
    asked = asyncio.create_task(single.client.post("/v1/responses", json=body))
    await soon(lambda: engine.got)
    await asyncio.sleep(0.3)
    assert int(single.proxy.board.waiting[0]) > 900, "nothing is computed yet"
    held.set()
    assert (await asked).text == "".join(engine.pieces)
    assert int(single.proxy.board.waiting[0]) == 0


async def test_a_slash_at_the_end_is_no_way_around_the_proxy(single: Routed) -> None:
    answer = await single.client.post("/v1/completions/", json={"model": "m", "prompt": "a"})
    assert answer.status_code == 200
    (engine,) = single.engines
    engine.raw[COMPLETIONS] = answer_of(307, b"", f"location: {engine.url}/v1/x")
    assert (await single.complete()).headers["location"] == "/v1/x"


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [(404, 401, 404), (429, 403, 429), (401, 404, 404), (503, 429, 429)],
)
async def test_a_wanted_key_does_not_hide_why_an_engine_refused(
    fleet: Routed, first: int, second: int, told: int
) -> None:
    home = await home_of(fleet)
    for engine in fleet.engines:
        engine.raw[COMPLETIONS] = answer_of(first if engine is home else second)
    assert await codes(fleet, 1, "s") == [told]
    assert [(each["asked"], each["running"]) for each in await status_of(fleet)] == [(0, 0)] * 2


async def test_a_refusal_stands_where_the_other_engine_is_gone(fleet: Routed) -> None:
    home = await home_of(fleet)
    home.raw[COMPLETIONS] = answer_of(429)
    for engine in fleet.engines:
        engine.drops = engine is not home
    assert await codes(fleet, 1, "s") == [429]


async def test_the_status_says_why_an_engine_is_down_and_whether_it_wants_a_key() -> None:
    async with all_up(StandInEngine(), answering(answer_of(401), MODELS)) as fleet:
        fleet.engines[0].kill()
        await fleet.until(False, True)
        one, two = await status_of(fleet)
        assert one["why"]
        assert (two["why"], two["wants_key"], one["wants_key"]) == (None, True, False)
        assert two["prefill_tokens_per_s"] is None, "nothing was measured"
        assert "kvgraph_route_engine_in_flight" in (await fleet.client.get("/metrics")).text
