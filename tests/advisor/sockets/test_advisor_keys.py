"""CURVE keys: who gets in, who does not, and what is said of files that are no keys."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from kvgraph.advisor.cli import main
from kvgraph.advisor.process.keys import new_engine_keys, new_sidecar_keys
from kvgraph.advisor.service import Service, leave_note, ready_line
from kvgraph.advisor.sockets import front
from kvgraph.advisor.tools.remote import RemoteError, ask
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.wire import curve_keys
from kvgraph.graph.wire.curve_keys import EngineKeys, SidecarKeys
from kvgraph.graph.wire.endpoints import (
    Note,
    RunningSidecar,
    running_sidecars,
    runtime_dir,
    token_of,
)
from kvgraph.graph.wire.events import BlocksStored, Pressure
from kvgraph.hooks.doctor.command import check_sidecar
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from kvgraph.hooks.vllm import plugin
from sidecar_ends import Dealer, Serving
from waiting import PATIENCE_S, until
from wire_keys import pack

QUICK = ClientOptions(tick_s=0.01, heartbeat_s=0.1, resync_gap_s=0.05, absent_s=0.3)
VARIABLE = "AITHER_KVCACHE_SIDECAR_KEYS"


def load_engine_keys(folder: Path) -> EngineKeys:
    return curve_keys.load_engine_keys(folder, zmq.curve_public)


def load_sidecar_keys(folder: Path) -> SidecarKeys:
    return curve_keys.load_sidecar_keys(folder, zmq.curve_public)


@contextmanager
def serving(endpoint: str = "tcp://127.0.0.1:0", **settings: str) -> Iterator[Service]:
    running = Serving(endpoint, **settings)
    try:
        yield running.service
    finally:
        running.stop()


@contextmanager
def noted(service: Service) -> Iterator[Note]:
    """While a note says where it is."""
    note = leave_note(service)
    assert note is not None
    try:
        yield note
    finally:
        note.remove()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sidecar's folder; the engine ``gpu-0`` has its own beside it, in ``gpu-0``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    new_sidecar_keys(tmp_path / "sidecar")
    new_engine_keys(tmp_path / "sidecar", "gpu-0", tmp_path / "gpu-0")
    return tmp_path / "sidecar"


@pytest.fixture
def sidecar(keys: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Service]:
    """A sidecar that asks for keys, on all interfaces as for other machines."""
    caplog.set_level("INFO")
    with serving("tcp://0.0.0.0:0", sidecar__keys=str(keys)) as service:
        yield service


def reached(service: Service) -> str:
    return service.endpoint.replace("0.0.0.0", "127.0.0.1")


@contextmanager
def advised(endpoint: str, within_s: float = PATIENCE_S) -> Iterator[FakeEngine]:
    with FakeEngine(endpoint, options=QUICK) as engine:
        engine.run(range(64), "chat")
        until(lambda: engine.client.ranking() is not None, "advice", within_s)
        yield engine


def gets_advice(service: Service, within_s: float) -> bool:
    with suppress(AssertionError), advised(reached(service), within_s):
        return True
    return False


def test_an_engine_whose_key_is_allowed_gets_advice_until_it_is_taken_off(
    keys: Path, caplog: pytest.LogCaptureFixture, sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(keys.parent / "gpu-0"))
    assert gets_advice(sidecar, 20.0)
    assert any("engines: 1" in said.getMessage() for said in caplog.get_records("setup"))
    assert check_sidecar(reached(sidecar)).ok
    (keys / "engines" / "gpu-0.key").unlink()
    assert not gets_advice(sidecar, 1.0)
    assert not check_sidecar(reached(sidecar), timeout_s=0.5).ok


def test_an_engine_that_is_allowed_later_is_let_in_without_a_restart(
    keys: Path, sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(keys.parent / "gpu-0"))
    allowed = keys / "engines" / "gpu-0.key"
    key = allowed.read_text()
    allowed.unlink()
    with FakeEngine(reached(sidecar), options=QUICK) as engine:
        engine.run(range(64), "chat")
        time.sleep(0.5)
        assert engine.client.ranking() is None
        allowed.write_text(key)
        until(lambda: engine.client.ranking() is not None, "it asks no more")


def test_files_that_are_no_keys_keep_nobody_out(
    keys: Path, sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = keys / "engines"
    (engines / "no-equals.key").write_text("public-key\n")
    (engines / "short.key").write_text('public-key = "abc"\n')
    (engines / "folder.key").mkdir()
    (engines / "gone.key").symlink_to(engines / "nowhere")
    (engines / "bytes.key").write_bytes(bytes(range(256)) * 100)
    os.mkfifo(engines / "pipe.key")
    monkeypatch.setenv(VARIABLE, str(keys.parent / "gpu-0"))
    assert gets_advice(sidecar, 20.0)
    assert len(load_sidecar_keys(keys).allowed()) == 1


def test_a_key_that_changes_counts_as_it_is_now(keys: Path) -> None:
    known, path = load_sidecar_keys(keys), keys / "engines" / "gpu-0.key"
    (before,) = known.allowed()
    new_engine_keys(keys, "gpu-1", keys.parent / "gpu-1")
    path.write_bytes((keys / "engines" / "gpu-1.key").read_bytes())
    (keys / "engines" / "gpu-1.key").unlink()
    assert known.allowed() == {load_engine_keys(keys.parent / "gpu-1").public} != {before}
    shutil.rmtree(keys / "engines")
    assert known.allowed() == frozenset()


def test_an_engine_that_was_never_allowed_is_not_heard(
    keys: Path, sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the sidecar's public key, which is no secret."""
    strangers = keys.parent / "strangers"
    new_sidecar_keys(strangers)
    new_engine_keys(strangers, "gpu-0", keys.parent / "stranger")
    (keys.parent / "stranger" / "sidecar.key").write_bytes((keys / "sidecar.key").read_bytes())
    monkeypatch.setenv(VARIABLE, str(keys.parent / "stranger"))
    assert not gets_advice(sidecar, 1.0)
    assert sidecar.parts.subscriber.counters["messages"] == 0


