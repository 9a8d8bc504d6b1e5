"""Turns of one conversation are one session, whatever the harness changes from one to the next."""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from chat_scenes import user
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


STAMPED = changed("(12:0{turn})")
EACH = (
    cache_control_slides, a_date_in_the_system, billing_line, another_system,
    old_thoughts_are_dropped, old_results_are_cleared, ids_and_names, space_at_the_ends,
    lists_and_texts, keys_in_another_order, a_message_behind, rules_behind, an_answer_begun,
    a_picture_signed_anew, the_oldest_are_dropped, all_of_claude_codes,
)  # fmt: skip
CHANGES: dict[str, Change] = {
    "nothing": lambda body, turn: None,
    "a time stamp behind": STAMPED,
    "a time stamp before": changed("[2026-11-28T12:0{turn}:01Z]", front=True),
    "a reminder": changed("<system-reminder>{turn} files have changed</system-reminder>"),
    **{each.__name__: each for each in EACH},
}
CASES = {name: (change, TEXT) for name, change in CHANGES.items()} | {
    "short messages": (STAMPED, "what now?"),
    "another script": (STAMPED, "请阅读文件并修复失败的测试"),
}


@pytest.mark.parametrize(("change", "text"), CASES.values(), ids=CASES)
def test_a_conversation_is_one_session_and_no_other_is_the_same(change: Change, text: str) -> None:
    callers = Callers()
    running = [bodies(number, 8, text) for number in range(4)]
    found: list[set[str]] = [set() for _ in running]
    for turn in range(8):  # all go on side by side
        for session, names in zip(running, found, strict=True):
            body = next(session)
            change(body, turn)
            names.add(read(callers, body))
    assert [len(each) for each in found] == [1, 1, 1, 1]
    assert len(set().union(*found)) == 4


RULES = "Every *SEARCH/REPLACE block* must use this format, and no other one. " * 20


def aiders(session: int, rules: str) -> Iterator[Body]:
    """A conversation about files, most of the text, that stand behind what was said before."""
    examples = [user("Change factorial() to use math's. " * 3), told("assistant", "I need to ", 9)]
    done: Messages = []
    for turn in range(8):
        asked = f"Make change {turn} to module {session}, which handles users' requests"
        lines = " ".join(f"line {n} of {session} at {turn}" for n in range(2000))
        files = [user(f"I have *added these files*:\n{lines}"), told("assistant", "Ok, those.")]
        now = {
            "behind": [user(f"{asked}\n\n{RULES}")],
            "system": [user(asked), told("system", RULES)],
        }[rules]
        yield {"messages": [told("system", SYSTEM), *examples, *done, *files, *now]}
        done += [user(asked), told("assistant", f"blocks {session} {turn} ", 30)]


@pytest.mark.parametrize("rules", ["behind", "system"])
def test_a_conversation_goes_on_while_most_of_its_text_changes(rules: str) -> None:
    callers, running = Callers(), [aiders(session, rules) for session in range(4)]
    turns = [[read(callers, next(each)) for each in running] for _ in range(8)]
    assert [len({*names}) for names in zip(*turns, strict=True)] == [1, 1, 1, 1]
    assert len({*turns[0]}) == 4


def test_conversations_that_are_met_in_their_middle_are_not_one() -> None:
    """As after a restart of the proxy: what harnesses say stands in all of them."""
    callers, met = Callers(), list[str]()
    hint = user("You did not use a tool in your previous response. Please retry with one.")
    for session in range(20):
        said = [told("system", SYSTEM)]
        for turn in range(3 + session % 7):
            said += [user(f"step {turn} of {session}"), told("assistant", f"a {session} {turn}")]
            said += [hint, told("assistant", f"I call {turn} for {session}")]
        met.append(read(callers, {"messages": [*said, user("continue") if session % 2 else hint]}))
    assert len({*met}) == 20


