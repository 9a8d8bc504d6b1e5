"""What clients say of their messages: found in a rendered prompt, cut, and never a failure."""

from __future__ import annotations

import json
import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import kvgraph
import msgspec
import pytest
from kvgraph.hooks.requests.borders import MARKS_KEY
from kvgraph.hooks.requests.hints import HintPolicy, HintReader, HintTrust
from kvgraph.hooks.requests.messages import (
    CHAT_KEY,
    LONGEST,
    ClientMessage,
    MessagePlaces,
    RenderedChat,
    client_messages,
    hints_by_message,
    message_hints,
    resolve_message_hints,
    take_hints,
)
from kvgraph.hooks.threads import Once
from kvgraph.hooks.vllm.api.chats import _breakpoints, hand_over

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Read x"}]},
    {"role": "assistant", "content": None},
    {"role": "tool", "content": "the file"},
    {"role": "user", "content": "Thanks"},
]
TEXT = "<s>Be kind.<u>Read x<a>call<t>the file<u>Thanks<a>"


class Letters:
    """A tokenizer of which each character is a token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))


TOKENS = [*map(ord, TEXT)]
read = HintReader(HintPolicy(HintTrust.ALL)).read


def once() -> Once:
    return Once(logging.getLogger("kvgraph.test"))


def prompt(messages: list[Any] = MESSAGES, marks: dict[str, Any] | None = None) -> dict[str, Any]:
    chat = RenderedChat(marks, partial(client_messages, messages), TOKENS, TEXT, Letters())
    return {"prompt_token_ids": TOKENS, CHAT_KEY: chat}


def handed(extra: dict[str, Any] | None, given: Any = None) -> Any:
    """What arrives at the engine of a request's extra arguments."""
    params = SimpleNamespace(extra_args=extra)
    hand_over(SimpleNamespace(sampling_params=params), prompt() if given is None else given)  # type: ignore[arg-type]
    return params.extra_args


def segments(hints: Any) -> list[dict[str, Any]]:
    arrived = handed({"kv_transfer_params": {"kvgraph": hints}})
    found: list[dict[str, Any]] = arrived["kv_transfer_params"]["kvgraph"].get("segments", [])
    return found


def said_of(hint: dict[str, Any]) -> list[tuple[str, str]]:
    found = segments({"messages": [hint]})
    return [(each["layer"], TEXT[each["start"] : each["end"]]) for each in found]


def test_messages_are_named_by_index_or_by_role() -> None:
    assert said_of({"index": 0, "layer": "axioms"}) == [("axioms", "Be kind.")]
    assert said_of({"index": -1}) == [("user_turn", "Thanks")]
    assert said_of({"role": "user"}) == [("user_turn", "Read x"), ("user_turn", "Thanks")]
    assert said_of({"role": "tool", "layer": "memories"}) == [("memories", "the file")]


def test_everything_that_is_said_of_a_message_arrives() -> None:
    hint = {"index": 3, "priority": 20, "pinned": 60, "identity": "tool:search#3", "memory_id": "m"}
    (segment,) = segments({"messages": [hint]})
    (one,) = read({"kvgraph": {"segments": [segment]}}, len(TOKENS)).segments
    said = one.importance, one.pinned_s, one.name, one.memory_id
    assert said == (0.2, 60, "tool:search#3", "m")


def test_many_hints_about_many_messages_are_not_multiplied_out() -> None:
    messages = [{"role": "user", "content": "a"}] * 4000
    own = client_messages(messages)
    chat = RenderedChat(None, lambda: own, [*map(ord, "a" * 4000)], None, Letters())
    hints = [{"role": "user", "priority": n % 100} for n in range(1024)]
    said = resolve_message_hints({"messages": hints}, chat, once())
    assert len(said["segments"]) == 1024
    about = hints_by_message(message_hints({"messages": hints}, once()), own)
    assert sum(map(len, about.values())) == 1024, "of four million"


def test_one_hint_about_one_of_many_messages_does_not_place_the_others() -> None:
    """Where the prompt was cut, so that its text says nothing of its tokens."""
    decoded = []

    class Counting(Letters):
        def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
            decoded.append(len(tokens))
            return super().decode(tokens)

    messages = [{"role": "user", "content": "a"}] * 2000
    text = "b" + "a" * 2000
    own = partial(client_messages, messages)
    chat = RenderedChat(None, own, [*map(ord, text[1:])], text, Counting())
    resolve_message_hints({"messages": [{"index": 0}]}, chat, once())
    assert sum(decoded) < 20_000


def test_ranges_of_tokens_stand_beside_messages() -> None:
    stated = {"layer": "rules", "start": 0, "end": 3}
    found = segments({"segments": [stated], "messages": [{"index": 0}]})
    assert found[0] == stated
    assert len(found) == 2


