"""``kvgraph doctor``: each failure names its remedy."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvgraph
import pytest
from kvgraph.graph.wire.advice import ResyncRequest
from kvgraph.hooks.doctor import command as doctor
from kvgraph.hooks.doctor import environment
from kvgraph.hooks.doctor.environment import (
    check_admission,
    check_ends,
    check_hints,
    check_layers,
    check_recall,
    check_sampling,
    check_store,
    check_tiers,
    check_variables,
)
from kvgraph.hooks.recall.gate import Calibration, calibration_file, save
from kvgraph.hooks.requests.hints import hint_policy
from kvgraph.hooks.settings import engine_settings
from kvgraph.hooks.vllm import plugin
from typer.testing import CliRunner
from vllm.v1.core.block_pool import BlockPool

pytestmark = pytest.mark.usefixtures("vllm_loaded")
unknown_places = functools.cache(doctor.live_unknown_places)


@pytest.fixture(autouse=True)
def _vllms_sources_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are searched, which takes a second, and no test here changes them."""
    monkeypatch.setattr(doctor, "live_unknown_places", unknown_places)


def test_vllm_hooks_and_sockets_fit_here() -> None:
    checks = {check.name: check for check in doctor.run_checks(None)}
    assert [name for name, check in checks.items() if check.ok is False] == []
    assert checks["hooks"].ok
    assert checks["variables"].ok
    assert checks["sidecar"].ok is None


def test_that_vllms_own_command_finds_no_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_such)
    check = doctor.check_start()
    assert check.ok is None, "an engine starts by its module all the same"
    assert "python -m vllm.entrypoints.openai.api_server" in check.detail


def test_json_and_exit_code(socket_directory: Path) -> None:
    arguments = ["--json", "--endpoint", f"ipc://{socket_directory}/nobody"]
    result = CliRunner().invoke(doctor.app, arguments)
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["ok"] is False
    (failed,) = [check for check in report["checks"] if check["ok"] is False]
    assert failed["name"] == "sidecar"
    assert "kvgraph serve --endpoint" in failed["remedy"]


def test_people_see_the_remedy(socket_directory: Path) -> None:
    result = CliRunner().invoke(doctor.app, ["--endpoint", f"ipc://{socket_directory}/nobody"])
    assert "FAIL sidecar" in result.stdout
    assert "→ start one" in result.stdout


@pytest.mark.parametrize(
    ("reply", "ok", "words"),
    [
        (None, True, "answers"),
        ([b"KVG\x07", bytes(8), b"\x90"], False, "protocol version 7"),
        ([b"HTTP", b"/1.1"], False, "is not a sidecar"),
    ],
)
def test_what_answers_is_looked_at(
    router: Any, reply: list[bytes] | None, ok: bool, words: str
) -> None:
    def answer() -> None:
        router.read_until(lambda: router.peers)
        if reply is None:
            router.advise(ResyncRequest("unknown engine"))
        else:
            router.send_frames(reply)

    thread = threading.Thread(target=answer)
    thread.start()
    check = doctor.check_sidecar(router.endpoint, timeout_s=10)
    thread.join()
    assert check.ok is ok
    assert words in check.detail


def test_an_endpoint_that_is_none(socket_directory: Path) -> None:
    check = doctor.check_sidecar("pigeon://nest")
    assert check.ok is False
    assert "tcp://HOST:PORT" in check.remedy


def test_vllm_plugins_that_leave_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor.check_plugin().ok is False
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvgraph")
    assert doctor.check_plugin().ok


def test_a_hook_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BlockPool, "cache_full_blocks")
    check = doctor.check_hooks()
    assert check.ok is False
    assert "BlockPool.cache_full_blocks is missing" in check.detail


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("odd machine", ""),
        ("operator torchvision::nms does not exist", "pip uninstall torchvision torchaudio torchc"),
    ],
)
def test_a_check_that_breaks_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, error: str, remedy: str
) -> None:
    def broken() -> doctor.Check:
        raise RuntimeError(error)

    monkeypatch.setattr(doctor, "check_tiers", broken)
    (failed,) = [check for check in doctor.run_checks(None) if check.ok is False]
    assert (failed.name, failed.detail) == ("tiers", f"RuntimeError: {error}")
    assert remedy in (failed.remedy or "")


