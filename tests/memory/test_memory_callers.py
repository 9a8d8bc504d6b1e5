"""Whose a chat is, and what of it is on disk."""

from __future__ import annotations

import errno
import gc
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from chat_scenes import LARGE, asked, finish, user
from kvgraph.advisor.cli import main
from kvgraph.advisor.fleet.upstream import BrokenAnswerError
from kvgraph.advisor.memory import command
from kvgraph.advisor.memory.chat import Block, ChatSession
from kvgraph.advisor.memory.proxy import caller_salt
from kvgraph.advisor.memory.settings import ChatStoreSettings, MemorySettings, Mode
from kvgraph.advisor.memory.store import ChatStore, UnreadError
from kvgraph_bench.memory.chat_engine import Remembering, remembering


async def turns_of(memory: Remembering, address: str = "/memory/s", **more: Any) -> list[int]:
    answer = await memory.client.get(address, **more)
    assert answer.status_code == 200
    return [each["turn"] for each in answer.json()]


@pytest.mark.parametrize("header", ["Authorization", "X-API-Key"])
async def test_a_chat_is_its_callers_by_whichever_header(header: str, tmp_path: Path) -> None:
    async with remembering(LARGE, kept=ChatStoreSettings(directory=tmp_path)) as memory:
        own, other = {header: "A"}, {header: "B"}
        await memory.chat([user("one")], headers=own)
        for headers in (other, {}):
            assert (await memory.client.get("/memory/s", headers=headers)).status_code == 404
            assert (await memory.client.delete("/memory/s", headers=headers)).status_code == 404
        assert await turns_of(memory, headers=own) == [1]
        assert (await memory.client.delete("/memory/s", headers=own)).status_code == 200
        assert len(memory.proxy.store) == 0


async def test_a_chat_under_a_salt_is_shown_to_who_names_the_salt(tmp_path: Path) -> None:
    kept = ChatStoreSettings(directory=tmp_path)
    async with remembering(LARGE, kept=kept) as memory:
        await memory.chat([user("one")], cache_salt="pep per")
    (path,) = tmp_path.iterdir()
    assert b"pep per" not in path.read_bytes()
    async with remembering(LARGE, kept=kept) as memory:
        for query in ("", "?cache_salt=", "?cache_salt=salt"):
            address = f"/memory/s{query}"
            assert (await memory.client.get(address)).status_code == 404
            assert (await memory.client.delete(address)).status_code == 404
        named = "/memory/s?cache_salt=pep%20per"
        assert await turns_of(memory, named) == [1]
        await memory.chat([user("two")])  # without a salt it is another chat
        assert await turns_of(memory) == [1]
        assert (await memory.client.delete(named)).status_code == 200
        assert await turns_of(memory) == [1]


KEYS = [{"Authorization": "Bearer A"}, {"Authorization": "Bearer B"}, {"X-API-Key": "C"},
        {"Authorization": "Bearer A", "X-API-Key": "B"}]  # fmt: skip


async def salt_for(memory: Remembering, **more: Any) -> str | None:
    """The cache salt under which the engine gets a request; its hints do not say whose it is."""
    assert (await memory.chat([user("one")], **more)).status_code == 200
    sent = memory.engine.got[-1]
    for key in more.get("headers", {}).values():
        assert key not in json.dumps(sent)
    salt = sent.get("cache_salt")
    assert salt is None or isinstance(salt, str)
    return salt


@pytest.mark.parametrize("salt", [{}, {"cache_salt": "acme"}])
async def test_text_comes_back_for_the_api_key_alone_that_said_it(salt: dict[str, str]) -> None:
    async with remembering(LARGE) as memory:
        salts = [await salt_for(memory, headers=each, **salt) for each in KEYS]
        assert None not in salts
        assert len(set(salts)) == len(KEYS)
        assert salts == [await salt_for(memory, headers=each, **salt) for each in KEYS]
        assert await salt_for(memory, headers=KEYS[0], cache_salt="other") not in salts
        assert await salt_for(memory, **salt) == salt.get("cache_salt")  # nobody's key
        # A client that names the salt of another does not get its text.
        assert await salt_for(memory, headers=KEYS[1], cache_salt=salts[0]) not in salts


