"""Engines that take no hints, and requests of one chat that come at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
from chat_scenes import LARGE, SMALL, append, model, names, talk, user
from kvgraph.advisor.fleet.callers import Body, Call
from kvgraph.advisor.fleet.upstream import Upstream
from kvgraph.advisor.memory.engine import EngineAsker, EnginePrompt, Form
from kvgraph.advisor.memory.proxy import ChatQueue
from kvgraph.advisor.memory.requests import read_chat_request
from kvgraph.advisor.memory.settings import Mode
from kvgraph_bench.memory.chat_engine import ChatEngine, remembering, words_of
from kvgraph_bench.serving.listening import listening

PARAMS = "kv_transfer_params"
AT_ONCE = 20
SEARCH = {"type": "web_search"}  # a tool that the server runs


def strict(status: int = 400) -> ChatEngine:
    """An engine that refuses fields that it does not know."""
    engine = ChatEngine()
    engine.refuses, engine.status = lambda body: PARAMS in body, status
    return engine


@pytest.mark.parametrize("mode", [Mode.KV_RESTORE, Mode.DISCARD])
async def test_before_an_engine_that_refuses_fields_chats_keep_their_budget(mode: Mode) -> None:
    async with remembering(replace(SMALL, mode=mode), engine=strict()) as memory:
        await talk(memory, 30)
        taken = [body for body in memory.engine.got if PARAMS not in body]
        assert len(taken) == 30
        assert len(memory.engine.got) - 30 == (mode is Mode.KV_RESTORE)  # one was refused, once
        sizes = [sum(len(words_of(each)) + 1 for each in body["messages"]) for body in taken]
        assert max(sizes) <= 100 - 8
        assert memory.proxy.counts.evicted > 20
        assert memory.proxy.counts.as_sent == 0


@pytest.mark.parametrize("status", [403, 422, 500, 501])
async def test_engines_refuse_unknown_fields_with_other_statuses_too(status: int) -> None:
    async with remembering(LARGE, engine=strict(status)) as memory:
        for _ in range(2):
            assert (await memory.chat([user("one")])).status_code == 200
        assert [PARAMS in body for body in memory.engine.got] == [True, False, False]


@pytest.mark.parametrize(("status", "tools"), [(401, []), (429, []), (503, []), (500, [SEARCH])])
async def test_what_another_form_would_not_help_is_sent_once(status: int, tools: list[Any]) -> None:
    async with remembering(LARGE, engine=strict(status)) as memory:
        assert (await memory.chat([user("one")], tools=tools)).status_code in (status, 502)
        assert len(memory.engine.got) == 1


async def test_a_long_chat_that_such_an_engine_gets_first_is_within_its_budget() -> None:
    async with remembering(SMALL, engine=strict()) as memory:
        answer = await memory.chat([user(f"{number} " * 20) for number in range(12)])
        assert answer.status_code == 200
        sent = memory.engine.got[-1]["messages"]
        assert sum(len(words_of(each)) + 1 for each in sent) <= 100 - 8


async def test_a_clients_hints_count_here_where_the_engine_takes_none() -> None:
    async with remembering(LARGE, engine=strict()) as memory:
        ours = {"messages": [{"index": 1, "identity": "plan", "pinned": True}]}
        for _ in range(2):
            params = {"kvgraph": ours}
            answer = await memory.chat([user("one"), user("two")], kv_transfer_params=params)
            assert answer.status_code == 200
        assert "plan" in await names(memory)
        assert [PARAMS in body for body in memory.engine.got] == [True, False, False]


async def test_what_a_client_says_to_others_is_passed_on() -> None:
    engine = ChatEngine()
    engine.refuses = lambda body: "kvgraph" in body.get(PARAMS, {})
    async with remembering(LARGE, engine=engine) as memory:
        for _ in range(2):
            answer = await memory.chat([user("one")], kv_transfer_params={"other": 5})
            assert answer.status_code == 200
            assert memory.engine.got[-1][PARAMS] == {"other": 5}
        assert len(memory.engine.got) == 3


async def test_an_engine_gets_hints_again_after_a_while() -> None:
    engine = strict()
    fields = {"model": "m", "messages": [user("one")]}
    data = orjson.dumps(fields)
    words = read_chat_request(data)
    assert words is not None
    prompt = EnginePrompt(words, words.messages, (), True, data)
    kind = [(b"content-type", b"application/json")]
    async with listening(engine, "off") as url:
        upstream, asker = Upstream(0, url), EngineAsker(plain_s=0.5)
        call = Call("POST", "/v1/chat/completions", kind, Body(data))
        for waits in (0.0, 0.0, 0.6):
            await asyncio.sleep(waits)
            reply, form = await asker.begin(upstream, call, prompt)
            assert (reply.status, form) == (200, Form.PLAIN)
            reply.close()
        await upstream.close()
    assert [PARAMS in body for body in engine.got] == [True, False, False, True, False]


async def test_an_engine_that_refuses_a_request_for_its_own_sake_still_gets_hints() -> None:
    async with remembering(SMALL) as memory:
        memory.engine.refuses = lambda _: True
        assert (await memory.chat([user("one")])).status_code == 400
        assert len(memory.engine.got) == 2  # as it was put, and as its client sent it
        memory.engine.refuses = lambda body: len(body["messages"]) < 12
        assert (await memory.chat([user("x " * 20) for _ in range(12)])).status_code == 200
        assert memory.proxy.counts.as_sent == 1
        memory.engine.refuses = lambda _: False
        await memory.chat([user("two")])
        assert PARAMS in memory.engine.got[-1]


class Slow(ChatEngine):
    """Says who asked, after a while."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_client_appends_at_once_is_answered_one_after_the_other(stream: bool) -> None:
    engine = Slow()
    engine.says = lambda body: model(f"to {body['messages'][-1]['content']}")
    async with remembering(LARGE, engine=engine) as memory:
        said = [f"question {number}" for number in range(AT_ONCE)]
        answers = await asyncio.gather(*(append(memory, each, stream=stream) for each in said))
        assert [answer.status_code for answer in answers] == [200] * AT_ONCE
        assert len(await names(memory, "assistant")) == AT_ONCE
        await append(memory, "last")
        prompt = memory.prompt()
        assert sorted(prompt[:-1:2]) == sorted(said)
        assert [text.strip() for text in prompt[1::2]] == [f"to {text}" for text in prompt[:-1:2]]


