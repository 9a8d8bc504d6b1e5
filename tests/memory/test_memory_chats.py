"""A chat beyond its budget, before a stand-in for an engine: who leaves, who comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_scenes import (
    ASKED,
    FACT,
    SMALL,
    append,
    model,
    names,
    noise,
    reads,
    result,
    talk,
    told,
    user,
)
from kvgraph.advisor.memory.attention import SimilarityError
from kvgraph.advisor.memory.chat import Block
from kvgraph.advisor.memory.settings import ChatStoreSettings, MemorySettings, Mode
from kvgraph.graph.errors import ConfigError
from kvgraph_bench.memory.chat_engine import ChatEngine, Remembering, remembering


async def test_what_a_user_asks_about_comes_back_behind_the_others_and_before_what_is_new() -> None:
    async with remembering(SMALL) as memory:
        chat = await talk(memory, 30)
        assert FACT not in memory.prompt()
        answer = await memory.chat([*chat[:-1], user(ASKED)])
        assert told(answer)["recalled"] == ["user#1"]
        assert memory.prompt()[-2:] == [FACT, ASKED]
        assert memory.prompt()[0] == "hello"
        assert memory.proxy.counts.evicted > 20


@pytest.mark.parametrize("behind", [
    user("it is 12:07 now"), {"role": "system", "content": "answer with blocks"},
])  # fmt: skip
async def test_it_comes_back_too_where_a_harness_puts_a_reminder_behind_each_prompt(
    behind: dict[str, Any],
) -> None:
    async with remembering(SMALL) as memory:
        chat = await talk(memory, 30)
        await memory.chat([*chat, behind])
        assert FACT not in memory.prompt()
        answer = await memory.chat([*chat[:-1], user(ASKED), behind])
        assert told(answer)["recalled"] == ["user#1"]
        assert {FACT, ASKED, behind["content"]} <= set(memory.prompt())


async def test_a_question_asked_before_does_not_take_the_place_of_what_answers_it() -> None:
    async with remembering(replace(SMALL, top=1)) as memory:
        chat = await talk(memory, 3)
        chat = await talk(memory, 30, [*chat[:-1], user(ASKED)])
        answer = await memory.chat([*chat[:-1], user(ASKED)])
        assert told(answer)["recalled"] == ["user#1"]


@pytest.mark.parametrize(
    ("settings", "behind"),
    [
        ({"settled": 1}, 1),
        ({"settled": 14}, 2),
        ({"settled": 30}, 4),
        ({"settled": 30, "shortest": 9}, 0),
        ({"settled": 14, "most_moved": 15}, 0),
    ],
    ids=["one", "two", "four", "too short to be spliced", "long text does not move"],
)
async def test_it_stands_before_the_newest_text_which_engines_do_not_hold_yet(
    settings: dict[str, Any], behind: int
) -> None:
    """A message of noise takes 13 tokens, an answer 3, the fact 8."""
    async with remembering(replace(SMALL, **settings)) as memory:
        chat = await talk(memory, 30)
        newest = [each["content"] for each in chat[-1 - behind : -1]]
        await memory.chat([*chat[:-1], user(ASKED)])
        assert memory.prompt()[-2 - behind :] == [FACT, *newest, ASKED]


async def test_no_prompt_is_longer_than_its_budget() -> None:
    async with remembering(SMALL) as memory:
        await talk(memory, 40)
        sizes = [sum(len(text.split()) + 1 for text in memory.prompt(at)) for at in range(40)]
        assert max(sizes) <= 100 - 8
        assert min(sizes[10:]) > 40  # and it is used
        assert memory.proxy.counts.beyond == 0


@pytest.mark.parametrize("mode", [Mode.DISCARD, Mode.BREADCRUMB])
async def test_other_modes_bring_nothing_back_and_ask_for_no_recall(mode: Mode) -> None:
    async with remembering(replace(SMALL, mode=mode)) as memory:
        chat = await talk(memory, 30)
        await memory.chat([*chat[:-1], user(ASKED)])
        last = memory.prompt()[-1]
        assert FACT not in memory.prompt()
        assert last.endswith(ASKED)
        assert ("left out: " in last) == (mode is Mode.BREADCRUMB)
        assert "kv_transfer_params" not in memory.engine.got[-1]


async def test_the_engine_is_asked_for_recall_unless_the_client_says_otherwise() -> None:
    async with remembering(SMALL) as memory:
        await memory.chat([user("a")])
        assert memory.engine.got[-1]["kv_transfer_params"]["kvgraph"] == {"recall": True}
        assert memory.engine.headers[-1]["x-session-id"] == "s"
        assert "session_id" not in memory.engine.got[-1], "strict servers refuse it"
        said = {"kvgraph": {"recall": False, "tenant": "t"}}
        await memory.chat([user("a")], kv_transfer_params=said)
        assert memory.engine.got[-1]["kv_transfer_params"] == said


async def tagged(memory: Remembering, **tags: Any) -> list[Any]:
    """A long chat whose client said something of the fact once."""
    chat, hints = [user("hello"), user(FACT)], [{"index": 1, **tags}]
    await memory.chat(chat, kv_transfer_params={"kvgraph": {"messages": hints}})
    return await talk(memory, 30, [*chat, model()])


async def test_what_is_tagged_stays_and_keeps_its_hints_where_it_stands_now() -> None:
    async with remembering(SMALL) as memory:
        await tagged(memory, identity="vault.md", pinned=True)
        at = memory.prompt().index(FACT)
        hints = memory.engine.got[-1]["kv_transfer_params"]["kvgraph"]["messages"]
        assert {"index": at, "identity": "vault.md", "pinned": True} in hints


async def test_a_name_that_a_client_gives_fits_into_a_header() -> None:
    async with remembering(SMALL) as memory:
        chat = await tagged(memory, identity="v" * 200_000)
        answer = await memory.chat([*chat[:-1], user(ASKED)])
        assert told(answer)["recalled"] == ["v" * 128]


async def test_a_tools_results_leave_and_come_back_with_their_call() -> None:
    engine = ChatEngine()
    engine.says = lambda body: (
        model(None, tool_calls=[reads("vault.md")])
        if body["messages"][-1]["content"] == "read it"
        else model()
    )
    async with remembering(SMALL, engine=engine) as memory:
        chat = [user("hello"), user("read it")]
        answer = await memory.chat(chat)
        chat += [answer.json()["choices"][0]["message"], result(FACT)]
        await memory.chat(chat)
        chat = await talk(memory, 25, [*chat, model(), noise(99)])
        roles = [each["role"] for each in memory.engine.got[-1]["messages"]]
        assert "tool" not in roles
        answer = await memory.chat([*chat[:-1], user(ASKED)])
        assert told(answer)["recalled"] == ["file:vault.md#0"]
        sent = memory.engine.got[-1]["messages"]
        assert [each["role"] for each in sent[-3:]] == ["assistant", "tool", "user"]
        assert sent[-3]["tool_calls"][0]["id"] == "c"


async def test_chats_of_other_callers_and_names_are_other_chats() -> None:
    async with remembering(SMALL) as memory:
        for key in ("a", "b"):
            headers = {"Authorization": f"Bearer {key}"}
            for text in (f"{key} one", f"{key} two"):
                await append(memory, text, headers=headers)
            assert memory.prompt() == [f"{key} one", "well then", f"{key} two"]


async def test_a_client_that_edits_its_chat_is_followed() -> None:
    async with remembering(SMALL) as memory:
        chat = [user("one"), model(), user("two")]
        await memory.chat(chat[:1])
        await memory.chat(chat)
        await memory.chat([chat[0], user("other")])
        assert memory.prompt() == ["one", "other"]
        assert await names(memory) == ["user#0", "user#1", "assistant#0"]


async def test_an_unnamed_chat_is_known_by_what_it_repeats_and_not_written(tmp_path: Path) -> None:
    async with remembering(SMALL, kept=ChatStoreSettings(directory=tmp_path)) as memory:
        for name in ("x", "y"):
            chat = [user(f"{name} begins"), user(FACT)]
            for number in range(12):
                body = {"model": "m", "messages": chat}
                answer = await memory.client.post("/v1/chat/completions", json=body)
                chat += [answer.json()["choices"][0]["message"], noise(number)]
        assert memory.proxy.counts.evicted > 4
        assert len(memory.proxy.store) == 2
        assert list(tmp_path.iterdir()) == []


async def test_chats_survive_a_restart_where_a_directory_is_named(tmp_path: Path) -> None:
    directory, other = tmp_path / "chats", {"Authorization": "Bearer somebody"}
    kept = ChatStoreSettings(directory=directory)
    async with remembering(SMALL, kept=kept) as memory:
        chat = await talk(memory, 30)
    (path,) = directory.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    async with remembering(SMALL, kept=kept) as memory:
        await memory.chat([*chat[:-1], user(ASKED)])
        assert memory.prompt()[-2:] == [FACT, ASKED]
        assert len(memory.prompt()) < 20
    async with remembering(SMALL, kept=kept) as memory:  # it is on disk only
        listed = (await memory.client.get("/memory/s")).json()
        assert [chat["turn"] for chat in listed] == [31]
        assert (await memory.client.delete("/memory/s", headers=other)).status_code == 404
        assert (await memory.client.delete("/memory/s")).status_code == 200
        assert not list(directory.iterdir())
        assert (await memory.client.get("/memory/s")).status_code == 404


async def test_a_chat_deleted_during_its_turn_stays_deleted(tmp_path: Path) -> None:
    engine, kept = ChatEngine(), ChatStoreSettings(directory=tmp_path / "chats")
    async with remembering(SMALL, engine, kept) as memory:

        def deletes(_: dict[str, Any]) -> dict[str, Any]:
            for chat in memory.proxy.store.chats():
                memory.proxy.store.forget(chat.key)
            return model()

        engine.says = deletes
        assert (await memory.chat([user("a")])).status_code == 200
        assert len(memory.proxy.store) == 0
    assert not list((tmp_path / "chats").iterdir())


async def test_a_chat_whose_first_turn_failed_is_not_kept() -> None:
    async with remembering(SMALL) as memory:
        memory.engine.refuses = lambda _: True
        await memory.chat([user("a")])
        assert len(memory.proxy.store) == 0


async def test_without_a_directory_nothing_is_written_and_memory_is_bounded() -> None:
    bounded = ChatStoreSettings(ram_bytes=20000)
    async with remembering(replace(SMALL, budget=10000), kept=bounded) as memory:
        for session in range(20):
            await memory.chat([user("x" * 4000)], session=f"s{session}")
        assert len(memory.proxy.store) < 6
        assert memory.proxy.store.forgotten > 10


async def test_where_embeddings_fail_chats_go_on() -> None:
    class Broken:
        async def of(self, said: str, blocks: list[Block]) -> Any:
            raise SimilarityError("nobody")

        async def close(self) -> None: ...

    async with remembering(SMALL, similarity=Broken()) as memory:
        await talk(memory, 30)
        assert memory.proxy.counts.unscored > 5


@pytest.mark.parametrize(("high", "low"), [(0.5, 0.7), (1.2, 0.7), (0.5, 0.0)])
def test_watermarks_that_are_none_are_named(high: float, low: float) -> None:
    with pytest.raises(ConfigError, match="allowed: 0 < low ≤ high ≤ 1"):
        MemorySettings(1000, high, low)
