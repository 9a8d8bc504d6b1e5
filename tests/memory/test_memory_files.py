"""Chats in a directory: damage, other people's files, and a disk that takes nothing more."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_scenes import APPEND, LARGE, append, asked, finish, model, names, shown, user
from kvgraph.advisor.memory import store
from kvgraph.advisor.memory.chat import Block, ChatSession
from kvgraph.advisor.memory.settings import ChatStoreSettings, MemorySettings
from kvgraph.advisor.memory.store import ChatFiles
from kvgraph.graph.errors import ConfigError
from kvgraph_bench.memory.chat_engine import ChatEngine, remembering

HEAD = b"kvgraph chat 3\n"
BODY = len(HEAD) + 32
SAID = msgspec.msgpack.encode("one äöü")


def failing(number: int) -> Callable[..., None]:
    """What a disk does instead."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fails


async def spoken(directory: Path, *texts: str, **more: Any) -> list[str]:
    """A chat that is appended to by a new process for each text; the last prompt."""
    prompt: list[str] = []
    for text in texts:
        async with remembering(LARGE, kept=ChatStoreSettings(directory=directory)) as memory:
            answer = await append(memory, text, **more)
            assert answer.status_code == 200, answer.text
            prompt = memory.prompt()
    return prompt


def signed(chat: bytes) -> bytes:
    return HEAD + hashlib.blake2b(chat, digest_size=32).digest() + chat