async def test_one_that_fails_or_whose_client_leaves_lets_the_next_go_on() -> None:
    engine = Slow()
    engine.refuses = lambda body: "bad" in body["messages"][-1]["content"]
    async with remembering(LARGE, engine=engine) as memory:
        leaving = [asyncio.create_task(append(memory, f"left {number}")) for number in range(3)]
        staying = [append(memory, text) for text in ("one", "bad", "two", "bad again", "three")]
        asked = asyncio.gather(*staying)
        await asyncio.sleep(0.02)
        for each in leaving:
            each.cancel()
        answers = await asyncio.wait_for(asked, 20)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 400, 400]
        memory.engine.cuts = True
        with pytest.raises(httpx.RemoteProtocolError):
            await append(memory, "cut", stream=True)
        memory.engine.cuts = False
        await asyncio.wait_for(append(memory, "last"), 20)
        users, answers = await names(memory, "user"), await names(memory, "assistant")
        assert 4 <= len(users) == len(answers) <= 7


async def test_a_request_that_ends_before_its_answer_was_read_lets_the_next_go_on() -> None:
    waiting = ChatQueue()
    await asyncio.create_task(waiting.next("a"))  # nobody calls what it gives
    async with asyncio.timeout(5):
        over = await waiting.next("a")
    following = asyncio.create_task(waiting.next("a"))
    await asyncio.sleep(0.01)
    assert not following.done()
    over()
    over()
    await asyncio.wait_for(following, 5)


async def test_chats_do_not_wait_for_each_other() -> None:
    class Held(ChatEngine):
        """Answers the chat ``s`` once it has answered another."""

        def __init__(self) -> None:
            super().__init__()
            self.let = asyncio.Event()

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if dict(scope.get("headers", ())).get(b"x-session-id") == b"s":
                await self.let.wait()
            await super().__call__(scope, receive, send)

    engine = Held()
    async with remembering(LARGE, engine=engine) as memory:
        waiting = asyncio.create_task(append(memory, "one"))
        await asyncio.sleep(0.05)
        assert (await append(memory, "two", session="t")).status_code == 200
        engine.let.set()
        assert (await waiting).status_code == 200
