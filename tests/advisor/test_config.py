"""Configuration: where values come from, and what is said of a wrong one."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hand_clock import Clock
from kvgraph.advisor.config.config import Config, load, unread_variables
from kvgraph.advisor.config.edits import ConfigWatch, with_values
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.ranking.policy import Rules, Weights
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import EdgeType, SourceLayer
from kvgraph.graph.wire.endpoints import runtime_dir


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGRAPH_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvgraph.toml"


def test_defaults_are_those_of_the_graph() -> None:
    config = load()
    assert (config.score.weights(), config.rules()) == (Weights(), Rules())
    assert config.graph.limits() == GraphLimits()


def observed(endpoint: str = "tcp://127.0.0.1:5", **more: str) -> str:
    """The table of an engine that is watched."""
    lines = [f"{key} = '{value}'" for key, value in {"endpoint": endpoint, **more}.items()]
    return "\n".join(["[[sidecar.observe]]", *lines, ""])


# text of the file, what the message must hold: key, value, what is allowed
WRONG = [
    ("[score]\nagee = 1", ["score.agee", "did you mean score.age?"]),
    ("[scroe]\nage = 1", ["scroe", "did you mean score?"]),
    ("[score.edge_types]\nprefix_shar = 1", ["did you mean score.edge_types.prefix_share?"]),
    (observed(topc=""), ["sidecar.observe.0.topc"]),
    ("[score]\nage = 'abc'", ["score.age", "'abc'", "number"]),
    ("[score]\nage = nan", ["score.age", "nan", "finite"]),
    (f"[score]\nage = '{'x' * 10_000}'", ["score.age", "'xxx"]),  # and is shortened
    ("[score]\nage = true", ["score.age = True", "allowed: a number"]),
    ("[score.edge_types]\nsemantic = false", ["score.edge_types.semantic = False", "a number"]),
    ("[score]\nprotected_share = true", ["score.protected_share = True", "a number"]),
    ("[http]\nport = true", ["http.port = True", "allowed: a number"]),
    ('[sidecar]\nsnapshot_path = "a\\u0000b"', ["sidecar.snapshot_path = ", "NUL"]),
    (
        "[sidecar]\nsnapshot_path = ''",
        ["sidecar.snapshot_path = ''", "allowed: the path of a file"],
    ),
    ("[sidecar]\nsnapshot_path = 1", ["sidecar.snapshot_path = 1", "allowed: a path"]),
    ("[sidecar]\nsnapshot_path = '~nobody-here/x'", ["sidecar.snapshot_path", "allowed: ~ and"]),
    ("[sidecar]\nkeys = '~nobody-here/x'", ["sidecar.keys", "allowed: ~ and ~NAME"]),
    ("[sidecar]\nobserve = 'x'", ["sidecar.observe = 'x'", "below [[sidecar.observe]]"]),
    ('[sidecar]\nkeys = "\\u0000"', ["sidecar.keys = ", "NUL"]),
    ("[score]\nprotected_layers = ['rule']", ["'rule'", "axioms, identity, rules"]),
    ("score = 3", ["score = 3", "allowed: a table"]),
    ("sidecar.observe = ['x']", ["sidecar.observe.0 = 'x'", "allowed: a table"]),
    (observed().replace("endpoint", "topic"), ["observe.0.endpoint", "toml): is missing"]),
    (
        "[prefetch]\nenabled = 'maybe'",
        ["prefetch.enabled = 'maybe'", "toml): allowed: true or false"],
    ),
    ("[tracing]\nendpoint = 'x'", ["tracing.endpoint = 'x'", "allowed: pattern '^https?://"]),
    ("[sidecar]\ninterval_s = 0", ["sidecar.interval_s = 0", "greater than or equal to 0.01"]),
    ("[sidecar]\ninterval_s = 60", ["sidecar.interval_s = 60", "less than or equal to 1"]),
    ("[sidecar]\nengine_timeout_s = 0.1", ["sidecar.engine_timeout_s = 0.1", "equal to 1"]),
    ("[sidecar]\nmax_stale_s = 3600", ["sidecar.max_stale_s = 3600", "less than or equal to 60"]),
    ("[sidecar]\nmax_ranked = 2000000", ["sidecar.max_ranked = 2000000", "equal to 1048576"]),
    ("[prefetch]\nmax_blocks = 2000000", ["prefetch.max_blocks = 2000000", "equal to 1048576"]),
    ("[sidecar]\ntoken = 'short'", ["sidecar.token = '…'", "allowed: at least 16"]),
    ("[sidecar]\ntoken = 'with a space and a \\n line end'", ["sidecar.token", "pattern"]),
    (observed("tcp://10.0.0.5:5"), ["tcp://10.0.0.5:5", "beyond loopback", "allow_remote"]),
    (observed(replay_endpoint="tcp://[fd00::1]:6"), ["fd00::1", "beyond loopback"]),
    (observed(topic="a") + observed(topic="a"), ["tcp://127.0.0.1:5", "a topic of its own"]),
    (observed() + observed(topic="a"), ["tcp://127.0.0.1:5", "a topic of its own"]),
    ("[sidecar]\nmax_ranked = -5", ["sidecar.max_ranked = -5", "greater than or equal to 1"]),
    ("[sidecar]\nendpoint = 'sidecar'", ["'sidecar'", "ipc:///path", "tcp://127.0.0.1:PORT"]),
    ("[sidecar]\nendpoint = 'ipc://relative'", ["ipc://relative", "absolute"]),
    (f"[sidecar]\nendpoint = 'ipc:///{'x' * 200}'", ["sidecar.endpoint", "107"]),
    ("[sidecar]\nendpoint = 'tcp://0.0.0.0:1'", ["tcp://0.0.0.0:1", "CURVE"]),
    ("[sidecar]\nendpoint = 'tcp://*:1'", ["tcp://*:1", "CURVE"]),
    ("[sidecar]\nkeys = ''\nendpoint = 'tcp://0.0.0.0:1'", ["is empty"]),
    ("[sidecar]\nkeys = '/x'\nendpoint = 'tcp://u:p@10.0.0.5:1'", ["host and port"]),
    ("[sidecar]\nendpoint = 'tcp://127.0.0.1:huge'", ["sidecar.endpoint", "host and port"]),
    ("[http]\nport = 99999", ["http.port = 99999", "65535"]),
    ("[http]\nhost = '0.0.0.0'", ["http.host", "'0.0.0.0'", "allow_remote"]),
    ("[graph]\nsemantic_threshold = 2.0", ["graph.semantic_threshold = 2.0", "1"]),
    ("[prefetch]\nmax_blocks = 0", ["prefetch.max_blocks = 0", "greater than or equal to 1"]),
    ("[prefetch]\nhorizon_s = inf", ["prefetch.horizon_s = inf", "finite"]),
    ("[http", ["kvgraph.toml", "not TOML"]),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_a_wrong_file_names_key_value_and_what_is_allowed(
    file: Path, text: str, expected: list[str]
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    message = str(caught.value)
    assert all(part in message for part in expected), message
    assert "\n" not in message
    assert len(message) < 700


def test_engines_behind_one_endpoint_are_told_apart_by_their_topics(file: Path) -> None:
    """As pods' are that publish through one broker; any other keeps the id of its endpoint."""
    broker = [observed(topic=topic) for topic in ("pod-1", "pod-10")]
    file.write_text("".join([*broker, observed("tcp://127.0.0.1:6", topic="pod-2")]))
    found = load(file).sidecar.observed()
    assert {engine: each.topic for engine, each in found.items()} == {
        "kv:tcp://127.0.0.1:5 pod-1": "pod-1",
        "kv:tcp://127.0.0.1:5 pod-10": "pod-10",
        "kv:tcp://127.0.0.1:6": "pod-2",
    }


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KVGRAPH_SCOER__AGE", "1", ["KVGRAPH_SCOER__AGE", "did you mean score?"]),
        ("KVGRAPH_SCORE__AGEE", "1", ["score.agee", "environment", "score.age"]),
        ("KVGRAPH_SCORE__AGE", "old", ["score.age", "'old'", "environment"]),
        ("KVGRAPH_SCORE", "old", ["score", "environment"]),
        ("KVGRAPH_SCORE_AGE", "1", ["KVGRAPH_SCORE_AGE is not read: write KVGRAPH_SCORE__AGE"]),
    ],
)
def test_a_wrong_variable_names_itself(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load()
    assert all(part in str(caught.value) for part in expected), caught.value


def test_a_service_of_kubernetes_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAPH_HTTP_SERVICE_HOST", "10.0.0.5")
    monkeypatch.setenv("KVGRAPH_HTTP_PORT", "tcp://10.0.0.5:80")
    assert load().http.port == 0


def test_a_variable_that_nothing_reads_is_named() -> None:
    ours = ("CONFIG", "SCORE", "HTTP__PORT", "score__age", "MEMORY_SECRET")
    of_kubernetes = ("SERVICE_HOST", "PORT", "PORT_80_TCP_ADDR", "X_SERVICE_HOST", "X_PORT")
    named = dict.fromkeys([f"KVGRAPH_{each}" for each in (*ours, *of_kubernetes)], "1")
    assert not unread_variables({**named, "HOME": "/"})
    wrong = dict.fromkeys(["KVGRAPH_CONFIGG", "KVGRAPH_QQ", "KVGRAPH_QQ_PORT"], "x")
    assert unread_variables({**named, **wrong}) == [
        "KVGRAPH_CONFIGG (did you mean KVGRAPH_CONFIG?)", "KVGRAPH_QQ", "KVGRAPH_QQ_PORT",
    ]  # fmt: skip


def test_a_snapshot_is_kept_at_home(file: Path) -> None:
    file.write_text("[sidecar]\nsnapshot_path = '~/graph.snap'\n")
    assert load(file).sidecar.snapshot_path == Path.home() / "graph.snap"


def test_a_byte_order_mark_is_no_part_of_a_file(file: Path) -> None:
    file.write_text("\ufeff[score]\nage = 2.0\n")
    assert load(file).score.age == 2.0
    edited = with_values(file.read_text(), "score", {"age": 3.0})
    assert edited == "[score]\nage = 3.0\n"


def test_command_line_wins_over_environment_over_file_over_defaults(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text("[score]\nage = 1.0\ndegree = 1.0\nhit_count = 1.0\n")
    monkeypatch.setenv("KVGRAPH_SCORE__AGE", "2")
    monkeypatch.setenv("KVGRAPH_SCORE__DEGREE", "2")
    score = load(file, {"score.age": "3"}).score
    assert (score.age, score.degree, score.hit_count) == (3.0, 2.0, 1.0)
    assert score.importance == Weights().importance


def test_the_environment_names_the_file_and_takes_lists_with_commas(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    file.write_text("[score.edge_types]\ntemporal = 7.0\n")
    monkeypatch.setenv("KVGRAPH_CONFIG", str(file))
    monkeypatch.setenv("KVGRAPH_SCORE__PROTECTED_LAYERS", "rules, memories")
    monkeypatch.setenv("KVGRAPH_SCORE__EDGE_TYPES__SEMANTIC", "0.25")
    rules = load().rules()
    assert rules.edge_types[EdgeType.TEMPORAL] == 7.0
    assert rules.edge_types[EdgeType.SEMANTIC] == 0.25
    assert rules.protected_layers == {SourceLayer.RULES, SourceLayer.MEMORIES}


def test_remote_http_is_allowed_when_asked_for(file: Path) -> None:
    file.write_text("[http]\nhost = '0.0.0.0'\nallow_remote = true\n")
    assert load(file).http.host == "0.0.0.0"


def watching(file: Path, text: str, **overrides: Any) -> tuple[ConfigWatch, Clock, Config]:
    file.write_text(text)
    clock, config = Clock(0.0), load(file, overrides)
    return ConfigWatch(config, file, overrides, clock), clock, config


def test_a_changed_file_is_taken_once(file: Path) -> None:
    watch, clock, _ = watching(file, "[score]\nage = 1.0\n")
    file.write_text("[score]\nage = 22.0\n")
    assert watch.poll() is None, "not looked at before its time"
    clock.now += 2
    fresh = watch.poll()
    assert fresh.score.age == 22.0
    clock.now += 2
    assert watch.poll() is None


def test_a_bad_change_keeps_the_old_values_and_says_so_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch, clock, config = watching(file, "[score]\nage = 1.0\n")
    file.write_text("[score]\nage = 'never'\n")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.now += 2
            assert watch.poll() is None
    assert watch.config is config
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "score.age = 'never'" in caplog.text
    assert watch.last_error is not None

    file.write_text("[score]\nage = 333.0\n")
    clock.now += 2
    fresh = watch.poll()
    assert fresh.score.age == 333.0
    assert watch.last_error is None


def test_a_vanished_file_keeps_the_old_values(file: Path) -> None:
    watch, clock, config = watching(file, "[score]\nage = 1.0\n")
    file.unlink()
    clock.now += 2
    assert watch.poll() is None
    assert watch.config is config


def test_a_pipe_in_the_files_place_is_not_waited_for(file: Path) -> None:
    watch, _, config = watching(file, "[score]\nage = 1.0\n")
    file.unlink()
    os.mkfifo(file)
    opened = partial(os.open, file, os.O_RDWR | os.O_NONBLOCK)
    late = threading.Timer(3.0, lambda: os.close(opened()))  # or a reader would wait for ever
    late.start()
    watch.ask()
    assert watch.poll() is None
    assert late.is_alive(), "nobody waited for it"
    late.cancel()
    assert watch.config is config
    assert "is no regular file" in str(watch.last_error)


def test_a_reload_can_be_asked_for_at_once(file: Path) -> None:
    watch, _, _ = watching(file, "[score]\nage = 1.0\n")
    file.write_text("[score]\nage = 4444.0\n")
    watch.ask()
    fresh = watch.poll()
    assert fresh.score.age == 4444.0


def test_what_needs_a_restart_is_named(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch, clock, _ = watching(file, "")
    file.write_text(
        "[http]\nport = 1234\n[score]\nage = 1.5\n[graph]\nmax_names = 5\nmax_pairs = 5\n"
    )
    clock.now += 2
    with caplog.at_level(logging.INFO):
        assert watch.poll() is not None
    assert "[http], graph.max_names takes effect at the next start" in caplog.text


def test_the_command_line_writes_a_list_as_the_environment_may() -> None:
    config = load(overrides={"http.allowed_hosts": '["gpu-0.internal", "gpu-0"]'})
    assert config.http.allowed_hosts == ("gpu-0.internal", "gpu-0")
    for wrong in ("gpu-0", '["gpu-0'):
        with pytest.raises(ConfigError, match=r'command line\): allowed: a list: \["…", "…"\]'):
            load(overrides={"http.allowed_hosts": wrong})


def test_a_socket_whose_path_is_not_utf8_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="path is not UTF-8"):
        load(overrides={"sidecar.endpoint": "ipc:///tmp/\udcff/s.sock"})
    assert load(overrides={"sidecar.endpoint": "ipc:///tmp/ü/s.sock"})
    (tmp_path / "\udcff").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "\udcff"))
    with pytest.raises(ConfigError, match="is not UTF-8; set XDG_RUNTIME_DIR"):
        runtime_dir()