def test_hints_may_be_one_string_among_the_extra_arguments() -> None:
    text = json.dumps({"session": "s", "messages": [{"index": 0}]})
    arrived = handed({"kvgraph": text, "other": 1})
    assert arrived["other"] == 1
    assert "kvgraph" not in arrived
    tag = arrived["kv_transfer_params"]["kvgraph"]
    assert tag["session"] == "s"
    assert len(tag["segments"]) == 1


def test_what_the_transfer_says_stands_before_the_string() -> None:
    arrived = handed({"kvgraph": '{"session": "a", "tenant": "t"}',
                      "kv_transfer_params": {"kvgraph": {"session": "b"}}})  # fmt: skip
    assert arrived["kv_transfer_params"]["kvgraph"] == {"session": "b", "tenant": "t"}


def test_the_clients_own_objects_are_not_changed() -> None:
    hints = {"messages": [{"index": 0}]}
    extra = {"kv_transfer_params": {"kvgraph": hints, "do_remote_decode": True}}
    before = json.dumps(extra)
    arrived = handed(extra)
    assert json.dumps(extra) == before
    assert arrived["kv_transfer_params"]["do_remote_decode"]


def test_marks_of_a_client_are_replaced_by_ours() -> None:
    forged = {"proof": "", "runs": [0, 0, 9]}
    arrived = handed({"kv_transfer_params": {MARKS_KEY: forged}}, prompt(marks={"runs": [1]}))
    assert arrived["kv_transfer_params"][MARKS_KEY] == {"runs": [1]}


def test_a_request_that_says_nothing_is_left_as_it_was() -> None:
    assert handed(None) is None
    assert handed({"a": 1}) == {"a": 1}
    assert handed({"a": 1}, {"prompt_token_ids": [1]}) == {"a": 1}


ABSURD = [
    5, "x", "[]", "{", "[" * 100_000, [], {"messages": 3}, {"messages": [3, None, []]},
    {"messages": [{}]}, {"messages": [{"index": "0"}]}, {"messages": [{"index": True}]},
    {"messages": [{"index": 10**30}]}, {"messages": [{"index": -99}]},
    {"messages": [{"index": 0, "role": "user", "layer": "gold", "priority": "high"}]},
    {"messages": [{"role": "nobody"}]}, {"segments": "all"}, {"messages": [{"index": 0}] * 100_000},
    {"segments": [{"layer": "axioms", "start": -5, "end": 10**12}] * 5000},
    {"messages": [{"index": 0, "pinned": -1, "importance": 7, "identity": 3, "memory_id": []}]},
    {f"key {number}": "x" * 1000 for number in range(1000)}, {"session": "x" * 10_000_000},
    {"expected_return_s": 10**30}, {"segments": [{"layer": "rules", "start": 10**30, "end": 4}]},
    {"messages": [{"role": "user", "importance": 10**30}]}, {"session": "\ud800"}, {"\ud800": 1},
    {"messages": [{"role": "user", "identity": "\udfff"}]}, {"segments": [{"\ud800": "\ud800"}]},
    {"secret": {"a": "x" * 10_000_000}}, {"segments": [{"name": "x" * 10_000_000}] * 100},
]  # fmt: skip


@pytest.mark.parametrize("hints", ABSURD, ids=range(len(ABSURD)))
def test_absurd_hints_are_cut_and_never_fail(hints: Any) -> None:
    for extra in ({"kv_transfer_params": {"kvgraph": hints}}, {"kvgraph": hints}):
        arrived = handed(extra)
        transfer = (arrived or {}).get("kv_transfer_params") or {}
        assert len(msgspec.msgpack.encode(transfer)) < 600_000, "as vLLM sends it to its engine"
        read(transfer, len(TOKENS))


def test_megabytes_of_hints_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps({"session": "x" * 10_000_000})
    assert len(text) > LONGEST
    assert take_hints({"kvgraph": text}, once()) == {}
    assert "at most" in caplog.text


def test_a_request_without_messages_cannot_name_any() -> None:
    arrived = handed({"kv_transfer_params": {"kvgraph": {"messages": [{"index": 0}]}}},
                     {"prompt_token_ids": TOKENS})  # fmt: skip
    assert arrived["kv_transfer_params"]["kvgraph"] == {}


def test_what_another_program_calls_them_is_understood() -> None:
    evoke = {"source_type": "tool", "priority": 80, "evoke_session": "chat-7"}
    arrived = handed({"kv_transfer_params": {"evoke": evoke}})["kv_transfer_params"]
    assert arrived["evoke"] == evoke
    assert arrived["kvgraph"]["session"] == "chat-7"
    (segment,) = arrived["kvgraph"]["segments"]
    assert (segment["importance"], TEXT[segment["start"] : segment["end"]]) == (0.8, "the file")


