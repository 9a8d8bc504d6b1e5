"""Turns of one conversation are one session, whatever the harness changes from one to the next."""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from kvgraph.advisor.fleet.callers import FIELDS, HARNESSES, Callers, Headers

TEXT = "Read the file and fix the failing test, please. " * 40
SYSTEM = "You are a coding agent. Follow the rules of the house, and say what you did. " * 20
Messages = list[dict[str, Any]]
Body = dict[str, Any]


def bodies(session: int, turns: int, text: str = TEXT) -> Iterator[Body]:
    """A conversation as it grows; sessions differ by a number alone."""
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"session {session} turn {turn}: {text}"})
        yield {"model": "m", "messages": copy.deepcopy(messages)}
        messages.append({
            "role": "assistant", "content": f"done {session} {turn}",
            "reasoning_content": f"thought {turn}",
            "tool_calls": [{"id": f"c{turn}", "type": "function",
                            "function": {"name": "bash", "arguments": '{"a": 1, "b": 2}'}}],
        })  # fmt: skip
        messages.append({"role": "tool", "tool_call_id": f"c{turn}", "content": f"ok {turn}"})


Change = Callable[[Body, int], None]


def newest(body: Body) -> dict[str, Any]:
    message: dict[str, Any] = body["messages"][-1]
    return message


def changed(words: str, front: bool = False) -> Change:
    def change(body: Body, turn: int) -> None:
        stamp = words.format(turn=turn)
        text = newest(body)["content"]
        newest(body)["content"] = f"{stamp} {text}" if front else f"{text} {stamp}"

    return change