def turned(
    callers: Callers, body: Body, path: str = "/v1/chat/completions", headers: Headers | None = None
) -> Any:
    """The turn that a request is, which was sent."""
    sent = json.dumps({"model": "m", **body}).encode()
    turn = callers.read("POST", path, headers or [], sent).turn
    assert turn is not None
    callers.sent(turn)
    return turn


def read(callers: Callers, body: Body, path: str = "/v1/chat/completions") -> str:
    return str(turned(callers, body, path).session)


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
        found = turned(callers, {"system": system, "messages": sent}, "/v1/messages")
        seen.add(found.session)
        thought = {"type": "thinking", "thinking": "hm", "signature": f"{turn}"}
        messages.append({"role": "assistant", "content": [thought] * (turn == 4) + [text]})
    assert len(seen) == 1
    assert len(found.prompt.links) == 12, "the system, and what was said"


def told(role: str, text: str, times: int = 1) -> dict[str, Any]:
    return {"role": role, "content": text * times}


EXAMPLES = [user("an example " * 100), told("assistant", "a label ", 100)]
ALIKE = {
    "examples": [[*EXAMPLES, user(f"text {n}")] for n in range(6)],
    "examples and texts": [
        [*EXAMPLES, *(user(f"{many} {n}") for n in range(many))] for many in range(1, 5)
    ],
    "a template": [[user(f"{TEXT} document {n}")] for n in range(6)],
    "a system text": [[told("system", SYSTEM), user(f"{n}")] for n in range(6)],
    "a text to judge": [
        [told("system", words, 30), user("hello " * 9)]
        for words in ("Judge the text by its style. ", "Find a title of five words. ")
    ],
}


@pytest.mark.parametrize("asked", ALIKE.values(), ids=ALIKE)
def test_prompts_that_only_begin_alike_are_sessions_of_their_own(asked: list[Messages]) -> None:
    callers = Callers()
    assert len({read(callers, {"messages": each}) for each in asked}) == len(asked)


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


CLAUDE = (b"X-Claude-Code-Session-Id", b"s")
CODEX = (b"session-id", b"s")


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([CLAUDE], "s"), ([CLAUDE, (b"x-claude-code-agent-id", b"a1")], "s:a1"),
        ([CODEX, (b"thread-id", b"s")], "s"), ([CODEX, (b"thread-id", b"t")], "t"),
        ([(b"session_id", b"s"), (b"thread_id", b"t")], "t"),
    ],
)  # fmt: skip
def test_a_subagent_under_its_sessions_name_is_a_session_of_its_own(
    headers: Headers, name: str
) -> None:
    """Otherwise its prompts would take the place of its parent's, which waits for it."""
    user = {"metadata": {"user_id": "user_1_session_s"}}
    asked = named(headers, user, "/v1/messages")
    assert asked.turn.name == asked.turn.engine_name == name
    explicit = named([*headers, (b"x-session-id", b"mine")], user, "/v1/messages")
    assert explicit.turn.name == "mine"


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


@pytest.mark.parametrize("odd", ["org/repo", "agent:main@chat", "~ s", "x" * 400, "a\\b", "é"])
def test_a_name_that_engines_take_is_not_refused(odd: str) -> None:
    """vLLM takes any text: https://github.com/vllm-project/vllm, ``_get_session_id``."""
    for headers, body in (
        ([], {"session_id": odd}), ([(b"x-session-id", odd.encode())], {}),
        ([], {"vllm_xargs": {"session_id": odd}}),
        ([], {"kv_transfer_params": {"kvgraph": {"session": odd}}}),
        ([], {"vllm_xargs": {"kvgraph": json.dumps({"session": odd})}}),
    ):  # fmt: skip
        asked = named(headers, body)
        assert (asked.turn.name, asked.turn.is_named) == (odd, True)
        assert asked.headers == headers


