"""What sidecars say of sessions, merged; and what becomes of answers that no sidecar gives."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from kvgraph.advisor.fleet import residency, upstream
from kvgraph.advisor.fleet.command import sidecars_with
from kvgraph.advisor.fleet.residency import TIMEOUT_S, ResidencyView
from kvgraph.advisor.fleet.router import Holdings
from kvgraph.advisor.tools.remote import TOKEN_VARIABLE
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.wire.endpoints import Note, RunningSidecar, running_sidecars, runtime_dir
from page_sidecar import TOKEN, PageSidecar
from waiting import soon


def session(
    name: str, engine: str | None, pool: int, warm: int = 0, idle_s: float = 1.0, shared: int = 0
) -> dict[str, object]:
    return {"session": name, "engine": engine, "chain": 10, "chain_pool": pool, "idle_s": idle_s,
            "chain_copied": pool + warm, "chain_shared": shared, "tokens": 1000}  # fmt: skip


class Sidecar:
    """Answers the questions after sessions and after its engines' hashes."""

    def __init__(self, *sessions: dict[str, object], **hashing: str) -> None:
        engines = [{"id": engine, "hashing": told} for engine, told in hashing.items()]
        self.sessions = json.dumps({"sessions": sessions}).encode()
        self.status = json.dumps({"engines": engines}).encode()
        self.asked_for_status = 0
        self.packed = ""  # which of its answers is compressed, though nobody asked for it

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        kind = "status" if b"GET /status" in head else "sessions"
        self.asked_for_status += kind == "status"
        assert kind == "status" or b"Bearer secret" in head
        assert b"ccept-Encoding: identity\r\n" in head
        answer, how = getattr(self, kind), b""
        if kind == self.packed:
            answer, how = gzip.compress(answer), b"content-encoding: gzip\r\n"
        head = b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n" % (how, len(answer))
        writer.write(head + answer)
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening(*sidecars: Sidecar) -> AsyncIterator[list[RunningSidecar]]:
    """Notes of sidecars that answer until the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        ports = list[int]()
        for each in sidecars:
            server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            ports.append(server.sockets[0].getsockname()[1])
        yield [RunningSidecar(1, "", f"http://127.0.0.1:{port}", "secret") for port in ports]


def looked(*sidecars: Sidecar) -> ResidencyView:
    """The view of some sidecars, and of one that is gone."""

    async def look() -> ResidencyView:
        gone = RunningSidecar(1, "", "http://127.0.0.1:1", "secret")
        async with listening(*sidecars) as notes:
            view = ResidencyView(lambda: [gone, *notes])
            await view.poll()
            await view.poll()
        return view

    return asyncio.run(look())


def nothing(engines: int, *, lost: bool = False) -> Holdings:
    tokens = np.zeros(engines, dtype=np.int64)
    return Holdings(tokens, tokens, lost=np.full(engines, lost))


def silence(view: ResidencyView) -> str:
    """What is said of those that do not answer."""
    return " ".join(filter(None, view.silent.values()))


def test_what_a_store_has_of_a_session_is_known_of_all_engines() -> None:
    view = looked(Sidecar(session("s", "host:1", 4, shared=8), session("t", "host:1", 0)))
    assert view.corrected("s", nothing(2)).shared == 800
    assert view.corrected("t", nothing(2)).shared == 0


def test_the_graphs_word_on_a_session_stands_over_the_proxys_own_memory() -> None:
    view = looked(Sidecar(session("s", "host:1", 4, 3), session("t", "host:1", 0)))
    tokens = np.array([1200, 300], dtype=np.int64)
    remembered = Holdings(tokens, tokens, lost=np.array([True, True]))
    unheard = view.corrected("s", remembered)
    assert unheard.pool.tolist() == [1200, 300], "who is host:1?"
    assert unheard.lost.tolist() == [True, True], "nobody but the proxy knows of them"
    view.note_home("s", 1)  # it moved a moment ago, and its sidecar does not know it yet
    view.note_home("s", 0)
    view.note_home("t", 0)
    told = view.corrected("s", remembered)
    assert told.pool.tolist() == [480, 300]
    assert told.copied.tolist() == [840, 300]
    assert view.corrected("t", remembered).pool.tolist() == [0, 300]
    assert told.lost.tolist() == [True, True]
    unknown = view.corrected("unknown", remembered)
    assert unknown.pool.tolist() == [1200, 300]
    assert unknown.lost.tolist() == [False, True], "engines with a graph evict in another order"


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
    told = view.corrected("s", nothing(3, lost=True))
    assert told.pool.tolist() == [800, 300, 0], "both hold of it, and are two engines"
    assert told.copied.tolist() == [800, 400, 0]
    assert told.lost.tolist() == [True, True, True]


def test_a_sidecar_that_says_nothing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    view = looked(Sidecar(session("s", "a", 4)))
    assert silence(view) == "does not answer"
    assert len(caplog.records) == 1
    assert "http://127.0.0.1:1" in caplog.text


def test_sidecars_of_other_machines_are_asked_with_the_environments_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    found = sidecars_with(["http://10.0.0.5:8420/", "http://10.0.0.5:8420"])()
    assert [(each.http, each.token) for each in found] == [("http://10.0.0.5:8420", "secret")]
    for wrong in ("10.0.0.5:8420", "http://me:x@a:1", "http://a\nb:1", "http://a..b:1", "ftp://a"):
        with pytest.raises(ConfigError, match="allowed: http://HOST:PORT"):
            sidecars_with([wrong])
    monkeypatch.setenv(TOKEN_VARIABLE, "☃")
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: allowed: letters"):
        sidecars_with(["http://10.0.0.5:8420"])


def test_a_machine_on_which_no_sidecar_can_be_found_asks_the_named_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    found = sidecars_with(["http://10.0.0.5:8420"])
    assert [each.http for each in found()] == ["http://10.0.0.5:8420"]
    assert "sidecars of this machine are not asked: runtime directory" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": "many"}, {"tokens": 1 << 70}, {"tokens": -1}, {"idle_s": None}, {"engine": {}},
     {"session": ["s"]}, {"chain": "x"}, {"chain_pool": -3}],
)  # fmt: skip
def test_an_answer_that_no_sidecar_gives_is_not_believed(wrong: dict[str, object]) -> None:
    view = looked(Sidecar(session("t", "host:1", 4), session("s", "host:1", 4) | wrong))
    assert len(view) == 0
    assert "does not answer as a sidecar does (Expected " in silence(view)
    assert "at `$.sessions[1]." in silence(view)


def test_a_sidecar_that_never_ends_its_answer_holds_nobody_up() -> None:
    class Dripping(Sidecar):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.05)

    start = time.monotonic()
    view = looked(Dripping(), Sidecar(session("s", "host:1", 4)))
    assert time.monotonic() - start < 2 * TIMEOUT_S + 2.0, "it is looked at twice"
    assert len(view) == 1
    assert list(view.silent.values()) == ["does not answer", "does not answer", None]


def test_an_answer_that_is_compressed_unasked_is_not_unpacked() -> None:
    """A few KiB may become gigabytes, and everybody else's requests would wait for that."""

    sessions, status = (
        Sidecar(session("s", "a", 4), a="sha256 1"), Sidecar(session("t", "b", 4), b="sha256 2"),
    )  # fmt: skip
    sessions.packed, status.packed = "sessions", "status"
    view = looked(sessions, status)
    assert len(view) == 1
    view.note_home("t", 0)
    assert view.hashing(0) == ""


