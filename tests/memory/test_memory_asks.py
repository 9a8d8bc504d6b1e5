"""What a memory asks others for, tokens and vectors, and how long its own work takes."""

from __future__ import annotations

import asyncio
import gzip
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import orjson
import pytest
from chat_scenes import user
from kvgraph.advisor.fleet import upstream as upstreams
from kvgraph.advisor.fleet.relay import json_response
from kvgraph.advisor.fleet.upstream import Upstream
from kvgraph.advisor.memory.attention import EmbeddedSimilarity, SimilarityError
from kvgraph.advisor.memory.chat import Block, ChatSession
from kvgraph.advisor.memory.chooser import TokenCounter, about, evict
from kvgraph.advisor.memory.requests import read_chat_request
from kvgraph.advisor.memory.settings import MemorySettings
from kvgraph_bench.serving.listening import listening
from starlette.requests import Request
from starlette.responses import Response


def block(text: str) -> Block:
    return Block(text, "user", [user(text)], [text.encode()], 1, 0)


class Answering:
    """Answers questions after ``waits`` seconds, with a status and what ``says`` makes of their
    fields.
    """

    def __init__(self, says: Callable[[Any], Any], status: int = 200, waits: float = 0.0) -> None:
        self.got: list[Any] = []
        self.says, self.status, self.waits = says, status, waits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = await Request(scope, receive).json()
        self.got.append(asked)
        await asyncio.sleep(self.waits)
        await json_response(self.says(asked), self.status)(scope, receive, send)


def count(engine: Answering, blocks: Sequence[Block], times: int = 1, **more: float) -> float:
    """Count the tokens of blocks; seconds that it took."""

    async def run() -> float:
        async with listening(engine, "off") as url:
            upstream = Upstream(0, url)
            counter = TokenCounter(upstream, **more)
            begun = time.monotonic()
            for _ in range(times):
                for each in blocks:
                    each.tokens = 0
                await counter.count("m", blocks)
            took = time.monotonic() - begun
            await upstream.close()
            return took

    return asyncio.run(run())


def test_an_engine_that_has_no_tokenizer_is_not_asked_again_and_again() -> None:
    engine, blocks = Answering(lambda _: {}, 404), [block(f"{number}") for number in range(40)]
    count(engine, blocks, times=3)
    assert len(engine.got) <= 8  # those that were under way
    assert [each.tokens for each in blocks] == [about(each) for each in blocks]


def test_an_answer_of_any_size_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "MOST_ANSWER", 1 << 16)
    engine, blocks = Answering(lambda _: {"count": 7, "tokens": [1] * 50_000}), [block("x" * 90)]
    count(engine, blocks)
    assert blocks[0].tokens == about(blocks[0]) != 7


def test_an_engine_that_hung_is_not_asked_with_each_turn() -> None:
    engine, blocks = Answering(lambda _: {"count": 1}, waits=3.0), [block("x" * 40)]
    assert count(engine, blocks, times=20, most_s=0.2) < 2
    assert len(engine.got) == 1
    assert blocks[0].tokens == about(blocks[0])


def test_thoughts_count_where_nobody_else_counts() -> None:
    plain, thinks = block("x" * 40), block("x" * 40)
    thinks.messages[0]["reasoning_content"] = "y" * 400
    assert about(thinks) == about(plain) + 100


def vectors_of(asked: Any) -> Any:
    """The first number of a text points the way."""
    angles = [float(text.split()[0]) for text in asked["input"]]
    vectors = [[math.cos(angle), math.sin(angle)] for angle in angles]
    return {"data": [{"index": n, "embedding": each} for n, each in enumerate(vectors)]}


@asynccontextmanager
async def embedding(server: Any, **more: int) -> AsyncIterator[EmbeddedSimilarity]:
    async with listening(server, "off") as url:
        similarity = EmbeddedSimilarity(url, "m", **more)
        yield similarity
        await similarity.close()


async def test_texts_are_embedded_a_few_at_once_and_those_used_last_are_kept() -> None:
    server = Answering(vectors_of)
    async with embedding(server, most=150) as similarity:
        old, new = ([block(f"{n} {kind}") for n in range(100)] for kind in ("old", "new"))
        await similarity.of("0", old)
        assert [len(asked["input"]) for asked in server.got] == [64, 37]
        await similarity.of("0", old[:50])  # they were used last
        found = await similarity.of("0", new)
        assert np.allclose(found, np.clip(np.cos(np.arange(100)), 0, 1), atol=1e-6)
        server.got.clear()
        await similarity.of("0", old[:50])
        assert [asked["input"] for asked in server.got] == [["0"]]


async def test_vectors_are_bounded_and_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few KiB may become gigabytes, and all chats would wait for that."""
    monkeypatch.setattr(upstreams, "MOST_ANSWER", 1 << 16)
    large = Answering(lambda asked: {**vectors_of(asked), "usage": "x" * (1 << 17)})

    async def packed(scope: Any, receive: Any, send: Any) -> None:
        asked = await Request(scope, receive).json()
        content = gzip.compress(orjson.dumps(vectors_of(asked)))
        headers = {"content-encoding": "gzip"}
        await Response(content, headers=headers)(scope, receive, send)

    for server in (large, packed):
        async with embedding(server) as similarity:
            with pytest.raises(SimilarityError):
                await similarity.of("0", [block("1")])


async def test_vectors_that_another_chat_displaces_meanwhile_are_not_missed() -> None:
    async with embedding(Answering(vectors_of, waits=0.05), most=4) as similarity:
        chats = [[block(f"{n} of {chat}") for n in range(4)] for chat in range(4)]
        await similarity.of("0", chats[0])
        for found in await asyncio.gather(*(similarity.of("0", each) for each in chats)):
            assert np.allclose(found, np.clip(np.cos(np.arange(4)), 0, 1), atol=1e-6)


@pytest.mark.parametrize("said", [[0.0], [[1.0, 2.0]], [None, 1.0], "x"])
async def test_what_is_no_vector_or_another_models_cannot_be_read(said: Any) -> None:
    server = Answering(vectors_of)
    async with embedding(server) as similarity:
        await similarity.of("0", [block("1")])
        server.says = lambda asked: {
            "data": [{"index": n, "embedding": said} for n in range(len(asked["input"]))]
        }
        with pytest.raises(SimilarityError):
            await similarity.of("0", [block("1"), block("2")])
        server.says = vectors_of
        await similarity.of("0", [block("1"), block("2")])


MANY, HINTS = 4_000, 5_000


def test_thousands_of_messages_and_hints_are_taken_over_fast() -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": f"word{n}"} for n in range(MANY)]
    hints = [{"index": n % MANY, "identity": f"name {n}"} for n in range(HINTS)]
    hints += [{"role": roles[n % 2], "priority": n % 100} for n in range(HINTS)]
    params = {"kvgraph": {"messages": hints}}
    body = orjson.dumps({"model": "m", "messages": messages, "kv_transfer_params": params})
    begun = time.thread_time()
    words = read_chat_request(body)
    assert words is not None
    chat = ChatSession("k", "n", "c")
    chat.follow(words.messages, words.appends, words.tags)
    for each in chat.blocks:
        each.tokens = 10
    gone = evict(chat, np.zeros(MANY), np.zeros(MANY), MemorySettings(1000), 1000)
    assert time.thread_time() - begun < 1
    assert chat.tokens == 1000
    assert len(gone) == MANY - 100
    assert chat.blocks[7].name == "name 4007"
    assert chat.blocks[1008].name == "name 1008"
    assert words.tags[4] == {"identity": "name 4004", "priority": 98}