async def test_salts_stay_as_they_came_where_no_text_comes_back_or_it_is_shared() -> None:
    own = {"headers": KEYS[0], "cache_salt": "acme"}
    recall = [{"kv_transfer_params": {"kvgraph": {"recall": each}}} for each in (True, False)]
    async with remembering(replace(LARGE, salt_key=None)) as memory:
        assert await salt_for(memory, **own) == "acme"
        assert await salt_for(memory, headers=KEYS[0]) is None
    async with remembering(replace(LARGE, mode=Mode.DISCARD)) as memory:
        assert await salt_for(memory, **own) == "acme"
        assert await salt_for(memory, headers=KEYS[0]) is None
        assert await salt_for(memory, **own, **recall[0]) not in (None, "acme")
    async with remembering(LARGE) as memory:
        assert await salt_for(memory, **own, **recall[1]) == "acme"


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/chat/completions", {"memory": "off"}),
        ("/v1/chat/completions", {"messages": ["no message"]}),
        ("/v1/completions", {}),
        ("/v1/responses", {}),
        ("/v1/messages", {}),
    ],
)
async def test_text_comes_back_for_its_api_key_alone_by_whichever_api(
    path: str, more: dict[str, Any]
) -> None:
    ours = {"recall": True, **({"memory": "off"} if more.pop("memory", "") else {})}
    body = {"model": "m", "messages": [user("one")], "prompt": "one", "input": "one", **more}
    async with remembering(LARGE) as memory:

        async def salts(ours: dict[str, Any], **more: Any) -> list[str | None]:
            asked = body | {"kv_transfer_params": {"kvgraph": ours}} | more
            posted = [await memory.client.post(path, json=asked, headers=each) for each in KEYS]
            own = path.endswith("/chat/completions")
            sent = memory.engine.got[-len(KEYS) :] if own else [p.json()["sent"] for p in posted]
            assert all(each["kv_transfer_params"] == asked["kv_transfer_params"] for each in sent)
            return [each.get("cache_salt") for each in sent]

        found = await salts(ours)
        assert None not in found
        assert len(set(found)) == len(KEYS)
        assert found == await salts(ours)
        assert not set(found) & set(await salts(ours, cache_salt=found[0]))
        assert await salts(ours | {"recall": False}, cache_salt="a") == ["a"] * len(KEYS)
    async with remembering(replace(LARGE, salt_key=None)) as memory:
        assert await salts(ours, cache_salt="a") == ["a"] * len(KEYS)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "said",
    [
        {"vllm_xargs": {"kvgraph": '{"recall": true}'}},
        {"vllm_xargs": {"kvgraph": {"recall": True}}},
        {"kv_transfer_params": {"kvgraph": '{"recall": true}'}},
    ],
    ids=["text in xargs", "xargs", "text"],
)
async def test_text_comes_back_for_its_api_key_alone_wherever_it_is_asked_for(
    path: str, said: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [user("one")], "prompt": "one", **said}
    async with remembering(replace(LARGE, mode=Mode.DISCARD)) as memory:
        posted = [await memory.client.post(path, json=body, headers=each) for each in KEYS]
        sent = [each.json()["sent"] for each in posted] if "chat" not in path else memory.engine.got
    salts = [each.get("cache_salt") for each in sent]
    assert None not in salts
    assert len(set(salts)) == len(KEYS)
    if "chat" in path:  # what is said of messages has their numbers in our prompt, and is said once
        assert all("kvgraph" not in each.get("vllm_xargs", {}) for each in sent)
        assert all(each["kv_transfer_params"] == {"kvgraph": {"recall": True}} for each in sent)


async def test_a_chat_in_its_clients_own_form_has_its_api_keys_salt() -> None:
    recall = {"kv_transfer_params": {"kvgraph": {"recall": True}}}
    long = [user("one " * 20) for _ in range(60)]
    async with remembering(LARGE) as memory:
        ours = await salt_for(memory, headers=KEYS[0], **recall)
        memory.engine.refuses = lambda body: len(body["messages"]) < len(long)
        assert (await memory.chat(long, headers=KEYS[0], **recall)).status_code == 200
        assert memory.proxy.counts.as_sent == 1
        assert memory.engine.got[-1]["messages"] == long
        assert memory.engine.got[-1]["cache_salt"] == ours is not None


async def test_an_engine_that_takes_no_hints_gets_no_salt_of_ours() -> None:
    async with remembering(LARGE) as memory:
        memory.engine.refuses = lambda body: "kv_transfer_params" in body or "cache_salt" in body
        assert await salt_for(memory, headers=KEYS[0]) is None