@pytest.mark.parametrize("named", [False, True], ids=["no keys", "a token"])
def test_without_keys_nothing_is_heard(
    keys: Path, sidecar: Service, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", sidecar.token)
    assert not gets_advice(sidecar, 1.0)
    assert sidecar.parts.subscriber.counters["messages"] == 0


def test_an_engine_speaks_to_its_own_sidecar_only(
    keys: Path, sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever took the sidecar's address has not its key."""
    engine = keys.parent / "gpu-0"
    new_sidecar_keys(keys.parent / "other")
    (engine / "sidecar.key").write_bytes((keys.parent / "other" / "sidecar.key").read_bytes())
    monkeypatch.setenv(VARIABLE, str(engine))
    assert not gets_advice(sidecar, 1.0)


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_keys_open_an_ipv6_address_too(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(keys.parent / "gpu-0"))
    with serving("tcp://[::1]:0", sidecar__keys=str(keys)) as service:
        assert gets_advice(service, 20.0)


def test_engines_leave_loopback_by_keys_only(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", "tcp://10.0.0.5:5560")
    with pytest.raises(ConfigError, match="kvgraph keys"):
        plugin.sidecar_endpoint()
    monkeypatch.setenv(VARIABLE, str(keys.parent / "gpu-0"))
    assert plugin.sidecar_endpoint() == "tcp://10.0.0.5:5560"


def test_secrets_are_their_owners_and_public_keys_hold_none(keys: Path) -> None:
    engine = keys.parent / "gpu-0"
    for secret in (keys / "sidecar.key_secret", engine / "engine.key_secret"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for public in (keys / "engines" / "gpu-0.key", engine / "sidecar.key"):
        assert zmq.auth.load_certificate(public)[1] is None
    assert load_sidecar_keys(keys).allowed() == {load_engine_keys(engine).public}


def break_pair(folder: Path) -> None:
    public, secret = (zmq.curve_keypair()[half].decode() for half in (0, 1))
    text = f'public-key = "{public}"\nsecret-key = "{secret}"\n'
    (folder / "engine.key_secret").write_text(text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "engine.key_secret").chmod(0o640), "for others to read"),
        (lambda folder: (folder / "engine.key_secret").write_text("no key"), "holds no key"),
        (break_pair, "no pair"),
        (lambda folder: (folder / "sidecar.key").unlink(), "missing"),
    ],
)
def test_what_is_wrong_with_keys_is_said_before_anything_starts(
    keys: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], said: str
) -> None:
    damage(keys.parent / "gpu-0")
    monkeypatch.setenv(VARIABLE, str(keys.parent / "gpu-0"))
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR", "tcp://10.0.0.5:5560")
    with pytest.raises(ConfigError, match=said):
        plugin.sidecar_endpoint()
    check = check_sidecar("tcp://127.0.0.1:9")
    assert not check.ok
    assert said in check.detail