@pytest.mark.parametrize("sent", ["é".encode(), "é".encode("latin-1")])
def test_an_engine_knows_a_session_by_the_bytes_that_it_is_sent(sent: bytes) -> None:
    asked = named([(b"X-Session-ID", sent)], {})
    assert asked.turn.name == "é", "one session, in either encoding"
    assert asked.turn.engine_name == sent.decode("latin-1")
    assert asked.headers == [(b"X-Session-ID", sent)]


def test_headers_that_a_connection_names_stay_there() -> None:
    asked = named([(b"Connection", b"close, X-Own"), (b"X-Own", b"1"), (b"X-Else", b"2")], {})
    assert asked.headers == [(b"X-Else", b"2")]


@pytest.mark.parametrize("header", [b"x-api-key", b"authorization"])
def test_callers_of_other_keys_have_other_sessions(header: bytes) -> None:
    callers, name = Callers(), (b"x-session-id", b"same")
    turns = [turned(callers, {}, headers=[(header, key), name]) for key in (b"one", b"two")]
    assert turns[0].session != turns[1].session


@pytest.mark.parametrize("before", ["", "T-"])
def test_a_session_named_by_a_uuid_goes_on_under_a_new_key(before: str) -> None:
    """Helpers fetch keys that expire within minutes."""
    callers = Callers()
    name = before.encode() + b"0198f2a1-7c3e-7d7b-9a41-2f1f6f0f5b11"
    keys = [(b"authorization", b"Bearer one")], [(b"authorization", b"Bearer two")]
    for header in (b"x-session-id", b"x-claude-code-session-id"):
        turns = [turned(callers, {}, headers=[*key, (header, name)]) for key in keys]
        assert turns[0].session == turns[1].session
    assert turns[0].prompt.scope != turns[1].prompt.scope, "what they hold is not"
    other = turned(callers, {"cache_salt": "s"}, headers=[*keys[0], (header, name)])
    assert other.session != turns[0].session
    memory = Callers(harnesses=False)  # a name opens a chat's text there
    turns = [turned(memory, {}, headers=[*key, (b"x-session-id", name)]) for key in keys]
    assert turns[0].session != turns[1].session


def test_dynamos_last_request_ends_its_session() -> None:
    """https://docs.nvidia.com/dynamo/dev/agents/identify-agent-sessions"""
    name = [(b"X-Dynamo-Session-ID", b"s"), (b"X-Claude-Code-Session-Id", b"t")]
    ends = {
        final: named([*name, (b"X-Dynamo-Session-Final", final)], {}).turn.ends
        for final in (b"true", b"True", b"false", b"")
    }
    assert ends == {b"true": True, b"True": True, b"false": False, b"": False}
    assert named(name, {}).turn.name == "s", "before a harness's own"
    body = json.dumps({"messages": [user("a")]}).encode()
    final = [(b"x-dynamo-session-final", b"true")]
    asked = Callers(harnesses=False).read("POST", "/v1/chat/completions", final, body)
    assert asked.turn is not None
    assert not asked.turn.ends, "no memory forgets a chat for a header that does not name it"


@pytest.mark.parametrize("last", [True, 1, "true", "1", False, 0, "false", None, [], "0"])
def test_continuums_last_step_ends_its_job(last: object) -> None:
    """As in the engine: see ``hooks.requests.hints``."""
    turn = named([], {"vllm_xargs": {"job_id": "j", "is_last_step": last}}).turn
    assert (turn.name, turn.ends) == ("j", last in (True, 1, "true", "1"))


def test_a_byte_order_mark_hides_no_session() -> None:
    body = json.dumps({"session_id": "s", "messages": [user("a")]}).encode()
    asked = Callers().read("POST", "/v1/chat/completions", [], b"\xef\xbb\xbf" + body)
    assert asked.turn is not None
    assert (asked.turn.name, asked.body.data) == ("s", body)


