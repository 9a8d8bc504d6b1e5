"""``kvgraph memory`` as a command: what it says at its start, in its log, and without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("bm25s")

from chat_scenes import user
from kvgraph.advisor.cli import main
from kvgraph.advisor.fleet.upstream import Upstream
from kvgraph.advisor.memory.settings import MemorySettings
from kvgraph_bench.memory.chat_engine import ChatEngine, remembering
from kvgraph_bench.serving.listening import free_port, listening

LARGE = MemorySettings(budget=1000)
ENGINE = "http://127.0.0.1:1"


@contextlib.asynccontextmanager
async def command(engine: str, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The command as a process with its log in a file, and a client of it."""
    port = free_port()
    words = [sys.executable, "-m", "kvgraph", "memory", engine, "--budget", "100", "--port", port]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*map(str, words), stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
            async with asyncio.timeout(120):  # of a start beside whatever else runs
                while not await listens(client):
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.1)
            yield client
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)  # SIGTERM would let probes hear of it first
        await process.wait()


async def listens(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/healthz")).status_code == 200
    except httpx.TransportError:
        return False


async def say(client: httpx.AsyncClient, *messages: Any) -> httpx.Response:
    body = {"model": "m", "messages": messages, "max_tokens": 8}
    headers = {"X-Session-ID": "s"}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_without_an_engine_it_starts_and_says_where_it_looked(tmp_path: Path) -> None:
    log, engine = tmp_path / "log", f"http://127.0.0.1:{free_port()}"
    async with command(engine, log) as client:
        assert f"WARNING the engine at {engine} does not answer" in log.read_text()
        answer = await say(client, user("one"))
        assert answer.status_code == 502
        why = answer.json()["error"]["message"]
        assert why.startswith(f"the engine at {engine} cannot be reached: ")
        assert (await client.get("/memory")).json()["unserved"] == 1


async def test_its_log_says_nothing_of_how_words_are_compared(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with listening(ChatEngine(), "off") as engine, command(engine, log) as client:
        chat = [user("hello")]
        for number in range(12):
            chat.append(user(" ".join(f"n{number}x{word}" for word in range(12))))
            chat.append((await say(client, *chat)).json()["choices"][0]["message"])
        assert (await client.get("/memory")).json()["evicted"] > 5
        said = log.read_text()
        assert "INFO chats of 100 tokens at http://127.0.0.1:" in said
        assert "DEBUG" not in said
        assert "does not answer" not in said


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/embeddings", "dropped this request: "),
        ("/v1/files", "dropped this request, and may have done what it asks: "),
    ],
)
async def test_an_engine_that_hangs_up_is_named(path: str, told: str) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with remembering(LARGE) as memory:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        before, memory.proxy.upstream = memory.proxy.upstream, Upstream(0, url)
        answer = await memory.client.post(path, json={"input": "a"})
        assert answer.status_code == 502
        assert answer.json()["error"]["message"].startswith(f"the engine at {url} {told}")
        server.close()
        await before.close()


@pytest.fixture
def _without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which bm25s is not installed."""
    monkeypatch.setitem(sys.modules, "bm25s", None)
    for name in ("command", "proxy", "chooser", "attention"):
        monkeypatch.delitem(sys.modules, f"kvgraph.advisor.memory.{name}", raising=False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((ENGINE, "--budget", "10"), "budget = 10"),
        ((ENGINE, "--budget", "1000", "--low", "0.95"), "low = 0.95"),
        ((ENGINE, "--budget", "1000", "--host", "0.0.0.0"), "--allow-remote"),
        ((ENGINE, "--budget", "1000", "--embeddings", ENGINE), "--embedding-model"),
        ((ENGINE, "--budget", "1000", "--sidecar", "here"), "'here' is not a URL"),
        (("here", "--budget", "1000"), "engine 'here'"),
    ],
)
def test_wrong_options_are_told(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["memory", *words])
    assert told in capsys.readouterr().err


@pytest.mark.usefixtures("_without_the_extra")
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memory", ENGINE, "--budget", "1000"])
    said = " ".join(capsys.readouterr().err.split())
    assert "bm25s" in said
    assert "pip install 'kvgraph[memory]'" in said
