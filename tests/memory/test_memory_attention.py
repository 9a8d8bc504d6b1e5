"""What a sidecar's samples change in a chat: names for engines, and who leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

pytest.importorskip("bm25s")

from chat_scenes import user
from kvgraph.advisor.cli import main
from kvgraph.advisor.fleet.relay import json_response
from kvgraph.advisor.memory import command
from kvgraph.advisor.memory.attention import SampledAttention
from kvgraph.advisor.memory.chat import ChatSession
from kvgraph.advisor.memory.chooser import scores
from kvgraph.advisor.memory.settings import ATTENTION_WEIGHT, MemorySettings
from kvgraph_bench.memory.chat_engine import Remembering, remembering
from kvgraph_bench.serving.listening import listening

SMALL = MemorySettings(budget=100, settled=0, shortest=1, attention=ATTENTION_WEIGHT)
LARGE = MemorySettings(budget=1000, attention=ATTENTION_WEIGHT)


class Page:
    """A sidecar's page: ``looks`` are pairs of an identity and its attention, of any session; it
    ``waits`` seconds before each answer, of this ``status``.
    """

    def __init__(self, *looks: tuple[str | None, Any], status: int = 200) -> None:
        self.looks, self.status, self.waits = list(looks), status, 0.0
        self.asked: list[dict[str, list[str]]] = []
        self.keys: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/v1/sampled"
        self.asked.append(parse_qs(scope["query_string"].decode()))
        self.keys += [v.decode() for k, v in scope["headers"] if k == b"authorization"]
        await asyncio.sleep(self.waits)
        blocks = [
            {"key": f"{number}", "session": "s", "identity": identity, "attention": attention}
            for number, (identity, attention) in enumerate(self.looks)
        ]
        answer = {"blocks": blocks} if self.status == 200 else {"detail": "no such session"}
        await json_response(answer, self.status)(scope, receive, send)


@asynccontextmanager
async def beside(
    page: Page, settings: MemorySettings = SMALL
) -> AsyncIterator[tuple[Remembering, SampledAttention]]:
    async with listening(page, "off") as url:
        looked_at = SampledAttention(url)
        async with remembering(settings, attention=looked_at) as memory:
            yield memory, looked_at


def noise(number: int) -> dict[str, Any]:
    return user(" ".join(f"n{number}x{word}" for word in range(12)))


async def noisy(memory: Remembering, turns: int = 20, session: str = "s") -> list[list[str]]:
    """A chat of noise; of each prompt, the first words of its messages."""
    chat, seen = [user("hello")], []
    for number in range(turns):
        chat.append(noise(number))
        answer = await memory.chat(chat, session)
        assert answer.status_code == 200, answer.text
        seen.append([text.split()[0] for text in memory.prompt()])
        chat.append(answer.json()["choices"][0]["message"])
    return seen


def test_attention_shares_a_score_with_similarity_and_recency() -> None:
    chat = ChatSession("k", "n", "c")
    chat.add([{"role": "tool", "content": f"{number}"} for number in range(6)])
    about, looks = np.linspace(0, 1, 6), np.array([1.0, 0.5, 1.0, 0.0, 0.0, 0.0])
    without = scores(chat, chat.blocks, about, looks, MemorySettings(1000, tail=0))
    with_it = scores(chat, chat.blocks, about, looks, replace(LARGE, tail=0))
    assert np.allclose(without, [1, *(0.6 * about + 0.4)[1:]])
    assert np.allclose(with_it, [1, *(0.7 * (0.6 * about + 0.4) + 0.3 * looks)[1:]])
    most = scores(chat, chat.blocks, np.ones(6), np.ones(6), replace(LARGE, tail=0))
    assert np.allclose(most, 1)


async def test_what_the_model_looks_at_stays_longer() -> None:
    page = Page(("user#2", 0.002), ("user#2", 0.02), ("user#3", 0.001))
    async with beside(page) as (memory, asked):
        seen = await noisy(memory)
    assert all("n1x0" in each for each in seen[1:])
    assert not any("n2x0" in each for each in seen[10:])
    assert asked.told > 5
    async with remembering(replace(SMALL, attention=0.0)) as memory:
        assert not any("n1x0" in each for each in (await noisy(memory))[10:])


async def test_most_attention_is_that_of_blocks_that_may_leave() -> None:
    """The chat's first block gets a hundred times as much, and always stays."""
    async with beside(Page(("user#0", 0.9), ("user#2", 0.009), (None, 0.95))) as (memory, _):
        assert all("n1x0" in each for each in (await noisy(memory))[1:])


def names_told(memory: Remembering) -> dict[int, str]:
    params = memory.engine.got[-1].get("kv_transfer_params", {})
    hints = params.get("kvgraph", {}).get("messages", [])
    return {hint["index"]: hint["identity"] for hint in hints}