@pytest.mark.parametrize(
    ("environment", "detail"),
    [
        ({"AITHER_KVCACHE_WARM_GIB": "lots"}, "AITHER_KVCACHE_WARM_GIB='lots'; allowed: GiB"),
        ({"AITHER_KVCACHE_COLD_GIB": "1"}, "AITHER_KVCACHE_COLD_GIB needs"),
        ({"AITHER_KVCACHE_WARM_GIB": "0.001", "AITHER_KVCACHE_KERNELS": "cuda"},
         "AITHER_KVCACHE_KERNELS='cuda' is not known; allowed: auto, reference"),
        ({"AITHER_KVCACHE_WARM_GIB": "0.001", "AITHER_KVCACHE_COLD_GIB": "900000",
          "AITHER_KVCACHE_COLD_DIR": "/tmp/kvgraph-none/tiers"}, "GiB free of 900000.0"),
    ],
)  # fmt: skip
def test_tiers_that_cannot_be_had_are_told(
    environment: dict[str, str], detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check = check_tiers()
    assert check.ok is False
    assert detail in check.detail
    assert check.remedy


def test_a_variable_that_nothing_reads_is_named_with_the_one_meant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = Path(kvgraph.__file__).parent
    sources = [
        path.read_text() for part in ("hooks", "kernels") for path in ours.glob(f"{part}/**/*.py")
    ]
    for name in re.findall(r"AITHER_KVCACHE_\w*[A-Z]", " ".join(sources)):
        monkeypatch.setenv(name, "")
    assert not check_variables().remedy, "all that the code reads are known"
    monkeypatch.setenv("AITHER_KVCACHE_HINT", "all")
    check = check_variables()
    assert "AITHER_KVCACHE_HINT (did you mean AITHER_KVCACHE_HINTS?)" in check.line()
    assert check.line().startswith("warn variables: ")
    monkeypatch.setenv("AITHER_KVCACHE_QQQ", "1")  # is near to none, but for the prefix
    assert check_variables().detail.endswith("AITHER_KVCACHE_QQQ")


def test_memory_that_is_not_there_is_a_warning_as_the_engine_caps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_WARM_GIB", "900000")
    check = check_tiers()
    assert check.ok is True
    assert "900000.0 GiB of host memory per worker asked for" in check.detail
    assert "would be capped at" in check.detail
    assert check.line().startswith("warn tiers: ")
    assert "→ lower AITHER_KVCACHE_WARM_GIB" in check.line()


@pytest.mark.parametrize(
    ("variable", "value", "check", "detail"),
    [
        ("AITHER_KVCACHE_HINTS", "everybody", "hints", "='everybody'; allowed: all, session"),
        ("AITHER_KVCACHE_HINTS", "secret:/nowhere/s", "hints", "cannot read '/nowhere/s'"),
        ("AITHER_KVCACHE_ADMISSION", "treu", "admission", "='treu' counts as 1; allowed: 1 or 0"),
        ("AITHER_KVCACHE_HOLD_MAX_S", "5m", "admission", "seconds from 0 to 3600"),
        ("AITHER_KVCACHE_REFUSE_AFTER_S", "-1", "admission", "seconds from 0 to 3600"),
        ("AITHER_KVCACHE_RECALL", "yess", "recall", "='yess'; allowed: 1 (all requests), 0"),
        ("AITHER_KVCACHE_RECALL_SHARED", "treu", "recall", "='treu'; allowed: 1 or 0"),
        ("AITHER_KVCACHE_CORE", "c++", "core", "='c++'; allowed: python"),
        ("AITHER_KVCACHE_PROTECT_STALE_S", "nan", "protection", "seconds from 0 to 3600"),
        ("AITHER_KVCACHE_SECTIONS", '{"## Policy": "rulez"}', "layers", "lines and their layers"),
    ],
)
def test_a_mistake_that_engines_only_warn_of_fails(
    variable: str, value: str, check: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    (found,) = [each for each in doctor.run_checks(None) if each.name == check]
    assert found.ok is False
    assert variable in found.detail
    assert detail in found.detail
    assert found.line().endswith("→ correct the variable, or unset it")


@pytest.mark.parametrize(
    ("check", "variable", "value", "ok", "words"),
    [
        (check_admission, "ADMISSION", "", True, "on: in"),
        (check_admission, "ADMISSION", "0", None, "off"),
        (check_admission, "ADMISSION", "1", True, "on: in"),
        (check_admission, "ADMISSION", "Yes", True, "on: in"),
        (check_sampling, "SAMPLING", "", None, "off; "),
        (check_sampling, "SAMPLING", "1", True, "may take 0.2% of"),
        (check_sampling, "SAMPLING", "0.01", True, "may take 1.0% of"),
        (check_sampling, "SAMPLING", "2", False, "AITHER_KVCACHE_SAMPLING='2' counts as 1"),
        (check_ends, "ENDS", "", True, "by the marks of the chat template"),
        (check_ends, "ENDS", "on", True, "by the marks of the chat template"),
        (check_ends, "ENDS", "0", None, "nobody reads"),
        (check_ends, "ENDS", '{"turn_ends": [2], "call_ends": [7]}', True, "by the marks in"),
        (check_ends, "ENDS", '{"turn_ends": "x"}', False, "turn_ends"),
    ],
)
def test_a_switch_is_told_as_it_stands(
    check: Callable[[], doctor.Check], variable: str, value: str, ok: bool | None, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(f"AITHER_KVCACHE_{variable}", value)
    found = check()
    assert found.ok is ok
    assert words in found.detail
    assert bool(found.remedy) is (ok is False)


@pytest.mark.parametrize(
    ("layers", "hints", "ok", "words"),
    [
        ("0", "", None, "off by AITHER_KVCACHE_LAYERS"),
        ("off", "all", None, "off by "),
        ("1", "", True, "does not count: AITHER_KVCACHE_HINTS=all, or secret:FILE, believes it"),
        ("1", "secret:FILE", True, "counts if it comes with the secret"),
        ("{bad", "", False, "is not understood"),
        ("1", "all", True, "what callers say of messages counts"),
        ("maybe", "", False, "'maybe' counts as 1; allowed: 1 or 0"),
    ],
)
def test_layers_as_they_are_asked_for(
    layers: str, hints: str, ok: bool | None, words: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    monkeypatch.setenv("AITHER_KVCACHE_LAYERS", layers)
    monkeypatch.setenv("AITHER_KVCACHE_HINTS", hints.replace("FILE", str(secret)) or "session")
    check = check_layers()
    assert check.ok is ok
    assert words in check.detail


def test_a_bound_without_admission_draws_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_ADMISSION", "0")
    monkeypatch.setenv("AITHER_KVCACHE_HOLD_MAX_S", "60")
    line = check_admission().line()
    assert line.startswith("warn admission: off")
    assert "AITHER_KVCACHE_HOLD_MAX_S is set" in line
    assert line.endswith("→ AITHER_KVCACHE_ADMISSION=1")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (0o600, None),
        (0o640, None),
        (0o644, "has mode 0644: every user of this machine can read it"),
        (0o666, "has mode 0666: every user of this machine can read and change it"),
    ],
)
def test_a_secret_that_all_can_read_draws_a_warning(
    mode: int, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = tmp_path / "the secret"
    path.write_text("sixteen characters or more")
    path.chmod(mode)
    monkeypatch.setenv("AITHER_KVCACHE_HINTS", f"secret:{path}")
    check = check_hints()
    assert check.ok is True
    assert check.remedy == ("" if words is None else f"chmod 600 '{path}'")
    assert words is None or words in check.detail
    assert hint_policy(engine_settings()).secret == "sixteen characters or more"
    assert [words in each.message for each in caplog.records] == ([] if words is None else [True])
    assert "sixteen" not in check.line() + caplog.text


def test_a_shared_store_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check_store().ok is None
    monkeypatch.setenv("AITHER_KVCACHE_STORE", str(tmp_path / "kv"))
    assert "needs AITHER_KVCACHE_STORE_GIB" in check_store().detail
    monkeypatch.setenv("AITHER_KVCACHE_STORE_GIB", "0.5")
    assert "0.0 of 0.5 GiB" in check_store().detail
    monkeypatch.setenv("AITHER_KVCACHE_STORE_GIB", "900000")
    assert check_store().line().startswith("warn shared store: ")
    (tmp_path / "kv").chmod(0o777)
    assert check_store().ok is False
    monkeypatch.setenv("AITHER_KVCACHE_STORE", "mooncake://127.0.0.1:1")
    assert "AITHER_KVCACHE_STORE_OPEN=1 allows it" in check_store().detail


@pytest.mark.parametrize(
    ("models", "warm", "value", "ok", "told"),
    [
        ({}, "1", "", None, "for requests that ask; no calibrated model"),
        ({}, "1", "1", False, "for every request; no calibrated model"),
        ({"good": True}, "1", "1", True, "for every request; passed: good"),
        ({"bad": False}, "1", "1", False, "did not pass: bad (it says otherwise)"),
        ({"bad": False, "good": True}, "1", "", None, "passed: good; did not pass: bad"),
        ({"good": True}, "", "1", False, "but there are no tiers"),
        ({"good": True}, "", "", None, "but there are no tiers"),
    ],
)
def test_recall_is_told_with_what_calibrations_say(
    models: dict[str, bool], warm: str, value: str, ok: bool | None, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("AITHER_KVCACHE_CALIBRATIONS", str(tmp_path))
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", value)
    monkeypatch.setenv("AITHER_KVCACHE_WARM_GIB", warm)
    for name, passed in models.items():
        kept = Calibration(name, name, passed, "it says otherwise")
        save(kept, calibration_file(name))
    (tmp_path / "broken.json").write_text("[1")
    check = check_recall()
    assert check.ok is ok
    assert told in check.detail
    assert bool(check.remedy) == (not warm or not any(models.values()))


@pytest.mark.parametrize(("value", "python"), [(None, True), ("0", True), ("1", False)])
def test_what_the_rust_frontend_takes_away_is_said(
    value: str | None, python: bool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("AITHER_KVCACHE_LAYERS", "1")
    monkeypatch.setenv("AITHER_KVCACHE_HINTS", "all")
    monkeypatch.delenv("VLLM_USE_RUST_FRONTEND", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", value)
    frontend = environment.check_frontend()
    assert frontend.ok
    assert bool(frontend.remedy) is not python
    assert ("of messages counts" in environment.check_layers().detail) is python
    assert ("messages is not read" in environment.check_layers().detail) is not python
    plugin._check_frontend()
    assert ("no API process of Python's" in caplog.text) is not python