def test_a_sidecar_whose_answer_is_too_large_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream, "MOST_ANSWER", 1 << 20)
    large = Sidecar(session("t" * (1 << 20), "host:1", 4))
    view = looked(large, Sidecar(session("s", "host:1", 4)))
    assert len(view) == 1
    assert "an answer of more than 1 MiB" in silence(view)


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


async def test_a_sidecar_that_is_gone_says_nothing_more() -> None:
    lost = nothing(1, lost=True)
    async with listening(Sidecar(session("s", "a", 4), a="sha256 1")) as notes:
        view = ResidencyView(lambda: notes)
        await view.poll()
        view.note_home("s", 0)
        assert view.hashing(0) == "sha256 1"
        assert view.corrected("u", lost).lost.tolist() == [False]
        notes.clear()
        await view.poll()
    assert (len(view), view.hashing(0), view.silent) == (0, "", {})
    assert view.corrected("u", lost).lost.tolist() == [True], "the proxy alone knows again"


BAD_ANSWERS = {
    "utf8": b'{"sessions":[{"session":"\xff"}]}',
    "deep": b'{"sessions":[],"x":' + b"[" * 100_000,
    "text": b"hello",
    "huge": json.dumps({"sessions": [session("s", "e", 10**400)]}).encode(),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
@pytest.mark.parametrize("where", ["sessions", "status"])
async def test_an_answer_that_is_no_sidecars_ends_no_watch(
    bad: bytes, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "INTERVAL_S", 0.01)
    sidecar = Sidecar(session("s", "host:1", 4))
    good, now = getattr(sidecar, where), 100.0
    setattr(sidecar, where, bad)
    async with listening(sidecar) as notes:
        url = notes[0].http
        view = ResidencyView(lambda: notes, lambda: now)
        watching = asyncio.create_task(view.watch())
        await soon(lambda: view.silent.get(url) is not None or sidecar.asked_for_status)
        if where == "sessions":
            assert "does not answer as a sidecar does" in str(view.silent[url])
            now = 160.0
            assert view.unheard_s(url) == 60.0, "it never answered"
        else:
            await soon(lambda: len(view) == 1, "what it says of sessions stands")
        setattr(sidecar, where, good)
        await soon(lambda: len(view) and view.silent.get(url) is None)
        assert not watching.done()
        assert view.unheard_s(url) == 0.0
        assert view.failed == 0
        watching.cancel()


async def test_a_round_that_fails_is_counted_and_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency, "INTERVAL_S", 0.01)

    def fails() -> list[RunningSidecar]:
        raise RuntimeError("ours")

    view = ResidencyView(fails)
    watching = asyncio.create_task(view.watch())
    await soon(lambda: view.failed >= 3)
    assert not watching.done()
    watching.cancel()