async def test_engines_are_told_the_names_of_blocks_that_may_leave_one_day() -> None:
    async with beside(Page(), LARGE) as (memory, _):
        function = {"name": "read", "arguments": '{"path": "a.py"}'}
        call = {"id": "c1", "type": "function", "function": function}
        chat = [{"role": "system", "content": "be kind"}, user("read it"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "print ()"}]  # fmt: skip
        await memory.chat(chat)
        assert names_told(memory) == {1: "user#0", 2: "file:a.py#0", 3: "file:a.py#0"}
        body = {"model": "m", "messages": [user("nobody names this")]}
        await memory.client.post("/v1/chat/completions", json=body)
        assert names_told(memory) == {}


async def test_a_name_that_a_client_gives_stays_and_is_what_samples_are_told_by() -> None:
    plan = {"index": 2, "identity": "plan"}
    odd = {"index": 1, "identity": 5, "priority": 3}
    seen: list[list[str]] = []

    async with beside(Page(("plan", 0.01))) as (memory, _):
        chat = [user("hello"), noise(90), noise(91)]
        await memory.chat(chat, kv_transfer_params={"kvgraph": {"messages": [plan, odd]}})
        assert names_told(memory) == {0: "user#0", 1: "user#1", 2: "plan"}
        hints = memory.engine.got[-1]["kv_transfer_params"]["kvgraph"]["messages"]
        assert [hint["index"] for hint in hints] == [1, 2, 0]  # its own are first
        for number in range(20):
            chat += [{"role": "assistant", "content": "well then"}, noise(number)]
            await memory.chat(chat)
            seen.append(memory.prompt())
    assert all(noise(91)["content"] in each for each in seen)
    assert noise(90)["content"] not in seen[-1]


async def test_without_a_sidecar_engines_are_told_no_names() -> None:
    async with remembering(LARGE) as memory:
        await memory.chat([user("one")])
        assert memory.engine.got[-1]["kv_transfer_params"] == {"kvgraph": {"recall": True}}


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (Page(status=404), "knows no session"),
        (Page(status=401), "answered 401"),
        (Page((None, 0.5)), "no block was sampled"),
        (Page(("user#2", "much")), "another version"),
        (Page(("user#2", float("nan"))), "another version"),
    ],
)
async def test_where_a_sidecar_does_not_tell_chats_go_on_and_the_log_says_it_once(
    page: Page, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with beside(page) as (memory, asked):
        for session in "abc":
            assert len(await noisy(memory, 10, session)) == 10
    assert asked.told == 0
    said = [each.getMessage() for each in caplog.records if "looks" in each.getMessage()]
    assert len(said) == 1
    assert says in said[0]


async def test_a_sidecar_that_is_gone_or_hangs_holds_no_chat(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    page = Page(("user#2", 0.1))
    page.waits = 3.0
    gone = SampledAttention("http://127.0.0.1:9")
    async with remembering(SMALL, attention=gone) as memory:
        assert len(await noisy(memory)) == 20
    async with beside(page) as (memory, _):
        assert len(await noisy(memory)) == 20
    assert len(page.asked) == 1
    said = [each.getMessage() for each in caplog.records if "looks" in each.getMessage()]
    assert ["no sidecar answers" in each or "no answer within" in each for each in said] == [
        True
    ] * 2


async def test_a_sidecar_is_asked_once_a_second_about_a_chat_with_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVGRAPH_SIDECAR__TOKEN", "secret")
    page, chats = Page(("b", 0.5)), [ChatSession(f"k{n}", f"chat {n}", "c") for n in range(2)]
    async with listening(page, "off") as url:
        looked_at = SampledAttention(url)
        for chat in chats:
            chat.add([user("a"), user("b")])
            chat.blocks[1].tags["identity"] = "b"
            for _ in range(5):
                found = await looked_at.of(chat, {id(chat.blocks[0])})
                assert found.tolist() == [0, 1]
        await asyncio.sleep(1)
        await looked_at.of(chats[0], set())
        assert looked_at.told == 11
    named = [{"session": [f"chat {n}"], "limit": ["1000"]} for n in (0, 1, 0)]
    assert page.asked == named
    assert page.keys == ["Bearer secret"] * 3


@pytest.mark.parametrize("options", [(), ("--sidecar", "http://127.0.0.1:7/")])
def test_the_command_takes_a_sidecar(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []

    async def serve(*given: Any) -> None:
        served.append(given)

    monkeypatch.setattr(command, "serve_memory", serve)
    with pytest.raises(SystemExit) as ended:
        main(["memory", "http://127.0.0.1:1", "--budget", "1000", *options])
    assert not ended.value.code
    ((_, settings, _, _, page, *_),) = served
    assert settings.attention == (ATTENTION_WEIGHT if options else 0)
    assert page == ("http://127.0.0.1:7" if options else None)