def cache_control_slides(body: Body, turn: int) -> None:
    text = newest(body)["content"]
    newest(body)["content"] = [
        {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    ]


def a_date_in_the_system(body: Body, turn: int) -> None:
    body["messages"][0]["content"] = f"It is 12:{turn:02d}:07 on 28 November. {SYSTEM}"


def billing_line(body: Body, turn: int) -> None:
    line = f"x-anthropic-billing-header: cc_version=2.1.120; cc_entrypoint=cli; cch={turn:05x};"
    body["messages"][0]["content"] = [
        {"type": "text", "text": line}, {"type": "text", "text": SYSTEM},
    ]  # fmt: skip


def another_system(body: Body, turn: int) -> None:
    if turn > 1:  # as harnesses do that plan first and act then
        body["messages"][0]["content"] = f"Mode {turn}. " + "Act now; do not plan any more. " * 20


def old_thoughts_are_dropped(body: Body, turn: int) -> None:
    for message in body["messages"][:-3]:
        message.pop("reasoning_content", None)


def old_results_are_cleared(body: Body, turn: int) -> None:
    for message in body["messages"][:-2]:
        if message["role"] == "tool":
            message["content"] = "[cleared]"


def ids_and_names(body: Body, turn: int) -> None:
    for number, message in enumerate(body["messages"]):
        message["id"] = f"m{turn}-{number}"
        message["name"] = f"n{turn}"
        for call in message.get("tool_calls", ()):
            call["id"] = f"{turn}-{call['id']}"


def space_at_the_ends(body: Body, turn: int) -> None:
    for message in body["messages"][: -1 - turn % 2]:
        message["content"] += "\n" * (turn % 3)


def lists_and_texts(body: Body, turn: int) -> None:
    for message in body["messages"][turn % 2 :: 2]:
        message["content"] = [{"type": "text", "text": message["content"]}]


def keys_in_another_order(body: Body, turn: int) -> None:
    for number, message in enumerate(body["messages"]):
        order = sorted(message, reverse=turn % 2 == 0)
        body["messages"][number] = {key: message[key] for key in order}
        for call in body["messages"][number].get("tool_calls", ()):
            spaced = ('{"b":2,"a":1}', '{ "a": 1, "b": 2 }')[turn % 2]
            call["function"]["arguments"] = spaced


def a_message_behind(body: Body, turn: int) -> None:
    body["messages"].append({"role": "user", "content": f"<info>It is 12:{turn:02d}:07</info>"})


def rules_behind(body: Body, turn: int) -> None:
    body["messages"].append({"role": "system", "content": "Answer with blocks of code. " * 9})


def an_answer_begun(body: Body, turn: int) -> None:
    body["messages"].append({"role": "assistant", "content": "{"})


def a_picture_signed_anew(body: Body, turn: int) -> None:
    for number, message in enumerate(body["messages"]):
        if message["role"] == "user":
            query = f"X-Amz-Date={turn}&X-Amz-Signature={turn}{number}"
            url = f"https://pictures.example.com/{number}.png?{query}"
            message["content"] = [
                {"type": "text", "text": message["content"]},
                {"type": "image_url", "image_url": {"url": url}},
            ]


def the_oldest_are_dropped(body: Body, turn: int) -> None:
    del body["messages"][1 : max(1, len(body["messages"]) - 8)]


def all_of_claude_codes(body: Body, turn: int) -> None:
    for change in (cache_control_slides, billing_line, ids_and_names):
        change(body, turn)


CHANGES: dict[str, Change] = {
    "nothing": lambda body, turn: None,
    "a time stamp behind": changed("(12:0{turn})"),
    "a time stamp before": changed("[2026-11-28T12:0{turn}:01Z]", front=True),
    "a reminder": changed("<system-reminder>{turn} files have changed</system-reminder>"),
    "cache_control": cache_control_slides,
    "a date in the system": a_date_in_the_system,
    "billing": billing_line,
    "another system": another_system,
    "thoughts": old_thoughts_are_dropped,
    "results": old_results_are_cleared,
    "ids and names": ids_and_names,
    "space": space_at_the_ends,
    "lists": lists_and_texts,
    "keys": keys_in_another_order,
    "a message behind": a_message_behind,
    "rules behind": rules_behind,
    "an answer begun": an_answer_begun,
    "a picture": a_picture_signed_anew,
    "a window": the_oldest_are_dropped,
    "all of Claude Code's": all_of_claude_codes,
}


def sessions_of(
    change: Change, many: int = 4, turns: int = 8, text: str = TEXT
) -> dict[int, set[str]]:
    """By conversation, as which sessions its turns were taken, while all go on side by side."""
    callers, found = Callers(), dict[int, set[str]]()
    running = [bodies(number, turns, text) for number in range(many)]
    for turn in range(turns):
        for number, session in enumerate(running):
            body = next(session)
            change(body, turn)
            turned = callers.read("POST", "/v1/chat/completions", [], json.dumps(body).encode())
            assert turned.turn is not None
            callers.sent(turned.turn)
            found.setdefault(number, set()).add(turned.turn.session)
    return found


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_conversation_is_one_session_and_no_other_is_the_same(change: Change) -> None:
    found = sessions_of(change)
    assert [len(each) for each in found.values()] == [1, 1, 1, 1]
    assert len(set().union(*found.values())) == 4


def test_short_messages_and_other_scripts_are_known_again_too() -> None:
    for text in ("what now?", "请阅读文件并修复失败的测试"):
        found = sessions_of(changed("(12:0{turn})"), text=text)
        assert [len(each) for each in found.values()] == [1, 1, 1, 1]
        assert len(set().union(*found.values())) == 4


def test_messages_of_anthropics_api_with_a_billing_block_are_one_session() -> None:
    callers, seen = Callers(), set()
    messages: Messages = []
    for turn in range(6):
        text = {"type": "text", "text": f"turn {turn} {TEXT}"}
        messages.append({"role": "user", "content": [text]})
        sent = copy.deepcopy(messages)
        sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        line = f"x-anthropic-billing-header: cc_version=2.1.120; cch={turn:05x};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": SYSTEM}]
        body = {"model": "m", "system": system, "messages": sent}
        turned = callers.read("POST", "/v1/messages", [], json.dumps(body).encode()).turn
        assert turned is not None
        callers.sent(turned)
        seen.add(turned.session)
        thought = {"type": "thinking", "thinking": "hm", "signature": f"{turn}"}
        messages.append({"role": "assistant", "content": [thought] * (turn == 4) + [text]})
    assert len(seen) == 1
    assert len(turned.prompt.links) == 12, "the system, and what was said"


def read(callers: Callers, body: Body, path: str = "/v1/chat/completions") -> str:
    turn = callers.read("POST", path, [], json.dumps({"model": "m", **body}).encode()).turn
    assert turn is not None
    callers.sent(turn)
    return turn.session


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_prompts_that_only_begin_alike_are_sessions_of_their_own() -> None:
    callers = Callers()
    examples = [user("an example " * 100), {"role": "assistant", "content": "a label " * 100}]
    asked = [{"messages": [*examples, user(f"text {number}")]} for number in range(6)]
    assert len({read(callers, each) for each in asked}) == 6
    template = [{"messages": [user(f"{TEXT} document {number}")]} for number in range(6)]
    assert len({read(callers, each) for each in template}) == 6
    system = {"role": "system", "content": SYSTEM}
    chats = [{"messages": [system, user(f"{number}")]} for number in range(6)]
    assert len({read(callers, each) for each in chats}) == 6
    labels = [user("another one " * 100), {"role": "assistant", "content": "its label " * 100}]
    texts = [[user(f"{many} {number}") for number in range(many)] for many in range(1, 5)]
    told = [{"messages": [*labels, *each]} for each in texts]
    assert len({read(callers, each) for each in told}) == 4
    judges = [
        {"messages": [{"role": "system", "content": words * 30}, user("hello " * 9)]}
        for words in ("Judge the text by its style. ", "Find a title of five words. ")
    ]
    assert len({read(callers, each) for each in judges}) == 2