def test_what_is_no_name_is_the_engines_to_judge() -> None:
    long = [(b"x-session-id", b"x" * 10_000)]
    assert len(named(long, {}).turn.name) < 100
    twice = [(b"x-session-id", b"first"), (b"X-Session-ID", b"second")]
    asked = named(twice, {})
    assert (asked.turn.name, asked.headers) == ("first", twice), "as vLLM's server reads it"
    lone = {"vllm_xargs": {"kvgraph": '{"session": "\\ud800"}'}}  # engines say ? for that
    for body in ({"session_id": 5}, {"session_id": ["a"]}, {"vllm_xargs": {"session_id": 5}}, lone):
        assert not named([], body).turn.is_named


UNSET = "{{LIBRECHAT_BODY_CONVERSATIONID}}", "${SESSION}", "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    "nobody", ["undefined", "null", "None", "NaN", "N/A", "unknown", "[object Object]", *UNSET]
)
def test_a_client_without_a_name_may_write_so(nobody: str) -> None:
    headers = [(b"x-session-id", nobody.encode()), (b"x-session-affinity", nobody.encode())]
    assert not named(headers, {"session_id": nobody, "prompt_cache_key": nobody}).turn.is_named
    assert named(headers, {"metadata": {"session_id": "s"}}).turn.name == "s"


@pytest.mark.parametrize("key", ["org/repo", "x" * 200, "é", "a\nb", "a@b", None])
def test_the_router_tells_no_name_of_its_own_and_no_key_that_is_an_odd_one(
    key: str | None,
) -> None:
    asked = named([], {} if key is None else {"prompt_cache_key": key})
    assert (asked.turn.engine_name, asked.turn.is_named) == ("", key is not None)
    assert key is None or asked.turn.name == key
    assert asked.headers == []
    assert b"session" not in asked.body.data


def test_a_cache_key_of_many_chats_is_no_sessions() -> None:
    callers = Callers()

    def keyed(*messages: Any, key: str = "app") -> str:
        return read(callers, {"prompt_cache_key": key, "messages": [*messages]})

    for number in range(40):
        first = keyed(user(f"{number}"))
    assert keyed(user("39"), told("assistant", "b"), user("c")) == first
    assert keyed(user("another")) != first
    assert len({read(callers, {"prompt_cache_key": f"{n}"}) for n in range(3)}) == 3


@pytest.mark.parametrize(
    "answer",
    [
        b'{"id":"resp_1","object":"response"}',
        b'event: response.created\ndata: {"response": {"id": "resp_1", "status": "queued"}}\n\n',
    ],
    ids=["whole", "streamed"],
)
def test_a_response_that_continues_another_is_of_its_session(answer: bytes) -> None:
    callers, path = Callers(), "/v1/responses"
    first = turned(callers, {"input": "hello"}, path)
    callers.answered(first, answer)
    more = {"input": "more", "previous_response_id": "resp_1"}
    others = turned(callers, more, path, [(b"authorization", b"x")])
    assert turned(callers, more, path).session == first.session != others.session


def test_no_text_is_kept() -> None:
    asked = named([], {"messages": [user("the secret words")]})
    assert "secret" not in repr(asked.turn)


def test_prompts_are_read_on_threads_while_others_are_noted(
    request: pytest.FixtureRequest,
) -> None:
    callers, head, over = Callers(), "x" * 300_000, threading.Event()

    def asked(prompt: str) -> Any:
        return callers.read("POST", "/v1/completions", [], json.dumps({"prompt": prompt}).encode())

    def asks() -> None:
        number = 0
        while not over.is_set():
            number += 1
            asked(head + "y" * (number % 3))
            chat = {"messages": [user(f"{n}") for n in range(50)] + [user(f"{number} {TEXT}")]}
            callers.read("POST", "/v1/chat/completions", [], json.dumps(chat).encode())

    turns = [asked(head + "z" * n).turn for n in range(1, 100)]
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(asks) for _ in range(2)]
        until = time.monotonic() + 4
        try:
            while time.monotonic() < until and not any(each.done() for each in asking):
                for turn in turns:
                    callers.sent(turn)
        finally:
            over.set()
    assert [each.result() for each in asking] == [None, None]
