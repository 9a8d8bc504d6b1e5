"""CURVE keys: who gets in, who does not, and what is said of files that are no keys."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth
from kvgraph.advisor.cli import main
from kvgraph.advisor.config.config import load
from kvgraph.advisor.process.keys import new_engine_keys, new_sidecar_keys
from kvgraph.advisor.service import Service
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.wire import curve_keys
from kvgraph.graph.wire.curve_keys import EngineKeys, SidecarKeys
from kvgraph.hooks.doctor.command import check_sidecar
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from kvgraph.hooks.vllm import plugin

QUICK = ClientOptions(tick_s=0.01, heartbeat_s=0.1, resync_gap_s=0.05, absent_s=0.3)
VARIABLE = "AITHER_KVCACHE_SIDECAR_KEYS"


def load_engine_keys(folder: Path) -> EngineKeys:
    return curve_keys.load_engine_keys(folder, zmq.curve_public)


def load_sidecar_keys(folder: Path) -> SidecarKeys:
    return curve_keys.load_sidecar_keys(folder, zmq.curve_public)


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
    settings = {
        "sidecar.endpoint": "tcp://0.0.0.0:0", "sidecar.keys": str(keys),
        "sidecar.interval_s": 0.05,
    }  # fmt: skip
    service = Service(load(overrides=settings), overrides=settings)
    thread = threading.Thread(target=service.run)
    thread.start()
    yield service
    service.stop()
    thread.join(timeout=20)


def reached(service: Service) -> str:
    return service.endpoint.replace("0.0.0.0", "127.0.0.1")


def gets_advice(service: Service, within_s: float) -> bool:
    with FakeEngine(reached(service), options=QUICK) as engine:
        engine.run(range(64), "chat")
        deadline = time.monotonic() + within_s
        while engine.client.ranking() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return engine.client.ranking() is not None


def test_an_engine_whose_key_is_allowed_gets_advice_until_it_is_taken_off(
    keys: Path,
    caplog: pytest.LogCaptureFixture,
    sidecar: Service,
    monkeypatch: pytest.MonkeyPatch,
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
        deadline = time.monotonic() + 20
        while engine.client.ranking() is None:
            assert time.monotonic() < deadline, "it asks no more"
            time.sleep(0.05)


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
    settings = {"sidecar.endpoint": "tcp://[::1]:0", "sidecar.keys": str(keys)}
    service = Service(load(overrides=settings), overrides=settings)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        assert gets_advice(service, 20.0)
    finally:
        service.stop()
        thread.join(timeout=20)


def test_an_engine_goes_beyond_loopback_with_keys_only(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def break_mode(folder: Path) -> None:
    (folder / "engine.key_secret").chmod(0o640)


def break_file(folder: Path) -> None:
    (folder / "engine.key_secret").write_text("no key")
    (folder / "engine.key_secret").chmod(0o600)


def break_pair(folder: Path) -> None:
    path = folder / "engine.key_secret"
    public, secret = zmq.curve_keypair()[0].decode(), zmq.curve_keypair()[1].decode()
    path.write_text(f'public-key = "{public}"\nsecret-key = "{secret}"\n')


def take_public(folder: Path) -> None:
    (folder / "sidecar.key").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (break_mode, "for others to read"),
        (break_file, "holds no key"),
        (break_pair, "no pair"),
        (take_public, "missing"),
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
        assert ended.value.code == 1
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sidecar.keys": "", "sidecar.endpoint": "tcp://0.0.0.0:1"}, "is empty"),
        ({"sidecar.endpoint": "tcp://0.0.0.0:1"}, "CURVE"),
        ({"sidecar.keys": "/x", "sidecar.endpoint": "tcp://u:p@10.0.0.5:1"}, "host and port"),
    ],
)
def test_addresses_and_folders_that_are_none_are_named(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(overrides=settings)


def test_keys_that_no_door_asks_for_are_told(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"sidecar.keys": str(keys), "sidecar.endpoint": f"ipc://{keys.parent}/s"}
    service = Service(load(overrides=settings), overrides=settings)
    assert "sidecar.keys are not used" in caplog.text
    thread = threading.Thread(target=service.run)
    thread.start()
    service.stop()
    thread.join(timeout=20)


def test_the_commands_say_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
