"""Prompts as chains of digests, lists of engines, and what sidecars say of sessions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.fleet.engine_board import EngineBoard, Speed
from kvgraph.advisor.fleet.fleet_router import Holdings
from kvgraph.advisor.fleet.proxy.engine_list import Listed, checked, engines_in, listed
from kvgraph.advisor.fleet.proxy.prompt_chains import (
    MOST_LINKS,
    PIECE,
    PromptMemory,
    PromptReader,
)
from kvgraph.advisor.fleet.proxy.residency import ResidencyView, sidecars_with
from kvgraph.advisor.remote import TOKEN_VARIABLE
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.ipc.runtime import RunningSidecar

SCOPE = b"scope"


def chat(*texts: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def engines(count: int, pool_tokens: int = 0) -> EngineBoard:
    board = EngineBoard()
    for number in range(count):
        board.add(f"e{number}", Speed(pool_tokens=pool_tokens))
    return board


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
    reader, memory = PromptReader(), PromptMemory()
    first = reader.read(chat("system", "hello"), SCOPE)
    memory.ends(first.links, "s")
    assert memory.session(reader.read(chat("system", "hello", "yes", "go"), SCOPE).links) == "s"
    assert memory.session(first.links) is None, "a prompt that is only repeated begins anew"
    assert memory.session(reader.read(chat("system", "bye"), SCOPE).links) is None


def test_each_engine_holds_the_longest_beginning_that_it_got() -> None:
    reader, memory = PromptReader(), PromptMemory()
    long = reader.read(chat("system", "a", "b"), SCOPE).links
    board = engines(3)
    memory.sent(long, "s", 2, board)
    memory.sent(long[:1], "t", 0, board)
    held = memory.holdings(long, board).pool
    assert held.tolist() == [long[0].tokens, 0, long[2].tokens]
    memory.forget(2)
    held = memory.holdings(long, board).pool
    assert held.tolist() == [long[0].tokens, 0, 0]


def test_what_is_remembered_is_bounded() -> None:
    reader, memory = PromptReader(), PromptMemory(most=10)
    old, board = reader.read(chat("old"), SCOPE).links, engines(1)
    memory.sent(old, "s", 0, board)
    for number in range(20):
        memory.sent(reader.read(chat(str(number)), SCOPE).links, "t", 0, board)
    found = memory.holdings(old, board)
    assert (found.pool.tolist(), found.seen.tolist()) == ([0], [False]), "it may be there"


def test_a_list_of_engines_is_read_and_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("# ours\nhttp://127.0.0.1:1\n\nhttp://127.0.0.1:2/v1 drain\n")
    assert engines_in(path) == [
        Listed("http://127.0.0.1:1"),
        Listed("http://127.0.0.1:2", drains=True),
    ]
    for words in ("ftp://x", "http://", "http://a b", "127.0.0.1:80"):
        with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
            listed(words)
    with pytest.raises(ConfigError, match="listed twice: http://a"):
        checked([Listed("http://a"), Listed("http://a")])
    path.write_text("")
    with pytest.raises(ConfigError, match="0 engines"):
        engines_in(path)


def session(
    name: str, engine: str | None, pool: int, warm: int = 0, idle_s: float = 1.0
) -> dict[str, object]:
    return {"session": name, "engine": engine, "chain": 10, "chain_pool": pool, "idle_s": idle_s,
            "chain_copied": pool + warm, "tokens": 1000}  # fmt: skip


class Sidecar:
    """Answers the questions after sessions and after its engines' hashes."""

    def __init__(self, *sessions: dict[str, object], **hashing: str) -> None:
        engines = [{"id": engine, "hashing": told} for engine, told in hashing.items()]
        self._sessions = json.dumps({"sessions": sessions}).encode()
        self._status = json.dumps({"engines": engines}).encode()
        self.asked_for_status = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        answer = self._status if b"GET /status" in head else self._sessions
        self.asked_for_status += answer is self._status
        assert answer is self._status or b"Bearer secret" in head
        length = len(answer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length + answer)
        await writer.drain()
        writer.close()