def flipped(data: bytes, seed: int) -> bytes:
    bits, rng = bytearray(data), random.Random(seed)
    at = rng.randrange(8 * len(bits))
    bits[at // 8] ^= 1 << at % 8
    return bytes(bits)


DAMAGES = {
    "no UTF-8": lambda data: data.replace("ä".encode(), b"\xff\xa4", 1),
    "deep": lambda _: b"\x91" * 100_000,
    "a deep message": lambda data: signed((b"\x91" * 100_000).join(data[BODY:].rsplit(SAID, 1))),
    "empty": lambda _: b"",
    "cut": lambda data: data[: len(data) // 2],
    "cut in its head": lambda data: data[:20],
    "zeros": lambda data: bytes(len(data)),
    "one letter": lambda data: data.replace(b"one", b"two", 1),
    "no digest": lambda data: HEAD + data[BODY:],
    "of four billion": lambda _: signed(b"\xdd\xff\xff\xff\xff"),
    "another chat's": lambda data: signed(
        msgspec.msgpack.encode(msgspec.msgpack.decode(data[BODY:]) | {"key": "other"})
    ),
    "another format": lambda data: data.replace(b"chat 3", b"chat 4", 1),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_file_is_set_aside_and_its_chat_begins_anew(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ChatStoreSettings(directory=tmp_path)
    await spoken(tmp_path, "one äöü")
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    bad = DAMAGES[name](good)
    assert bad != good

    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING):
        assert await spoken(tmp_path, "two") == ["two"]
    lines = [each.getMessage() for each in caplog.records if path.name in each.getMessage()]
    assert len(lines) == 1
    assert "äöü" not in lines[0]
    aside = path.with_name(path.name + ".unreadable")
    assert aside.read_bytes() == bad
    assert await spoken(tmp_path, "three") == ["two", "well then", "three"]

    path.write_bytes(bad)
    async with remembering(LARGE, kept=kept) as memory:
        assert (await memory.client.get("/memory/s")).status_code == 404
        assert (await memory.client.delete("/memory/s")).status_code == 200
        assert (await memory.client.delete("/memory/s")).status_code == 404
    assert list(tmp_path.iterdir()) == []


async def test_a_crowd_that_takes_all_open_files_costs_no_chat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spoken(tmp_path, "one")
    async with remembering(LARGE, kept=ChatStoreSettings(directory=tmp_path)) as memory:
        with monkeypatch.context() as crowd:
            crowd.setattr(Path, "read_bytes", failing(errno.EMFILE))
            answers = [
                await append(memory, "lost"), await memory.client.get("/memory/s"),
                await memory.client.delete("/memory/s"),
            ]  # fmt: skip
        assert [each.status_code for each in answers] == [503] * 3
        assert (await append(memory, "two")).status_code == 200
        assert memory.prompt() == ["one", "well then", "two"]


async def test_whatever_bit_is_flipped_chats_are_answered(tmp_path: Path) -> None:
    await spoken(tmp_path, "one äöü", "two")
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    async with remembering(LARGE, kept=ChatStoreSettings(directory=tmp_path)) as memory:
        for seed in range(25):
            path.write_bytes(flipped(good, seed))
            answer = await append(memory, "three")
            assert answer.status_code == 200, (seed, answer.text)
            assert memory.prompt() == ["three"], seed  # nothing damaged is taken for what was said
            assert (await memory.client.get("/memory/s")).status_code in (200, 404)
            assert (await memory.client.delete("/memory/s")).status_code in (200, 404)


async def test_files_of_others_are_left_alone_and_do_not_count(tmp_path: Path) -> None:
    stem = f"{'0' * 16}-{'1' * 32}"
    others = {
        "thesis.new": b"mine", "plan.chat": b"mine", "a-b.chat": b"x" * 9000,
        "tmpabcdefgh.new": b"mine", f"{stem}.abcdefgh.new": b"mine", f"{stem}.chat.new": b"mine",
        "tmpABC.new": HEAD, "notes-2026.chat": HEAD + b"x" * 9000,
    }  # fmt: skip
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / f"{'2' * 16}-{'3' * 32}.chat").mkdir()
    (tmp_path / f"{'4' * 16}-{'5' * 32}.chat").symlink_to(tmp_path / "thesis.new")
    os.mkfifo(tmp_path / f"{'6' * 16}-{'7' * 32}.chat")
    foreign = tmp_path / f"{stem}.chat"
    foreign.write_bytes(b"somebody's")
    files = ChatFiles(tmp_path, 3000)
    for key in "abc":
        await files.write(ChatSession(key, key, "caller"))
    assert [files.read(key) is not None for key in "abc"] == [True] * 3
    files.forget("a")
    assert len(list(tmp_path.glob("*.chat"))) == 6 + 2
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert (tmp_path / f"{stem}.chat.unreadable").read_bytes() == b"somebody's"


async def test_a_full_disk_leaves_chats_in_memory_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    kept = ChatStoreSettings(directory=tmp_path)
    async with remembering(LARGE, kept=kept) as memory:

        async def says(text: str, session: str = "s") -> list[str]:
            await append(memory, text, session=session)
            return memory.prompt()

        async def unwritten() -> int:
            return int((await memory.client.get("/memory")).json()["unwritten"])

        assert await says("one") == ["one"]
        with monkeypatch.context() as context:
            context.setattr(store.os, "replace", failing(errno.ENOSPC))
            assert len(await says("two")) == 3
            assert len(await says("three")) == 5
            await says("other", "t")
            assert await unwritten() == 2
        said = [each for each in caplog.records if "No space left" in each.getMessage()]
        assert len(said) == 1
        assert len(list(tmp_path.iterdir())) == 1  # nothing half-written stays
        assert len(await says("four")) == 7
        assert await unwritten() == 1
        await memory.client.delete("/memory/t")
        assert await unwritten() == 0
    assert len(await spoken(tmp_path, "five")) == 9


async def test_what_is_not_on_disk_leaves_memory_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ChatStoreSettings(ram_bytes=9000, directory=tmp_path)
    async with remembering(LARGE, kept=kept) as memory:
        await append(memory, "one")
        with monkeypatch.context() as context:
            context.setattr(store.os, "replace", failing(errno.EIO))
            await append(memory, "two")
        for number in range(5):
            await append(memory, f"x{number} " + "y" * 1500, session=f"other{number}")
        assert memory.proxy.store.forgotten == 0
        assert len(memory.proxy.store) < 6
        await append(memory, "three")
        assert len(memory.prompt()) == 5  # and what was not written is there


def test_a_directory_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "chats"):
        with pytest.raises(ConfigError, match=r"--store .*file"):
            ChatFiles(path, 1000)


def test_a_directory_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    for mode in (0o777, 0o1777):  # where files of others stay theirs, too, as in /tmp
        (tmp_path / "open").chmod(mode)
        with pytest.raises(ConfigError, match=r"--store .* every user can write"):
            ChatFiles(tmp_path / "open", 1000)


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could put words into a user's mouth; the digests have no key."""
    if os.geteuid() == 0:
        os.chown(tmp_path, 65_534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(ConfigError, match=r"--store .* belongs to user"):
        ChatFiles(tmp_path, 1 << 20)


async def test_a_start_on_a_full_disk_serves_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(Path, "mkdir", failing(errno.ENOSPC))
        files = ChatFiles(tmp_path / "chats", 1000)
        await files.write(ChatSession("a", "a", "caller"))
        assert files.unwritten == {"a"}
    await files.write(ChatSession("a", "a", "caller"))
    assert not files.unwritten
    assert files.read("a") is not None


SIDES = {
    "a title": lambda chat: [user("### Task: a title for: " + json.dumps(chat)[-300:])],
    "a title under a system's words": lambda chat: [
        {"role": "system", "content": "You make titles."}, user("the title of " + str(chat)[-200:])
    ],
    "with the first message": lambda chat: [chat[0], user("which title has this?")],
    "without the first messages": lambda chat: [*chat[3:], user("which title has this?")],
    "without some in the middle": lambda chat: [
        *chat[:1], *chat[4:], user("which title has this?")
    ],
    "with the newest messages": lambda chat: [*chat[-3:], user("which title has this?")],
    "of another model's form": lambda chat: [
        {"role": "user", "content": [{"type": "text", "text": "tags?"}]}
    ],
}  # fmt: skip


@pytest.mark.parametrize("budget", [150, 10_000])
@pytest.mark.parametrize("kind", SIDES)
def test_a_side_question_leaves_the_chat_as_it_was(kind: str, budget: int, tmp_path: Path) -> None:
    async def played(asks: bool, directory: Path) -> tuple[Any, list[list[str]]]:
        engine, chat = ChatEngine(), list[Any]()
        engine.says = lambda body: model(f"answer {len(body['messages'])}")
        prompts: list[list[str]] = []
        kept = ChatStoreSettings(directory=directory)
        async with remembering(MemorySettings(budget, settled=0), engine, kept) as memory:
            for turn in range(14):
                chat.append(user(f"turn {turn} " + "word " * 10))
                answer = await memory.chat(chat)
                prompts.append(memory.prompt())
                chat.append(answer.json()["choices"][0]["message"])
                # a title alone; or with tags, and what to ask next
                for side in range((1, 3)[turn % 2] if asks and turn > 3 else 0):
                    asked = [*SIDES[kind](chat)[:-1], user(f"{SIDES[kind](chat)[-1]} {side}")]
                    answer = await memory.chat(asked)
                    assert answer.status_code == 200
            return await shown(memory), prompts

    plain = asyncio.run(played(False, tmp_path / "plain"))
    known, prompts = asyncio.run(played(True, tmp_path / "asked"))
    assert prompts == plain[1]
    if kind != "with the first message":  # which is an edit, until the chat goes on
        assert known == plain[0]


@pytest.mark.parametrize("places", [slice(-2, None), slice(1, 3)], ids=["newest", "first"])
def test_a_side_question_from_the_first_turn_on_leaves_the_chat_as_it_was(places: slice) -> None:
    """It has messages of the chat, and comes before the chat has been continued."""
    chat, messages = ChatSession("key", "name", "caller"), [{"role": "system", "content": "Help."}]

    def asks(sent: list[Any]) -> ChatSession:
        nonlocal chat
        chat, version = chat.version_for(sent)
        version.follow(sent, False, {})
        version.add([model(f"answer {len(sent)}")])
        return version

    known = list[Block]()
    for turn in range(5):
        messages.append(user(f"turn {turn}"))
        version = asks(messages)
        if turn > 1:
            assert all(one is same for one, same in zip(known, version.blocks, strict=False))
        known = version.blocks
        messages.append(model(f"answer {len(messages)}"))
        for what in ("title", "tags"):
            asks([*messages[places], user(f"which {what}?")])
        assert len(chat.versions) <= 3


async def test_a_chat_that_is_begun_anew_under_its_name_is_followed(tmp_path: Path) -> None:
    async with remembering(LARGE, kept=ChatStoreSettings(directory=tmp_path)) as memory:

        async def talk(chat: list[Any], turns: int) -> list[Any]:
            for turn in range(turns):
                chat = [*chat, user(f"turn {turn}")]
                chat.append((await memory.chat(chat)).json()["choices"][0]["message"])
            return chat

        first = await talk([user("hello")], 4)
        second = await talk([user("another matter")], 1)
        assert len(await names(memory)) == 9
        second = await talk(second, 1)
        assert len(await names(memory)) == len(second) == 5
        await memory.chat([user("a title?")])
        second = await talk(second, 1)
        assert len(await names(memory)) == len(second) == 7
        assert len(memory.proxy.store) == 1
        assert (await memory.client.delete("/memory/s")).status_code == 200
        assert len(memory.proxy.store) == 0
        assert not list(tmp_path.iterdir())
        assert first[0] == user("hello")


async def test_a_side_question_that_fails_leaves_the_chat(tmp_path: Path) -> None:
    async with remembering(LARGE, kept=ChatStoreSettings(directory=tmp_path)) as memory:
        await append(memory, "one")
        memory.engine.refuses = lambda _: True
        assert (await memory.chat([user("a title?")])).status_code == 400
        memory.engine.refuses = lambda _: False
        await append(memory, "two")
        assert memory.prompt() == ["one", "well then", "two"]


async def test_a_side_question_meanwhile_leaves_the_answer_to_the_chat() -> None:
    async with remembering(LARGE) as memory:
        await append(memory, "one")
        turn = asked(memory, user("two"), kv_transfer_params=APPEND)
        begun = await memory.proxy.begin(turn)
        await memory.chat([user("a title?")])
        await finish(memory, begun)
        await append(memory, "three")
        assert memory.prompt() == ["one", "well then", "two", "well then", "three"]
