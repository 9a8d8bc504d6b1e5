"""What belongs to one turn of a chat, and what a client changes between two."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from chat_scenes import (
    APPEND,
    ASKED,
    FACT,
    LARGE,
    SMALL,
    append,
    asked,
    finish,
    model,
    names,
    noise,
    reads,
    result,
    shown,
    told,
    user,
)
from kvgraph.advisor.memory.settings import MemorySettings, Mode
from kvgraph_bench.memory.chat_engine import ChatEngine, Remembering, remembering, words_of


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def counted(memory: Remembering) -> int:
    """Tokens of the last prompt, as the engine counts them."""
    return sum(len(words_of(each)) + 1 for each in memory.engine.got[-1]["messages"])


async def test_a_long_answer_may_be_asked_for_and_the_chat_stays_in_the_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with remembering(SMALL) as memory:
        chat = [user("hello"), user(FACT)]
        for number in range(3):
            answer = await memory.chat(chat, max_tokens=4096)
            chat += [answer.json()["choices"][0]["message"], noise(number, 2)]
        assert FACT in memory.prompt()
        assert memory.proxy.counts.evicted == 0
        assert memory.engine.got[-1]["max_tokens"] == 4096
    said = [each.getMessage() for each in caplog.records if "4096" in each.getMessage()]
    assert len(said) == 1
    assert "50 of the budget's 100" in said[0]


class Counting(ChatEngine):
    """Says what a prompt took: its messages, and 30 tokens of tools."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counts(message: Any) -> None:
            answer = json.loads(message["body"]) if message.get("body") else {}
            if "choices" in answer:
                tokens = sum(len(words_of(each)) + 1 for each in self.got[-1]["messages"])
                answer["usage"] = {"prompt_tokens": tokens + 30}
                message = message | {"body": json.dumps(answer).encode()}
            await send(message)

        await super().__call__(scope, receive, counts)


@pytest.mark.parametrize("refuses", [True, False])
async def test_what_the_tools_take_is_learned_of_prompts_that_are_ours_alone(refuses: bool) -> None:
    engine = Counting()
    engine.refuses = lambda body: refuses and len(body["messages"]) < 11
    async with remembering(MemorySettings(200), engine=engine) as memory:
        answer = await memory.chat([user(f"{number} " * 30) for number in range(12)])
        assert answer.status_code == 200
        assert memory.proxy.counts.as_sent == refuses
        chat = await shown(memory)
        resident = [each for each in chat["blocks"] if each["place"] is not None]
        fixed = chat["tokens"] - sum(each["tokens"] for each in resident)
        assert fixed == (0 if refuses else 30)


async def test_another_prompt_of_as_many_messages_is_another_prompt() -> None:
    engine = ChatEngine()
    engine.refuses = lambda body: "<think>" not in body["messages"][1]["content"]
    async with remembering(LARGE, engine=engine) as memory:
        answer = await memory.chat([user("one"), model("<think>well</think>yes"), user("two")])
        assert answer.status_code == 200
        assert memory.proxy.counts.as_sent == 1


async def test_a_client_that_appends_means_all_of_its_chat() -> None:
    async with remembering(MemorySettings(200)) as memory:
        texts = [f"{number} " * 30 for number in range(8)]
        for text in texts:
            await append(memory, text)
        assert memory.proxy.counts.evicted > 0
        memory.engine.refuses = lambda body: len(body["messages"]) < 17
        assert (await append(memory, "last")).status_code == 200
        said = [text for each in texts for text in (each, "well then")]
        assert memory.prompt() == [*said, "last"]


async def test_a_prompt_that_was_the_clients_own_is_not_sent_twice() -> None:
    async with remembering(replace(LARGE, mode=Mode.DISCARD)) as memory:  # which adds no hints
        await append(memory, "one")
        memory.engine.refuses = lambda _: True
        assert (await append(memory, "two")).status_code == 400
        assert memory.prompt() == ["one", "well then", "two"]
        assert len(memory.engine.got) == 2
        assert memory.proxy.counts.as_sent == 0


async def test_hints_of_a_client_that_repeats_its_rules_are_about_what_they_name() -> None:
    async with remembering(LARGE) as memory:
        await append(memory, system("be kind"), "one")
        hints = {"messages": [{"index": 0, "identity": "rules"}, {"index": 1, "identity": "two"}]}
        await append(memory, system("be kind"), "two", hints=hints)
        assert await names(memory) == ["rules", "user#0", "assistant#0", "two", "assistant#1"]


async def test_rules_with_a_clock_in_them_leave_the_chat_as_it_is() -> None:
    async with remembering(replace(SMALL, budget=104)) as memory:
        chat = [system("it is 0"), user("hello"), user(FACT)]
        for number in range(30):
            chat[0] = system(f"it is {number}")
            answer = await memory.chat(chat)
            assert memory.prompt()[0] == f"it is {number}"
            chat += [answer.json()["choices"][0]["message"], noise(number)]
        assert (await shown(memory))["turn"] == 30
        answer = await memory.chat([system("it is late"), *chat[1:-1], user(ASKED)])
        assert told(answer)["recalled"] == ["user#1"]
        assert memory.prompt()[0] == "it is late"
        assert memory.prompt()[-2:] == [FACT, ASKED]