def looked(*sidecars: Sidecar) -> ResidencyView:
    """The view of some sidecars, and of one that is gone."""

    async def look() -> ResidencyView:
        servers = [await asyncio.start_server(each.serve, "127.0.0.1", 0) for each in sidecars]
        ports = [1, *(server.sockets[0].getsockname()[1] for server in servers)]
        notes = [RunningSidecar(1, "", f"http://127.0.0.1:{port}", "secret") for port in ports]
        view = ResidencyView(lambda: notes)
        await view.look()
        await view.look()
        await view.close()
        for server in servers:
            server.close()
        return view

    return asyncio.run(look())


def test_the_graphs_word_on_a_session_stands_over_the_proxys_own_memory() -> None:
    view = looked(Sidecar(session("s", "host:1", 4, 3), session("t", "host:1", 0)))
    tokens = np.array([1200, 300], dtype=np.int64)
    remembered = Holdings(tokens, tokens, seen=np.array([True, True]))
    unheard = view.corrected("s", remembered)
    assert unheard.pool.tolist() == [1200, 300], "who is host:1?"
    assert unheard.seen.tolist() == [True, True], "nobody but the proxy knows of them"
    view.note_home("s", 1)  # it moved a moment ago, and its sidecar does not know it yet
    view.note_home("s", 0)
    view.note_home("t", 0)
    told = view.corrected("s", remembered)
    assert told.pool.tolist() == [480, 300]
    assert told.copied.tolist() == [840, 300]
    assert view.corrected("t", remembered).pool.tolist() == [0, 300]
    assert told.seen.tolist() == [True, True]
    unknown = view.corrected("unknown", remembered)
    assert unknown.pool.tolist() == [1200, 300]
    assert unknown.seen.tolist() == [False, True], "engines with a graph evict in another order"


def test_a_name_that_two_tenants_use_tells_nothing() -> None:
    view = looked(Sidecar(session("s", "a", 4), session("s", "b", 9), session("t", None, 1)))
    assert len(view) == 0


def test_what_sidecars_of_several_machines_say_of_a_session_is_merged() -> None:
    here = Sidecar(session("s", "engine:1", 8, idle_s=60.0), session("t", "engine:1", 5))
    there = Sidecar(session("s", "engine:1", 3, 1, idle_s=2.0))
    view = looked(here, there)
    view.note_home("s", 1)  # it went there a moment ago
    view.note_home("t", 0)
    assert len(view) == 2
    nothing = np.zeros(3, dtype=np.int64)
    told = view.corrected("s", Holdings(nothing, nothing, seen=np.ones(3, dtype=np.bool_)))
    assert told.pool.tolist() == [800, 300, 0], "both hold of it, and are two engines"
    assert told.copied.tolist() == [800, 400, 0]
    assert told.seen.tolist() == [True, True, True]


def test_a_sidecar_that_says_nothing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    view = looked(Sidecar(session("s", "a", 4)))
    silent = sorted(filter(None, view.silent.values()))
    assert silent == ["does not answer as a sidecar does (ConnectError)"]
    assert len(caplog.records) == 1
    assert "http://127.0.0.1:1" in caplog.text


def test_sidecars_of_other_machines_are_asked_with_the_environments_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    found = sidecars_with(["http://10.0.0.5:8420/", "http://10.0.0.5:8420"])()
    assert [(each.http, each.token) for each in found] == [("http://10.0.0.5:8420", "secret")]
    with pytest.raises(ConfigError, match=r"--sidecar '10\.0\.0\.5:8420': allowed: http://HOST"):
        sidecars_with(["10.0.0.5:8420"])


def test_how_engines_hash_blocks_is_asked_once_and_known_by_their_sessions() -> None:
    sidecar = Sidecar(session("s", "a", 4), session("t", "b", 4), session("u", "new", 4),
                      a="sha256 1", b="sha256 2")  # fmt: skip
    view = looked(sidecar)
    assert view.hashing(0) == "", "which is which?"
    view.note_home("s", 0)
    view.note_home("t", 1)
    view.note_home("u", 2)
    assert [view.hashing(number) for number in range(3)] == ["sha256 1", "sha256 2", ""]
    view.note_home("t", 0)
    view.note_home("t", 0)
    assert view.hashing(0) == "sha256 1; sha256 2", "one address, two ranks"
    assert sidecar.asked_for_status == 1