@pytest.mark.parametrize(
    "note", ["http://[", "http://a b", "x", "http://127.0.0.1:1/\x00", "http://127.0.0.1:99999"]
)
@pytest.mark.parametrize("token", ["secret", "é"])
async def test_a_note_whose_address_is_none_costs_no_other_sidecar(note: str, token: str) -> None:
    async with listening(Sidecar(session("s", "host:1", 4))) as notes:
        notes.insert(0, RunningSidecar(1, "", note, token))
        view = ResidencyView(lambda: notes)
        await view.poll()
    assert len(view) == 1
    assert view.silent[note] is not None


@pytest.mark.parametrize(
    "content",
    [
        b'{"pid": 1, "endpoint": "\xff", "http": ""}',
        b"[" * 100_000,
        b'{"pid": 1' + b"0" * 30 + b', "endpoint": "", "http": ""}',
        b"",
    ],
)
def test_a_note_that_cannot_be_read_hides_no_other(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (runtime_dir() / "0.json").write_bytes(content)
    ours = RunningSidecar(os.getpid(), "ipc:///x", "http://127.0.0.1:1")
    note = Note(ours)
    assert running_sidecars() == [ours]
    note.remove()


@pytest.mark.parametrize(
    ("token", "why"),
    [(TOKEN, None), ("another", f"answers 401: its token is not {TOKEN_VARIABLE}'s")],
    ids=["its token", "another"],
)
def test_a_real_sidecar_of_another_machine_tells_what_its_engine_holds(
    busy_sidecar: PageSidecar, token: str, why: str | None, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where it left no note
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    view = ResidencyView(sidecars_with([busy_sidecar.url]))
    asyncio.run(view.poll())
    assert view.silent == {busy_sidecar.url: why}
    assert len(view) == (0 if why else 12)
    view.note_home("agent-01", 1)
    told = view.corrected("agent-01", nothing(2, lost=True))
    assert told.lost.tolist() == [True, True]
    assert told.pool[0] == 0
    assert bool(told.copied[1]) is (why is None)