async def test_a_client_that_appends_may_change_its_rules() -> None:
    async with remembering(LARGE) as memory:
        await append(memory, system("it is one"), "one")
        await append(memory, system("it is two"), "two")
        assert memory.prompt() == ["it is two", "one", "well then", "two"]


async def test_a_client_that_appends_names_its_chat() -> None:
    async with remembering(LARGE) as memory:
        body = {"model": "m", "messages": [user("one")], "kv_transfer_params": APPEND}
        answer = await memory.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "X-Session-ID" in answer.json()["error"]["message"]
        assert memory.engine.got == []
        assert len(memory.proxy.store) == 0
        named = await memory.client.post("/v1/chat/completions", json={**body, "session_id": "s"})
        assert named.status_code == 200


async def test_a_turn_is_what_follows_the_users_word() -> None:
    engine = ChatEngine()

    def says(body: dict[str, Any]) -> dict[str, Any]:
        calls = sum(each["role"] == "tool" for each in body["messages"])
        return model(None, tool_calls=[reads("a.py", f"c{calls}")]) if calls < 16 else model()

    engine.says = says
    async with remembering(LARGE, engine=engine) as memory:
        await append(memory, "read them")
        for number in range(16):
            await append(memory, result(call=f"c{number}"))
        assert len(memory.engine.got) == 17
        assert (await shown(memory))["turn"] == 1
        await append(memory, "and now ?")
        assert (await shown(memory))["turn"] == 2


async def test_an_answer_to_a_request_that_another_one_followed_is_not_kept() -> None:
    async with remembering(LARGE) as memory:
        first = await memory.proxy.begin(asked(memory, user("one")))
        second = await memory.proxy.begin(asked(memory, user("one"), model("I say")))
        for each in (first, second):
            await finish(memory, each)
        assert await names(memory) == ["user#0", "assistant#0", "assistant#1"]


@pytest.mark.parametrize("keeps", [False, True])
async def test_what_was_thought_before_a_call_is_there_when_its_result_is(keeps: bool) -> None:
    engine = ChatEngine()
    thought = "<think>I look it up</think>"

    def says(body: dict[str, Any]) -> dict[str, Any]:
        if body["messages"][-1]["role"] == "tool":
            return model("<think>so</think>it prints")
        more = {"tool_calls": [reads("a.py")], "reasoning_content": "there may be more"}
        return model(thought + "well", **more)

    engine.says = says
    async with remembering(replace(LARGE, strip_think=not keeps), engine=engine) as memory:
        await append(memory, "read it")
        answer = await append(memory, result())
        sent = memory.engine.got[-1]["messages"][1]
        assert sent["content"] == thought + "well"
        assert sent["reasoning_content"] == "there may be more"
        assert told(answer)["tokens"] == counted(memory)
        answer = await append(memory, "and now ?")
        sent = memory.engine.got[-1]["messages"][1]
        assert (sent["content"] == "well") is not keeps
        assert ("reasoning_content" in sent) is keeps
        assert ("<think>so</think>" in memory.prompt()[3]) is keeps
        assert told(answer)["tokens"] == counted(memory)


async def test_thoughts_that_a_client_repeats_are_those_of_their_turn() -> None:
    async with remembering(LARGE) as memory:
        old, new = model("<think>a</think>yes"), model("<think>b</think>", tool_calls=[reads("a")])
        await memory.chat([user("one"), old, user("two"), new, result()])
        assert memory.prompt() == ["one", "yes", "two", "<think>b</think>", "print ()"]


async def test_names_of_blocks_are_their_own() -> None:
    async with remembering(LARGE) as memory:
        hints = {"messages": [{"role": "user", "identity": "plan"}]}
        await append(memory, "one", "two", hints=hints)
        await append(memory, "three")
        await append(memory, "four", hints={"messages": [{"index": 0, "identity": "user#0"}]})
        await append(memory, "five")
        found = await names(memory)
        said = [name for name in found if not name.startswith("assistant")]
        assert said == ["plan", "plan#0", "user#0", "user#0#0", "user#1"]
        assert len(found) == len(set(found))


async def test_a_name_stays_where_a_number_below_it_is_free() -> None:
    async with remembering(LARGE) as memory:
        hints = {"messages": [{"index": 0, "identity": "plan"}]}
        await append(memory, "one", "two", hints=hints)
        await append(memory, "three")
        assert await names(memory) == ["plan", "user#1", "assistant#0", "user#2", "assistant#1"]


async def test_long_paths_that_begin_alike_have_several_names() -> None:
    async with remembering(LARGE) as memory:
        for number in range(2):
            said = model(None, tool_calls=[reads("d/" * 99 + f"{number}")])
            await append(memory, "a", said, result(), said, result())
        found = await names(memory)
        assert len(found) == len(set(found))
