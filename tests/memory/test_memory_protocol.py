"""What a memory passes on, what it reads off answers, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from chat_scenes import APPEND, LARGE, append, model, names, reads, result, user
from kvgraph.advisor.memory.engine import CompletionReader
from kvgraph.advisor.memory.settings import ChatStoreSettings, MemorySettings
from kvgraph_bench.memory.chat_engine import ChatEngine, remembering
from waiting import soon


async def test_a_stream_is_passed_on_as_it_comes_and_remembered_when_it_ends() -> None:
    async with remembering(LARGE) as memory:
        body = {"model": "m", "messages": [user("one")], "stream": True,
                "kv_transfer_params": APPEND}  # fmt: skip
        headers = {"X-Session-ID": "s"}
        text = ""
        async with memory.client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            async for chunk in answer.aiter_text():
                text += chunk
                if "[DONE]" in chunk:  # it is remembered by then
                    await append(memory, "two")
        assert memory.prompt() == ["one", "well then ", "two"]
        assert text.count("data: ") == 5


async def test_called_tools_are_read_off_a_stream() -> None:
    engine = ChatEngine()
    engine.says = lambda _: model(None, tool_calls=[reads("a.py")])
    async with remembering(LARGE, engine=engine) as memory:
        await append(memory, "one", stream=True)
        await append(memory, result())
        sent = memory.engine.got[-1]["messages"]
        assert sent[1]["tool_calls"] == [reads("a.py")]
        assert sent[2] == result()
        assert await names(memory) == ["user#0", "file:a.py#0", "file:a.py#1"]


@pytest.mark.parametrize("keeps", [False, True])
async def test_thoughts_leave_with_their_turn_unless_they_shall_stay(keeps: bool) -> None:
    engine = ChatEngine()
    engine.says = lambda _: model("<think>well</think>\n\nyes")
    async with remembering(MemorySettings(1000, strip_think=not keeps), engine=engine) as memory:
        answer = await append(memory, "one")
        assert answer.json()["choices"][0]["message"]["content"].startswith("<think>")
        await append(memory, "two")
        assert memory.prompt()[1] == ("<think>well</think>\n\nyes" if keeps else "yes")
        # A client that repeats its chat without the thought means the same answer.
        repeated = [user("one"), model("yes"), user("two"), model("yes"), user("three")]
        await memory.chat(repeated)
        assert len(await names(memory)) == 6


async def test_what_the_engine_does_not_answer_is_not_remembered() -> None:
    async with remembering(LARGE) as memory:
        await append(memory, "one")
        memory.engine.cuts = True
        with pytest.raises(httpx.RemoteProtocolError):
            await append(memory, "two", stream=True)
        memory.engine.cuts = False
        memory.engine.refuses = lambda _: True
        assert (await append(memory, "three")).status_code == 400
        memory.engine.refuses = lambda _: False
        await append(memory, "four")
        assert memory.prompt() == ["one", "well then", "four"]


async def test_other_requests_and_those_that_want_no_memory_are_passed_on() -> None:
    async with remembering(LARGE) as memory:
        answer = await memory.client.post("/v1/embeddings", json={"input": "a"})
        assert answer.json() == {"path": "/v1/embeddings", "sent": {"input": "a"}}
        off = {"kvgraph": {"memory": "off"}}
        for _ in range(2):
            await memory.chat([user("a")], kv_transfer_params=off)
            assert memory.prompt() == ["a"]
        assert (await memory.client.get("/nothing")).status_code == 404
        assert (await memory.client.get("/memory")).json()["turns"] == 0
        assert len(memory.proxy.store) == 0


async def test_an_answer_that_speaks_of_a_streams_end_is_none() -> None:
    engine = ChatEngine()
    engine.says = lambda _: model("data: [DONE] ends it")
    async with remembering(LARGE, engine=engine) as memory:
        await append(memory, "one", stream=True)
        await append(memory, "two", stream=True)
        assert memory.prompt() == ["one", "data: [DONE] ends it ", "two"]


class Held:
    """Says how much blocks are about what is said, once it is let."""

    def __init__(self) -> None:
        self.asked, self.let = asyncio.Event(), asyncio.Event()

    async def of(self, said: str, blocks: Any) -> Any:
        self.asked.set()
        await self.let.wait()
        return np.zeros(len(blocks))

    async def close(self) -> None: ...


async def test_a_client_that_leaves_before_anything_was_sent_leaves_nothing_behind() -> None:
    similarity = Held()
    async with remembering(LARGE, similarity=similarity) as memory:
        await append(memory, "x " * 400)
        leaving = asyncio.create_task(append(memory, "y " * 700))
        await similarity.asked.wait()
        assert len(memory.engine.got) == 1
        leaving.cancel()
        await soon(lambda: memory.proxy.counts.left)
        similarity.let.set()
        await append(memory, "two")
        assert memory.prompt() == ["x " * 400, "well then", "two"]


async def test_an_answer_is_kept_though_its_client_hangs_up_once_it_has_it(tmp_path: Path) -> None:
    similarity, kept = Held(), ChatStoreSettings(directory=tmp_path)
    async with remembering(LARGE, similarity=similarity, kept=kept) as memory:
        asked = {"model": "m", "max_tokens": 8, "messages": [user("a " * 900)]}
        body = json.dumps(asked).encode()
        url = memory.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\nx-session-id: s\r\n\r\n" + body)
        await reader.readuntil(b"well then")
        await similarity.asked.wait()  # its prompt is nearly as long as the budget
        writer.close()
        await memory.client.get("/memory")  # until then the connection's end was read
        similarity.let.set()
    assert memory.proxy.counts.left == 0
    (path,) = tmp_path.iterdir()
    assert b"well then" in path.read_bytes()


DEEP = "[" * 252 + "]" * 252
CALLS = '{"role": "assistant", "content": "a", "tool_calls": '
HINTS = '{"role": "user", "content": "a"}], "kv_transfer_params": {"kvgraph": {"messages": '


@pytest.mark.parametrize(
    "messages",
    [
        CALLS + "5}", CALLS + '{"a": 1}}', CALLS + '"x"}',
        '{"role": "user", "content": ' + DEEP + "}",
        HINTS + '[{"index": 0, "identity": ' + DEEP + '}]}}, "stop": ["x"',
    ],
    ids=["number", "object", "text", "deep", "deep hints"],
)  # fmt: skip
async def test_what_is_no_chat_is_the_engines_to_judge(messages: str) -> None:
    engine = ChatEngine()
    engine.refuses = lambda _: True
    async with remembering(LARGE, engine=engine) as memory:
        body = '{"model": "m", "messages": [' + messages + "]}"
        headers = {"X-Session-ID": "s"}
        answer = await memory.client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert len(memory.engine.got) == 1
        assert len(memory.proxy.store) == 0


@pytest.mark.parametrize(
    "name", ["plain", "a%20b", "a%2Fb", "100%", "x?y#z", "\u2603 snow", "\xfc"]
)
@pytest.mark.parametrize("in_header", [True, False])
async def test_a_chat_is_found_by_whatever_name_it_has(name: str, in_header: bool) -> None:
    async with remembering(LARGE) as memory:
        named = {} if in_header else {"session_id": name}
        body = {"model": "m", "messages": [user("a")], **named}
        headers = {b"x-session-id": name.encode()} if in_header else {}
        await memory.client.post("/v1/chat/completions", json=body, headers=headers)
        path = f"/memory/{quote(name, safe='')}"
        assert len((await memory.client.get(path)).json()) == 1
        assert (await memory.client.delete(path)).status_code == 200
        assert len(memory.proxy.store) == 0


async def test_only_an_answer_has_thoughts() -> None:
    async with remembering(LARGE) as memory:
        for quoted in ("one</think> and", "two</think> and"):
            await memory.chat([user(quoted), model(), user("next")])
            assert memory.prompt()[0] == quoted


async def test_one_choice_is_one_choice_however_it_is_said() -> None:
    async with remembering(LARGE) as memory:
        for n, turns in ((1, 1), (None, 2), (2, 2)):
            await append(memory, "a", n=n)
            assert memory.proxy.counts.turns == turns


@pytest.mark.parametrize(
    "said",
    [
        "x", "[]", "{", "{}", '{"choices": 5}', '{"choices": [5]}', '{"choices": {"index": 0}}',
        *('{"choices": [{"finish_reason": "stop", "KIND": ' + each + "}]}" for each in (
            "5", '{"tool_calls": true}', '{"tool_calls": [5]}', '{"tool_calls": {"id": "a"}}',
            '{"content": "a", "tool_calls": true}', '{"content": ' + DEEP + "}",
        )),
    ],
)  # fmt: skip
def test_answers_that_are_none_are_no_messages(said: str) -> None:
    for streams, kind in ((True, "delta"), (False, "message")):
        data = said.replace("KIND", kind)
        reader = CompletionReader(streams)
        reader.feed(f"data: {data}\n\n".encode() if streams else data.encode())
        assert reader.message() is None


@pytest.mark.parametrize("odd", [{"name": ["x"]}, {"name": "x", "arguments": {"a": 1}}])
def test_a_part_of_a_call_that_is_no_text_makes_an_answer_none(odd: Any) -> None:
    delta = {"content": "a", "tool_calls": [{"index": 0, "function": odd}]}
    reader = CompletionReader(True)
    event = json.dumps({"choices": [{"finish_reason": "stop", "delta": delta}]})
    reader.feed(f"data: {event}\n\n".encode())
    assert reader.message() is None


@pytest.mark.parametrize("streams", [False, True])
async def test_an_odd_answer_is_passed_on_as_it_is_and_not_remembered(streams: bool) -> None:
    odd = {"name": "read", "arguments": {"path": "a.py"}} if streams else True
    calls = [{"id": "c", "type": "function", "function": odd}] if streams else odd
    async with remembering(LARGE) as memory:
        await append(memory, "one")
        says, memory.engine.says = memory.engine.says, lambda _: {"tool_calls": calls}
        answer = await append(memory, "two", stream=streams)
        assert answer.status_code == 200
        assert "tool_calls" in answer.text
        memory.engine.says = says
        await append(memory, "three")
        assert memory.prompt() == ["one", "well then", "three"]


def test_an_answer_is_read_however_its_bytes_are_cut() -> None:
    event = {"choices": [{"index": 0, "delta": {"content": "é"}, "finish_reason": "stop"}]}
    data = f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode()
    reader = CompletionReader(True)
    for at in range(len(data)):
        reader.feed(data[at : at + 1])
    assert reader.message() == {"role": "assistant", "content": "é"}


@pytest.mark.parametrize("kind", ["text", "call"])
def test_a_long_answer_costs_no_more_a_token_than_a_short_one(kind: str) -> None:
    word = "word " * 20
    part = {"index": 0, "id": "c", "function": {"arguments": word}}
    said = {"content": word} if kind == "text" else {"tool_calls": [part]}
    event = b"data: " + json.dumps({"choices": [{"index": 0, "delta": said}]}).encode() + b"\n\n"
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'

    def seconds(count: int) -> float:
        reader, began = CompletionReader(True), time.thread_time()
        for _ in range(count):
            reader.feed(event)
        reader.feed(end)
        message = reader.message()
        took = time.thread_time() - began
        assert message is not None
        text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
        assert text == word * count
        return took

    assert seconds(20_000) < 40 * min(seconds(2_000) for _ in range(3))