def test_nothing_is_overwritten_and_names_are_checked(
    keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        (["sidecar", str(keys)], "exists"),
        (["engine", str(keys), "gpu-0", str(keys.parent / "again")], "exists"),
        (["engine", str(keys), "../gpu", str(keys.parent / "up")], "allowed: 1 to 64 letters"),
        (["engine", str(keys.parent / "none"), "gpu-1", str(keys.parent / "x")], "missing"),
        (["engine", str(keys), "gpu-1", str(keys)], "a folder apart"),
        (["engine", str(keys), "gpu-1", str(keys / "engines")], "a folder apart"),
        (["engine", str(keys), "gpu-1", str(keys.parent / "gpu-0")], "exists"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_what_fails_half_way_leaves_nothing_and_can_be_repeated(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(path.name for path in keys.rglob("*"))
    with monkeypatch.context() as full:
        real = os.open

        def no_room(path: Path, flags: int, *mode: int) -> int:
            if flags & os.O_CREAT and str(path).endswith("gpu-1.key"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return real(path, flags, *mode)

        full.setattr(os, "open", no_room)
        with pytest.raises(ConfigError, match=r"gpu-1\.key': No space left"):
            new_engine_keys(keys, "gpu-1", keys.parent / "gpu-1")
    assert sorted(path.name for path in keys.rglob("*")) == before
    assert list((keys.parent / "gpu-1").iterdir()) == []
    new_engine_keys(keys, "gpu-1", keys.parent / "gpu-1")
    assert len(load_sidecar_keys(keys).allowed()) == 2


def test_a_list_that_others_may_write_to_is_refused(keys: Path) -> None:
    (keys / "engines").chmod(0o777)
    with pytest.raises(ConfigError, match="for others to write to"):
        load_sidecar_keys(keys)


def test_keys_that_no_door_asks_for_are_told(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(f"ipc://{keys.parent}/s", sidecar__keys=str(keys)):
        assert "sidecar.keys are not used" in caplog.text


def test_commands_say_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["sidecar", str(tmp_path / "s")],
        ["engine", str(tmp_path / "s"), "gpu-0", str(tmp_path / "e")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"--set sidecar.keys={tmp_path / 's'}" in said
    assert f"{VARIABLE}=FOLDER" in said
    assert load_engine_keys(tmp_path / "e").public in load_sidecar_keys(tmp_path / "s").allowed()


@pytest.fixture(autouse=True)
def _own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("AITHER_KVCACHE_SIDECAR_TOKEN", raising=False)
    monkeypatch.delenv("KVGRAPH_SIDECAR__TOKEN", raising=False)


@pytest.fixture
def tcp_sidecar() -> Iterator[Service]:
    with serving() as service:
        yield service


def test_an_engine_of_this_user_finds_the_token_by_itself(tcp_sidecar: Service) -> None:
    with noted(tcp_sidecar), advised(tcp_sidecar.endpoint):
        assert check_sidecar(tcp_sidecar.endpoint).ok


def test_a_doctor_with_a_wrong_token_does_not_wait_for_ever(
    tcp_sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", "wrong")
    began = time.monotonic()
    for _ in range(20):  # a send that comes after the refusal finds no way out; not each one does
        assert not check_sidecar(tcp_sidecar.endpoint, timeout_s=0.2).ok
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("token", [None, b"x", b"wrong", b"x" * 255])
def test_without_the_token_nothing_is_heard(tcp_sidecar: Service, token: bytes | None) -> None:
    with (
        zmq.Context() as context,
        closing(Dealer(context, tcp_sidecar.endpoint, token=token)) as dealer,
    ):
        dealer.socket.setsockopt(zmq.SNDTIMEO, 0)
        with suppress(zmq.Again):  # a socket that was refused has no way out any more
            for _ in range(20):
                dealer.greet()
        assert not dealer.socket.poll(700)
    assert tcp_sidecar.parts.subscriber.counters["messages"] == 0
    assert tcp_sidecar.parts.subscriber.peers == []


def test_knowing_an_engines_public_id_does_not_give_its_place(
    tcp_sidecar: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_SIDECAR_TOKEN", tcp_sidecar.token)
    with advised(tcp_sidecar.endpoint) as engine:
        shown = json.dumps(ask(tcp_sidecar.http, "/status"))
        assert engine.client.identity.hex() not in shown
        (public,) = tcp_sidecar.graph.engines
        with FakeEngine(tcp_sidecar.endpoint, options=QUICK) as thief:
            thief.client.identity = bytes.fromhex(public)
            until(lambda: len(tcp_sidecar.graph.engines) == 2, "it is somebody else")
            assert engine.client.ranking() is not None


def test_a_sidecar_that_starts_anew_with_another_token_is_found_again() -> None:
    with ExitStack() as stack:
        with serving() as first, noted(first):
            stack.enter_context(advised(first.endpoint))
        with serving(first.endpoint) as second, noted(second):
            assert second.token != first.token
            until(lambda: len(second.parts.subscriber.peers) == 1, "it is back")


@contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_the_note_is_its_owners_and_the_ready_line_tells_no_token(tcp_sidecar: Service) -> None:
    with open_umask(), noted(tcp_sidecar) as note:
        assert stat.S_IMODE(note.path.stat().st_mode) == 0o600
        for address in (tcp_sidecar.endpoint, tcp_sidecar.http):
            assert token_of(address) == tcp_sidecar.token
        assert token_of("tcp://127.0.0.1:1") == ""
    for machine in (True, False):
        assert tcp_sidecar.token not in ready_line(tcp_sidecar, machine=machine)


def test_the_note_of_a_dead_sidecar_gives_no_token() -> None:
    dead = RunningSidecar(2**22 - 3, "tcp://127.0.0.1:9", "http://127.0.0.1:9", "old token")
    note = Note(dead)
    assert token_of(dead.http) == "old token", "another container's processes are not seen"
    note.lock.close()  # as the system does when a process is killed
    assert token_of(dead.http) == ""
    assert not note.path.exists()


def test_sidecars_of_containers_that_share_a_directory_have_a_note_each() -> None:
    """In each of them, the sidecar may have the same number."""
    notes = [Note(RunningSidecar(1, f"ipc:///{name}", f"http://{name}", name)) for name in "ab"]
    assert sorted(each.token for each in running_sidecars()) == ["a", "b"]
    notes[0].remove()
    assert [each.token for each in running_sidecars()] == ["b"]
    notes[1].remove()


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
    note = Note(RunningSidecar(os.getpid(), "ipc:///e", "http://h", "token"))
    strange = runtime_dir() / "1.json"
    os.mkfifo(strange) if content is None else strange.write_bytes(content)
    assert [each.pid for each in running_sidecars()] == [os.getpid()]
    note.remove()


def test_explain_reads_the_token_by_itself(
    tcp_sidecar: Service, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:

    def said(*arguments: str) -> Any:
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    with tcp_sidecar.graph.lock:
        tcp_sidecar.graph.apply("e", [BlocksStored(pack(1), None, 16, "chat")])
    with pytest.raises(RemoteError, match="token"):
        ask(tcp_sidecar.http, "/blocks/1/explain")
    with noted(tcp_sidecar):
        assert said("explain", "1")["session"] == "chat"
        assert said("explain", "chat", "--url", tcp_sidecar.http)["session"] == "chat"
        (status,) = said("status")
    assert status["http"] == tcp_sidecar.http
    assert tcp_sidecar.token not in json.dumps(status)


def test_rows_beyond_an_engines_pool_are_forgotten(tcp_sidecar: Service) -> None:
    service, token = tcp_sidecar, tcp_sidecar.token.encode()
    with zmq.Context() as context, closing(Dealer(context, service.endpoint, token=token)) as liar:
        liar.greet(blocks=10)
        for first in range(1, 5000, 500):
            liar.send(BlocksStored(pack(*range(first, first + 500)), None, 16))

        def is_noticed() -> bool:
            liar.send(Pressure(10, 0, 10, 0, 0))
            return service.parts.intake.counters["engines_overfull"] >= 1

        until(is_noticed, "a pool that holds more than it has room for")
        counted = service.graph.resident_count
        until(lambda: not sum(map(counted, service.graph.engines)), "its rows are forgotten")


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