def test_a_message_is_found_behind_those_before_it() -> None:
    text = "<u>yes<a>yes<u>yes"
    places = MessagePlaces([*map(ord, text)], text, Letters())
    yes = ClientMessage("user", ("yes",))
    assert places.of([yes, yes, yes], range(3)) == [(3, 6), (9, 12), (15, 18)]
    assert places.of([ClientMessage("user", ("no",)), yes], range(2)) == [None, (3, 6)]


# Anthropic's ------------------------------------------------------------------------------------


def test_a_breakpoint_keeps_what_stands_before_it() -> None:
    control = {"type": "ephemeral"}
    body = {
        "system": [{"type": "text", "text": "s", "cache_control": {**control, "ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": control}]},
            {"role": "user", "content": "c"},
        ],
    }
    assert list(_breakpoints(body, 3)) == [
        {"role": "system", "pinned": 3600.0},
        {"index": 0, "pinned": 300.0}, {"index": 1, "pinned": 300.0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "body", [{}, {"messages": [3, None]}, {"system": 5, "messages": [{"cache_control": 1}]},
             {"messages": [{"cache_control": {"type": "other"}}]}],
)  # fmt: skip
def test_no_breakpoint_asks_for_nothing(body: dict[str, Any]) -> None:
    assert list(_breakpoints(body, 1)) == []


def test_a_value_that_is_not_allowed_is_told_by_its_own_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = {"index": 0, "importance": 7, "identity": 3, "pinned": float("nan"), "memory_id": "m"}
    said = {"messages": [wrong]}
    (hint,) = message_hints(said, once())
    assert hint.segment == {"memory_id": "m"}
    for name in ("messages.importance", "messages.identity", "messages.pinned"):
        assert name in caplog.text
    assert "segments" not in caplog.text


@pytest.mark.parametrize("seconds", [1e12, 10**400, float("inf"), True])
def test_a_lease_of_any_length_counts_as_the_longest(seconds: float) -> None:
    part = {"layer": "rules", "start": 0, "end": 4, "pinned": seconds}
    said = {"kvgraph": {"segments": [part]}}
    (segment,) = read(said, 4).segments
    assert segment.pinned_s == 1e9


# The client's helper ----------------------------------------------------------------------------


def test_hints_for_an_sdk() -> None:
    extra = kvgraph.hints(session="chat-7", messages=[{"index": 0, "pinned": 60}])
    assert extra == {"kv_transfer_params": {"kvgraph": {
        "session": "chat-7", "messages": [{"index": 0, "pinned": 60}]}}}  # fmt: skip
    assert kvgraph.hints() == {"kv_transfer_params": {"kvgraph": {}}}


@pytest.mark.parametrize(
    "hint", [{}, {"index": 0, "role": "user"}, {"index": 0, "layer": "gold"}, {"index": 0, "x": 1}]
)
def test_a_mistake_is_told_to_the_programmer(hint: Any) -> None:
    with pytest.raises(ValueError, match=r"hint|layer"):
        kvgraph.hints(messages=[hint])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index", 10**30), ("index", 1.5), ("index", True), ("importance", 1.1),
        ("importance", float("nan")), ("priority", -1), ("priority", True), ("pinned", -1),
        ("pinned", "60"), ("layer", []), ("identity", ""), ("memory_id", "x" * 257), ("role", 3),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_told_to_the_programmer(name: str, value: Any) -> None:
    named = {} if name in ("index", "role") else {"index": 0}
    with pytest.raises(ValueError, match=name):
        kvgraph.hints(messages=[{**named, name: value}])


def test_what_is_said_of_a_session_is_looked_at_too() -> None:
    with pytest.raises(ValueError, match="session"):
        kvgraph.hints(session="x" * 10_000_000)
    with pytest.raises(ValueError, match="expected_return_s"):
        kvgraph.hints(session="a", expected_return_s=float("inf"))
    with pytest.raises(ValueError, match=r"waiting_for_tool.*true or false"):
        kvgraph.hints(session="a", waiting_for_tool="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5 is no message hint"):
        kvgraph.hints(messages=[5])  # type: ignore[list-item]


def test_what_is_none_says_nothing() -> None:
    said = kvgraph.hints(messages=[{"index": -1, "pinned": True, "layer": None}])  # type: ignore[typeddict-item]
    assert said["kv_transfer_params"]["kvgraph"]["messages"] == [{"index": -1, "pinned": True}]