def test_items_of_responses_are_one_session_without_their_ids_and_thoughts() -> None:
    callers, items, seen = Callers(), list[Any](), set()
    for turn in range(4):
        items.append({"type": "message", **user(f"turn {turn} {TEXT}"), "id": f"msg_{turn}"})
        shown = [
            {**each, "id": f"{turn}"} for each in items if each["type"] != "reasoning" or turn % 2
        ]
        seen.add(read(callers, {"input": shown, "store": False}, "/v1/responses"))
        items += [
            {"type": "reasoning", "summary": [], "encrypted_content": f"{turn}"},
            {"type": "function_call", "name": "f", "call_id": f"{turn}", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"{turn}", "output": f"ok {turn}"},
        ]
    assert len(seen) == 1


def named(headers: Headers, body: Body, path: str = "/v1/chat/completions") -> Any:
    sent = json.dumps({"model": "m", "messages": [user("a")], **body}).encode()
    return Callers().read("POST", path, headers, sent)


@pytest.mark.parametrize("header", [each for names in HARNESSES.values() for each in names])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_harnesses_name_their_sessions_and_engines_are_told(header: str, path: str) -> None:
    asked = named([(header.lower().encode(), b"s-1")], {"input": "a"}, path)
    assert asked.turn.name == asked.turn.engine_name == "s-1"
    assert (b"x-session-id", b"s-1") in asked.headers
    assert b"session_id" not in asked.body.data


@pytest.mark.parametrize("path", FIELDS)
def test_they_do_so_in_fields_too(path: tuple[str, ...]) -> None:
    body: Any = "s-1"
    for name in reversed(path):
        body = {name: body}
    assert named([], body).turn.name == "s-1"


@pytest.mark.parametrize(
    ("user_id", "name"),
    [
        ("user_0a1b_account_5f-e6_session_1d2c-3b4a", "1d2c-3b4a"),
        ('{"device_id": "d", "account_uuid": "", "session_id": "1d2c-3b4a"}', "1d2c-3b4a"),
        ("user_0a1b", None),
        ("{", None),
    ],
)
def test_claude_codes_user_has_its_session_in_it(user_id: str, name: str | None) -> None:
    for body in ({"metadata": {"user_id": user_id}}, {"user": user_id}):
        turn = named([], body, "/v1/messages").turn
        assert (turn.name if turn.is_named else None) == name


def test_what_vllm_reads_itself_comes_first_and_is_left_as_it_came() -> None:
    header = [(b"x-claude-code-session-id", b"harness"), (b"x-session-id", b"header")]
    asked = named(header, {"session_id": "body", "prompt_cache_key": "key"})
    assert (asked.turn.name, asked.headers) == ("body", header)
    assert named(header, {}).turn.name == "header"
    assert named(header[:1], {"vllm_xargs": {"session_id": "x"}}).turn.name == "x"
    assert named([], {"prompt_cache_key": "key", "metadata": {"session_id": "m"}}).turn.name == "m"


@pytest.mark.parametrize("field", ["conversation", "prompt_cache_key"])
def test_a_name_as_long_as_a_body_is_a_session_and_is_not_kept(field: str) -> None:
    callers = Callers()
    names = ["x" * 100_000, "x" * 99_999 + "y"] * 2
    sessions = [read(callers, {"messages": [user("hi")], field: name}) for name in names]
    assert sessions[:2] == sessions[2:]
    assert sessions[0] != sessions[1]
    assert max(map(len, sessions)) < 1000


