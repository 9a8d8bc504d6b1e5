"""Who gets in: tokens at tcp endpoints and HTTP questions, and what is left for whom to read."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from kvgraph.advisor.cli import main
from kvgraph.advisor.config.config import load
from kvgraph.advisor.service import Service, leave_note, ready_line
from kvgraph.advisor.sockets import front
from kvgraph.advisor.tools.remote import RemoteError, ask
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.endpoints import (
    RunningSidecar,
    RuntimeNote,
    running_sidecars,
    runtime_dir,
    token_of,
)
from kvgraph.graph.wire.events import BlocksResident, BlocksStored, EngineHello, Pressure
from kvgraph.hooks.doctor.command import check_sidecar
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from waiting import until

QUICK = ClientOptions(tick_s=0.01, heartbeat_s=0.1, resync_gap_s=0.05, absent_s=0.3)


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AITHER_KVCACHE_SIDECAR_TOKEN", raising=False)
    monkeypatch.delenv("KVGRAPH_SIDECAR__TOKEN", raising=False)


class OverTcp:
    def __init__(self, endpoint: str = "tcp://127.0.0.1:0") -> None:
        settings = {"sidecar.endpoint": endpoint, "sidecar.interval_s": 0.05}
        self.service = Service(load(overrides=settings), overrides=settings)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(timeout=20)


@pytest.fixture
def sidecar() -> Iterator[OverTcp]:
    sidecar = OverTcp()
    yield sidecar
    sidecar.stop()


def test_an_engine_of_this_user_finds_the_token_by_itself(sidecar: OverTcp) -> None:
    note = leave_note(sidecar.service)
    assert note is not None
    with FakeEngine(sidecar.service.endpoint, options=QUICK) as engine:
        engine.run(range(64), "chat")
        until(lambda: engine.client.ranking() is not None, "advice over tcp")
    assert check_sidecar(sidecar.service.endpoint).ok


def test_an_engine_elsewhere_is_given_the_token(
    sidecar: OverTcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", sidecar.service.token)
    with FakeEngine(sidecar.service.endpoint, options=QUICK) as engine:
        engine.run(range(64), "chat")
        until(lambda: engine.client.ranking() is not None, "advice over tcp")


def test_a_doctor_with_a_wrong_token_does_not_wait_for_ever(
    sidecar: OverTcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", "wrong")
    began = time.monotonic()
    for _ in range(20):  # a send that comes after the refusal finds no way out; not each one does
        assert not check_sidecar(sidecar.service.endpoint, timeout_s=0.2).ok
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("token", [None, b"x", b"wrong", b"x" * 255])
def test_without_the_token_nothing_is_heard(sidecar: OverTcp, token: bytes | None) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if token is not None:
        socket.setsockopt(zmq.PLAIN_USERNAME, b"engine")
        socket.setsockopt(zmq.PLAIN_PASSWORD, token)
    socket.connect(sidecar.service.endpoint)
    hello = EngineHello("stranger", "m", 16, 100, "v")
    with suppress(zmq.Again):  # a socket that was refused has no way out any more
        for seq in range(20):
            frames = wire.encode_events(seq, [hello, BlocksResident(b"")])
            socket.send_multipart(frames, zmq.NOBLOCK)
    assert not socket.poll(700)
    assert sidecar.service.parts.subscriber.counters["messages"] == 0
    assert sidecar.service.parts.subscriber.peers == []
    socket.close(0)
    context.term()


def test_knowing_an_engines_public_id_does_not_give_its_place(
    sidecar: OverTcp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", sidecar.service.token)
    with FakeEngine(sidecar.service.endpoint, options=QUICK) as engine:
        engine.run(range(64), "chat")
        until(lambda: engine.client.ranking() is not None, "advice over tcp")
        shown = json.dumps(ask(sidecar.service.http, "/status"))
        assert engine.client.identity.hex() not in shown
        (public,) = sidecar.service.graph.engines
        with FakeEngine(sidecar.service.endpoint, options=QUICK) as thief:
            thief.client.identity = bytes.fromhex(public)
            until(lambda: len(sidecar.service.graph.engines) == 2, "it is somebody else")
            assert engine.client.ranking() is not None


def test_a_sidecar_that_starts_anew_with_another_token_is_found_again() -> None:
    first = OverTcp()
    endpoint = first.service.endpoint
    note = leave_note(first.service)
    assert note is not None
    with FakeEngine(endpoint, options=QUICK) as engine:
        engine.run(range(64), "chat")
        until(lambda: engine.client.ranking() is not None, "advice")
        first.stop()
        note.remove()
        second = OverTcp(endpoint)
        try:
            assert second.service.token != first.service.token
            leave_note(second.service)
            until(lambda: len(second.service.parts.subscriber.peers) == 1, "it is back")
        finally:
            second.stop()


def test_an_ipc_endpoint_needs_no_token(tmp_path: Path) -> None:
    sidecar = OverTcp(f"ipc://{tmp_path}/s")
    try:
        with FakeEngine(sidecar.service.endpoint, options=QUICK) as engine:
            engine.run(range(64), "chat")
            until(lambda: engine.client.ranking() is not None, "advice")
    finally:
        sidecar.stop()


def test_the_note_is_its_owners_and_theready_line_tells_no_token(sidecar: OverTcp) -> None:
    before = os.umask(0)
    try:
        note = leave_note(sidecar.service)
    finally:
        os.umask(before)
    assert note is not None
    assert stat.S_IMODE(note.path.stat().st_mode) == 0o600
    assert token_of(sidecar.service.endpoint) == sidecar.service.token
    assert token_of(sidecar.service.http) == sidecar.service.token
    assert token_of("tcp://127.0.0.1:1") == ""
    for machine in (True, False):
        assert sidecar.service.token not in ready_line(sidecar.service, machine=machine)


def test_the_note_of_a_dead_sidecar_gives_no_token() -> None:
    dead = RunningSidecar(2**22 - 3, "tcp://127.0.0.1:9", "http://127.0.0.1:9", "old token")
    RuntimeNote.write(dead)
    assert token_of(dead.http) == ""


def command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--json"])
    assert not end.value.code


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe", b'{"pid": "' + b"\xc3" * 9 + b'"}', b"[" * 100_000, b"", b"null", b"1" * 5000,
        b'{"pid": -1, "endpoint": "e", "http": "h"}', b'{"pid": 0, "endpoint": "e", "http": "h"}',
        b'{"pid": 36893488147419103232, "endpoint": "e", "http": "h"}',
        b'{"pid": 1.5, "endpoint": "e", "http": "h"}', b" " * (1 << 20), None,
    ],
)  # fmt: skip
def test_a_strange_note_costs_only_itself(content: bytes | None) -> None:
    """None: a pipe, which nobody writes to."""
    note = RuntimeNote.write(RunningSidecar(os.getpid(), "ipc:///e", "http://h", "token"))
    strange = runtime_dir() / "1.json"
    if content is None:
        os.mkfifo(strange)
    else:
        strange.write_bytes(content)
    assert [each.pid for each in running_sidecars()] == [os.getpid()]
    note.remove()


def test_explain_reads_the_token_by_itself(
    sidecar: OverTcp, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (1).to_bytes(8, "little")
    with sidecar.service.graph.lock:
        sidecar.service.graph.apply("e", [BlocksStored(keys, None, 16, "chat")])
    with pytest.raises(RemoteError, match="token"):
        ask(sidecar.service.http, "/blocks/1/explain")
    leave_note(sidecar.service)
    command("explain", "1")
    assert json.loads(capsys.readouterr().out)["session"] == "chat"
    command("explain", "chat", "--url", sidecar.service.http)
    assert json.loads(capsys.readouterr().out)["session"] == "chat"
    command("status")
    (status,) = json.loads(capsys.readouterr().out)
    assert status["http"] == sidecar.service.http
    assert sidecar.service.token not in json.dumps(status)


def test_rows_beyond_an_engines_pool_are_forgotten(sidecar: OverTcp) -> None:
    service = sidecar.service
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.PLAIN_USERNAME, b"engine")
    socket.setsockopt(zmq.PLAIN_PASSWORD, service.token.encode())
    socket.connect(service.endpoint)
    hello = EngineHello("liar", "m", 16, 10, "v")
    socket.send_multipart(wire.encode_events(0, [hello, BlocksResident(b"")]))
    stored = [
        BlocksStored(b"".join(key.to_bytes(8, "little") for key in range(n, n + 500)), None, 16)
        for n in range(1, 5000, 500)
    ]
    for seq, event in enumerate(stored, 1):
        socket.send_multipart(wire.encode_events(seq, [event]))
    for seq in range(len(stored) + 1, len(stored) + 40):
        if service.parts.intake.counters["engines_overfull"]:
            break
        socket.send_multipart(wire.encode_events(seq, [Pressure(10, 0, 10, 0, 0)]))
        time.sleep(0.1)
    assert service.parts.intake.counters["engines_overfull"] >= 1
    counted = service.graph.resident_count
    until(lambda: not sum(map(counted, service.graph.engines)), "its rows are forgotten")
    socket.close(0)
    context.term()


def test_two_that_start_at_one_moment_on_one_path_are_told_apart(tmp_path: Path) -> None:
    """The second looks who is there while the first is about to bind."""
    path, context = tmp_path / "s", zmq.Context[Any]()
    first, second = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    refused: list[str] = []

    def start_too() -> None:
        try:
            front.bind(second, f"ipc://{path}")
        except ConfigError as error:
            refused.append(str(error))

    other = threading.Thread(target=start_too)
    with open(tmp_path / "s.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other.start()
        other.join(0.1)
        assert other.is_alive(), "it waits for whoever is about to bind"
        first.bind(f"ipc://{path}")
        (tmp_path / "s.lock").unlink()
    other.join(20)
    assert len(refused) == 1
    assert "another sidecar serves it" in refused[0]
    front.unlink(f"ipc://{path}")
    assert path.exists(), "who leaves takes nobody else's path away"
    context.destroy(linger=0)
    path.unlink(missing_ok=True)
    again = zmq.Context[Any]()
    third = again.socket(zmq.ROUTER)
    front.bind(third, f"ipc://{path}")
    assert "s.lock" not in {each.name for each in tmp_path.iterdir()}, "no lock is left behind"
    again.destroy(linger=0)


def test_starts_at_one_moment_leave_one_sidecar(tmp_path: Path) -> None:
    context, gate = zmq.Context[Any](), threading.Barrier(8)
    routers = [context.socket(zmq.ROUTER) for _ in range(8)]

    def bound(router: zmq.Socket[bytes]) -> bool:
        gate.wait()
        try:
            front.bind(router, f"ipc://{tmp_path}/s")
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(bound, routers)) == 1
    context.destroy(linger=0)