def test_salts_do_not_follow_from_keys_but_by_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[MemorySettings] = []
    monkeypatch.setattr(command.asyncio, "run", lambda _: None)
    monkeypatch.setattr(command, "serve_memory", lambda _, by, *__: served.append(by))

    def salts(*words: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main(["memory", "http://127.0.0.1:1", "--budget", "1000", *words])
        return caller_salt([(b"authorization", b"Bearer A")], None, served[-1].salt_key)

    assert salts() != salts() != ""
    monkeypatch.setenv("KVGRAPH_MEMORY_SECRET", "s" * 200)
    kept = salts()
    assert salts() == kept != ""
    monkeypatch.setenv("KVGRAPH_MEMORY_SECRET", "t")
    assert salts() not in ("", kept)
    assert salts("--share-recall") == ""
    assert str(served[0].salt_key) not in repr(served)


async def test_a_turn_that_fails_leaves_a_chat_alone_that_was_begun_anew_meanwhile() -> None:
    async with remembering(LARGE) as memory:
        turn = asked(memory, user("one"), stream=True)
        memory.engine.cuts = True
        first = await memory.proxy.begin(turn)
        assert (await memory.client.delete("/memory/s")).status_code == 200
        memory.engine.cuts = False
        await finish(memory, await memory.proxy.begin(turn))
        with pytest.raises(BrokenAnswerError):
            await finish(memory, first)
        assert await turns_of(memory) == [1]


def chat_of(key: str, *texts: str) -> ChatSession:
    blocks = [
        Block(f"user#{number}", "user", [user(text)], [b"%d" % number], 1, None, 1)
        for number, text in enumerate(texts)
    ]
    return ChatSession(key, key, "caller", blocks=blocks)


async def test_text_that_memory_has_no_room_for_stays_in_its_file(tmp_path: Path) -> None:
    kept = ChatStoreSettings(ram_bytes=3000, directory=tmp_path)
    store = ChatStore(kept)
    chat = store.get(chat_of("a", "x" * 2000, "y" * 2000))
    for _ in range(3):
        await store.keep(chat)
        assert [bool(block.messages) for block in chat.blocks] == [False, True]
    assert store.get(chat_of("a")) is chat
    assert [len(block.text) for block in chat.blocks] == [2000, 2000]
    again = ChatStore(kept).get(chat_of("a"))
    assert [len(block.text) for block in again.blocks] == [2000, 2000]


async def test_a_crowd_costs_no_text_that_memory_has_no_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ChatStoreSettings(ram_bytes=3000, directory=tmp_path)
    store, texts = ChatStore(kept), ["x" * 2000, "y" * 2000]
    chat = store.get(chat_of("a", *texts))
    await store.keep(chat)
    assert not chat.blocks[0].messages
    with monkeypatch.context() as crowd:
        crowd.setattr(Path, "read_bytes", Mock(side_effect=OSError(errno.ENFILE, "no more")))
        with pytest.raises(UnreadError):
            store.get(chat_of("a"))
        await store.keep(chat)
        assert store.unwritten == 1
    assert store.chats() == [chat]
    for each in (store, ChatStore(kept)):
        assert [block.text for block in each.get(chat_of("a")).blocks] == texts
    await store.keep(chat)
    assert store.unwritten == 0


async def test_many_short_messages_take_no_more_memory_than_is_allowed() -> None:
    allowed = 8 << 20
    tracemalloc.start()
    try:
        store = ChatStore(ChatStoreSettings(ram_bytes=allowed))
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for key in map(str, range(30)):
            chat = ChatSession(key, key, "caller")
            said = [user(f"word {key} {number}") for number in range(1000)]
            chat.follow(json.loads(json.dumps(said)), False, {})
            await store.keep(store.get(chat))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        assert store.forgotten > 10
        assert 0.5 * allowed < after - before < 1.25 * allowed
    finally:
        tracemalloc.stop()


async def test_text_that_is_given_up_is_not_counted_any_more(tmp_path: Path) -> None:
    store = ChatStore(ChatStoreSettings(ram_bytes=4000, directory=tmp_path))
    texts = [f"{number}" for number in range(10)]
    chat = store.get(chat_of("a", *texts))
    for _ in range(3):
        await store.keep(chat)
        kept = [block for block in chat.blocks if block.messages]
        assert 2 <= len(kept) <= 5
    assert [block.text for block in store.get(chat_of("a")).blocks] == texts


async def test_the_disk_has_a_budget_and_what_a_killed_write_left_goes(tmp_path: Path) -> None:
    mine = f"{'0' * 16}-{'1' * 32}.abcdefgh.new"
    (tmp_path / mine).write_bytes(b"kvgraph chat 3\nsecret")
    store = ChatStore(ChatStoreSettings(directory=tmp_path, disk_bytes=5000))
    assert list(tmp_path.iterdir()) == []
    for key in "abcde":
        await store.keep(store.get(chat_of(key, "x" * 2000)))
    assert len(list(tmp_path.iterdir())) == 2
    for path in tmp_path.iterdir():
        path.unlink()  # somebody else's doing
    await store.keep(store.get(chat_of("f", "x" * 2000)))
    assert store.of_caller("caller", "", "e") != []
    assert len(list(tmp_path.iterdir())) == 1
    store = ChatStore(ChatStoreSettings(directory=tmp_path, disk_bytes=5000))
    for key in "gh":
        await store.keep(store.get(chat_of(key, "x" * 2000)))
    assert len(list(tmp_path.iterdir())) == 2
    assert not store.of_caller("caller", "", "f")


async def test_a_chat_is_kept_without_a_look_at_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChatStore(ChatStoreSettings(directory=tmp_path))

    def looks(*_: Any) -> Any:
        raise AssertionError("it looked at the directory")

    with monkeypatch.context() as context:
        for name in ("glob", "iterdir", "stat"):
            context.setattr(Path, name, looks)
        await store.keep(store.get(chat_of("a", "x")))
        store.forget("b")
    assert len(list(tmp_path.iterdir())) == 1