@pytest.mark.parametrize("odd", ["org/repo", "agent:main@chat", "x" * 400, "a\\b", "é"])
def test_a_name_that_engines_take_is_not_refused(odd: str) -> None:
    """vLLM takes any text: https://github.com/vllm-project/vllm, ``_get_session_id``."""
    for headers, body in (
        ([], {"session_id": odd}), ([(b"x-session-id", odd.encode())], {}),
        ([], {"vllm_xargs": {"session_id": odd}}),
        ([], {"kv_transfer_params": {"kvgraph": {"session": odd}}}),
    ):  # fmt: skip
        asked = named(headers, body)
        assert (asked.turn.name, asked.headers) == (odd, headers)


def test_what_is_no_name_is_the_engines_to_judge() -> None:
    long = [(b"x-session-id", b"x" * 10_000)]
    assert len(named(long, {}).turn.name) < 100
    twice = [(b"x-session-id", b"first"), (b"X-Session-ID", b"second")]
    asked = named(twice, {})
    assert (asked.turn.name, asked.headers) == ("first", twice), "as vLLM's server reads it"
    for body in ({"session_id": 5}, {"session_id": ["a"]}, {"vllm_xargs": {"session_id": 5}}):
        assert not named([], body).turn.is_named


@pytest.mark.parametrize("nobody", ["undefined", "null", "None"])
def test_a_client_without_a_name_may_write_so(nobody: str) -> None:
    headers = [(b"x-session-id", nobody.encode()), (b"x-session-affinity", nobody.encode())]
    assert not named(headers, {"session_id": nobody, "prompt_cache_key": nobody}).turn.is_named
    assert named(headers, {"metadata": {"session_id": "s"}}).turn.name == "s"


@pytest.mark.parametrize("odd", ["org/repo", "x" * 200, "é", "a\nb", "a@b"])
def test_a_key_that_is_an_odd_name_is_the_routers_alone(odd: str) -> None:
    asked = named([], {"prompt_cache_key": odd})
    assert (asked.turn.name, asked.turn.engine_name) == (odd, "")
    assert asked.headers == []


def test_the_router_tells_no_name_of_its_own() -> None:
    asked = named([], {})
    assert asked.turn.engine_name == ""
    assert asked.headers == []
    assert b"session" not in asked.body.data


def test_a_cache_key_of_many_chats_is_no_sessions() -> None:
    callers = Callers()
    for number in range(40):
        first = read(callers, {"prompt_cache_key": "app", "messages": [user(f"{number}")]})
    more = [user("39"), {"role": "assistant", "content": "b"}, user("c")]
    assert read(callers, {"prompt_cache_key": "app", "messages": more}) == first
    other = read(callers, {"prompt_cache_key": "app", "messages": [user("another")]})
    assert other != first
    assert len({read(callers, {"prompt_cache_key": f"{n}"}) for n in range(3)}) == 3


@pytest.mark.parametrize(
    "answer",
    [
        b'{"id":"resp_1","object":"response"}',
        b'event: response.created\ndata: {"response": {"id": "resp_1", "status": "queued"}}\n\n',
    ],
)
def test_a_response_that_continues_another_is_of_its_session(answer: bytes) -> None:
    callers = Callers()
    first = callers.read("POST", "/v1/responses", [], b'{"model": "m", "input": "hello"}').turn
    assert first is not None
    callers.sent(first)
    callers.answered(first, answer)
    body = b'{"model": "m", "input": "more", "previous_response_id": "resp_1"}'
    next_one = callers.read("POST", "/v1/responses", [], body).turn
    others = callers.read("POST", "/v1/responses", [(b"authorization", b"x")], body).turn
    assert next_one is not None
    assert others is not None
    assert next_one.session == first.session != others.session


def test_no_text_is_kept() -> None:
    asked = named([], {"messages": [user("the secret words")]})
    assert "secret" not in repr(asked.turn)


def test_prompts_are_read_on_threads_while_others_are_noted() -> None:
    callers, errors = Callers(), list[BaseException]()
    head = "x" * 300_000
    over = threading.Event()

    def asks() -> None:
        for number in count():
            if over.is_set():
                return
            chat = {"messages": [user(f"{n}") for n in range(50)] + [user(f"{number} {TEXT}")]}
            for body in ({"prompt": head + "y" * (number % 3)}, chat):
                path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
                try:
                    callers.read("POST", path, [], json.dumps(body).encode())
                except BaseException as error:
                    errors.append(error)
                    return

    turns = [
        callers.read("POST", "/v1/completions", [], json.dumps({"prompt": head + "z" * n}).encode())
        for n in range(1, 100)
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=asks) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + 4
        while time.monotonic() < until and not errors:
            for asked in turns:
                assert asked.turn is not None
                callers.sent(asked.turn)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not errors
