"""Prompts as chains of digests, lists of engines, and what sidecars say of sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvgraph.advisor.fleet.prompts import MOST_LINKS, PIECE, LastPrompts, PromptReader
from kvgraph.advisor.fleet.upstream import EngineAddress, checked, engines_in
from kvgraph.graph.errors import ConfigError

SCOPE = b"scope"


def chat(*texts: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_a_longer_chat_begins_with_the_links_of_the_shorter() -> None:
    reader = PromptReader()
    short, long = reader.read(chat("a", "b"), SCOPE), reader.read(chat("a", "b", "c"), SCOPE)
    assert long.links[:2] == short.links
    assert long.tokens > short.tokens
    assert reader.read(chat("a", "x", "c"), SCOPE).links[1:] != long.links[1:]


def test_prompts_of_other_scopes_and_other_readers_share_no_link() -> None:
    reader = PromptReader()
    own = {link.key for link in reader.read(chat("a"), SCOPE).links}
    assert not own & {link.key for link in reader.read(chat("a"), b"other").links}
    assert not own & {link.key for link in PromptReader().read(chat("a"), SCOPE).links}


@pytest.mark.parametrize(
    ("field", "value"), [("cache_control", {"type": "ephemeral"}), ("id", "x")]
)
def test_marks_of_tools_and_pictures_change_no_link(field: str, value: object) -> None:
    """Harnesses move ``cache_control`` to the newest of them with each turn."""
    reader, picture = PromptReader(), {"type": "image_url", "image_url": {"url": "data:x"}}

    def links(more: dict[str, object]) -> list[object]:
        said = [{"role": "user", "content": [picture | more]}]
        return reader.read({"tools": [{"name": "read"} | more], "messages": said}, SCOPE).links

    assert len(links({})) == 2
    assert links({}) == links({field: value})


def test_a_harnesss_billing_line_changes_no_link() -> None:
    """It differs with each request, and vLLM drops it too."""
    reader = PromptReader()

    def links(turn: int) -> list[object]:
        texts = (f"x-anthropic-billing-header: cch={turn};", "Be brief.")
        system = [{"type": "text", "text": text} for text in texts]
        return reader.read({"system": system, **chat("a")}, SCOPE).links

    assert len(links(0)) == 2
    assert links(0) == links(1)


def test_a_picture_counts_as_one_wherever_a_tool_returns_it() -> None:
    data = "data:image/png;base64," + "A" * 400_000
    shot = {"type": "computer_screenshot", "image_url": data}
    for kind in ("computer_call_output", "function_call_output", "custom_tool_call_output"):
        for output in (shot, [shot]):
            item = {"type": kind, "call_id": "c", "output": output}
            assert PromptReader().read({"input": [item]}, SCOPE).tokens < 2000


def test_text_and_token_ids_are_cut_in_pieces_of_which_the_last_may_still_grow() -> None:
    reader = PromptReader()
    short = reader.read({"prompt": "x" * (2 * PIECE + 5)}, SCOPE)
    assert len(short.links) == 2
    assert short.tokens == 2 * PIECE // 4 + 2
    assert reader.read({"prompt": "x" * (3 * PIECE)}, SCOPE).links[:2] == short.links
    ids = reader.read({"prompt": list(range(600))}, SCOPE)
    assert (len(ids.links), ids.tokens) == (2, 600)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"prompt": []}, {"messages": "x"}, {"prompt": [["a"], ["b"]]}]
)
def test_bodies_without_a_prompt_do_no_harm(body: dict[str, object]) -> None:
    prompt = PromptReader().read(body, SCOPE)
    assert prompt.links == []


def test_a_prompt_of_any_length_has_bounded_links() -> None:
    prompt = PromptReader().read(chat(*(str(number) for number in range(3000))), SCOPE)
    assert len(prompt.links) == MOST_LINKS


def test_a_session_is_known_by_the_whole_of_its_last_prompt() -> None:
    reader = PromptReader()
    last = LastPrompts(reader.digest, most=2)
    first = reader.read(chat("system", "hello"), SCOPE)
    last.note(first, "s")
    longer = reader.read(chat("system", "hello", "yes", "go"), SCOPE)
    assert last.session(longer, SCOPE) == "s"
    assert last.session(first, SCOPE) is None, "a prompt that is only repeated begins anew"
    assert last.session(reader.read(chat("system", "bye"), SCOPE), SCOPE) is None
    for number in range(2):
        last.note(reader.read(chat(str(number)), SCOPE), "t")
    assert last.session(longer, SCOPE) is None, "what is remembered is bounded"


@pytest.mark.parametrize("size", [3, PIECE, 2 * PIECE + 5])
def test_texts_and_token_ids_continue_the_whole_of_a_prompt(size: int) -> None:
    for head, one, two, more in (("x" * size, "a", "b", "!"), ([7] * size, [1], [2], [3, 4])):
        reader = PromptReader()
        last = LastPrompts(reader.digest)
        for session, end in (("s", one), ("t", two)):
            last.note(reader.read({"prompt": head + end}, SCOPE), session)
        for session, end in (("s", one), ("t", two)):
            assert last.session(reader.read({"prompt": head + end + more}, SCOPE), SCOPE) == session
        for other in (head, head + one, head + more):
            assert last.session(reader.read({"prompt": other}, SCOPE), SCOPE) is None


def test_what_many_prompts_begin_with_is_nobodys() -> None:
    reader = PromptReader()
    last = LastPrompts(reader.digest)
    system = [{"role": "system", "content": "x" * 5000}]
    last.note(reader.read({"messages": system, "tools": [{"name": "t"}]}, SCOPE), "warm-up")
    asked = {"messages": [*system, {"role": "user", "content": "a"}], "tools": [{"name": "t"}]}
    assert last.session(reader.read(asked, SCOPE), SCOPE) is None
    head = "x" * (PIECE + 100)
    last.note(reader.read({"prompt": head + " one"}, SCOPE), "one")
    assert last.session(reader.read({"prompt": head + " two, longer"}, SCOPE), SCOPE) is None
    last.note(reader.read({"prompt": ["a", "b"]}, SCOPE), "a batch")
    assert last.session(reader.read({"prompt": "a and more"}, SCOPE), SCOPE) is None


def test_a_list_of_engines_is_read_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("\ufeff# ours\nhttp://127.0.0.1:1\n\nhttp://127.0.0.1:2/v1 drain\n")
    assert engines_in(path) == [
        EngineAddress("http://127.0.0.1:1"),
        EngineAddress("http://127.0.0.1:2", drains=True),
    ]
    with pytest.raises(ConfigError, match="listed twice: http://a"):
        checked([EngineAddress("http://a"), EngineAddress("http://a")])
    path.write_text("")
    with pytest.raises(ConfigError, match="0 engines"):
        engines_in(path)
