"""The command line: real processes, found again by their runtime notes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from command_line import kvgraph
from kvgraph.advisor import cli
from kvgraph.advisor.process.process import ParentWatch
from kvgraph.advisor.tools.terminal import plain
from kvgraph.graph.wire.events import BlocksStored, RequestStarted, TierReport
from kvgraph.hooks.fake import FakeEngine
from waiting import until
from wire_keys import pack

Run = Callable[..., subprocess.CompletedProcess[str]]
EMPTY = Path(os.devnull)  # holds nothing, and is no directory


def environment_of(directory: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVGRAPH_")}
    return {**kept, "XDG_RUNTIME_DIR": str(directory), "COLUMNS": "120"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return environment_of(tmp_path)


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    return partial(kvgraph, environment=environment)


class Sidecar:
    """``kvgraph serve`` in a process of its own."""

    def __init__(self, environment: dict[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            command("serve", *arguments), env=environment, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ready(self) -> str:
        return self.process.stdout.readline()

    def end(self) -> tuple[str, str]:
        return self.process.communicate(timeout=30)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvgraph", *arguments]


@pytest.fixture
def serve(environment: dict[str, str]) -> Iterator[Callable[..., Sidecar]]:
    started: list[Sidecar] = []

    def begin(*arguments: str) -> Sidecar:
        started.append(Sidecar(environment, *arguments))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


class Running(NamedTuple):
    """A sidecar that runs while this file's tests do: what it said, and commands beside it."""

    said: str
    environment: dict[str, str]
    run: Run


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    environment = environment_of(tmp_path_factory.mktemp("running"))
    sidecar = Sidecar(environment, "--http-port", "0")
    yield Running(sidecar.ready(), environment, partial(kvgraph, environment=environment))
    sidecar.kill()


def test_version(run: Run) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, "kvgraph 0.1.0\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["status"], "no sidecar of this user is running"),
        (["status", "--url", "http://127.0.0.1:1"], "no sidecar answers"),
        (["explain", "12", "--url", "http://127.0.0.1:1"], "no sidecar answers"),
        (["open", "--url", "http://127.0.0.1:1"], "no sidecar of this user runs at"),
    ],
)
def test_a_failure_is_one_line_and_a_code(run: Run, arguments: list[str], expected: str) -> None:
    fails_in_one_line(run(*arguments), 1, expected)


def fails_in_one_line(done: subprocess.CompletedProcess[str], code: int, expected: str) -> None:
    assert done.returncode == code
    assert done.stdout == ""
    assert expected in done.stderr
    assert done.stderr.startswith("kvgraph: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--set", "score.agee=1"], "did you mean score.age?"),
        (["serve", "--set", "score.age"], "section.key=value"),
        (
            ["serve", "--set", "score.age=high"],
            "score.age = 'high' (command line): allowed: a valid number\n",
        ),
        (["serve", "--endpoint", "tcp://0.0.0.0:1"], "CURVE"),
        (["serve", "--config", "/does/not/exist.toml"], "No such file"),
        (["status", "--url", "ftp://x"], "is not a URL"),
        (["route", "--engines", "/does/not/exist"], "cannot be read: No such file"),
        (["memory", "x drain", "--budget", "99"], "engine 'x drain': allowed: http://HOST:PORT\n"),
        (["replay", "/does/not/exist", "--capacity", "9"], "there is no such file\n"),
        (["replay", str(EMPTY), "--capacity", "9" * 20], "allowed: whole numbers of blocks"),
        (["serve", "--set", "http.host=127.0.0.999"], "http.host = '127.0.0.999': "),
        (["traffic", str(EMPTY), "-o", "/nowhere/x"], "--out '/nowhere/x': there is no directory"),
        (["why", "x", "--url", "http://[::1"], "'http://[::1' is not a URL"),
        (["status", "--url", "http://127.0.0.1:99999"], "is not a URL"),
        (["status", "--url", "http://127.0.0.1:1/open?token=x"], "allowed: http://127.0.0.1:PORT"),
        (["status", "--url", "http://a b"], "'http://a b' is not a URL"),
        (["status", "--url", "http://127.0.0.1\n:1"], "is not a URL"),
        (["replay", str(EMPTY), "--capacity", "9"], "it holds no request\n"),
        (["route", "http://127.0.0.1:1", "--host", "127.0.0.999"], "--host '127.0.0.999': "),
        (["memory", "http://x", "--budget", "99", "--host", "127.0.0.999"], "--host '127.0.0.999'"),
        (
            ["memory", "http://x", "--budget", "9", "--embeddings", "x", "--embedding-model", "m"],
            "--embeddings 'x': allowed: http://HOST:PORT/v1\n",
        ),
        (
            ["route", "http://127.0.0.1:1", "--allow-remote", "--host", "a" * 99],
            f"--host '{'a' * 80}': ",
        ),
        (["replay", str(EMPTY), "--capacity", "9", "--policy", "lruu"], "allowed: all, lru,"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(run: Run, arguments: list[str], expected: str) -> None:
    """As with options that do not exist: a supervisor need not try again."""
    fails_in_one_line(run(*arguments), 2, expected)


def test_a_parent_of_an_impossible_number_is_gone() -> None:
    assert ParentWatch(10**12).is_gone()


def test_an_address_that_is_taken_may_be_free_later(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        endpoint = f"ipc://{tmp_path}/s.sock"
        done = run("serve", "--endpoint", endpoint, "--http-port", port)
        route = run("route", "http://127.0.0.1:1", "--port", port)
    fails_in_one_line(done, 1, f"http.port = {port}: cannot listen on 127.0.0.1")
    fails_in_one_line(route, 1, f"--port {port}: cannot listen on 127.0.0.1: Address already in")


@pytest.mark.parametrize("command", [["replay", "--capacity", "9"], ["prior", "-o", "x.npz"]])
def test_a_pipe_is_refused_at_once(run: Run, tmp_path: Path, command: list[str]) -> None:
    """Nobody may ever write to it; and a trace is opened twice."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    over = threading.Event()

    def end_it_for_who_waits() -> None:
        while not over.wait(0.01):
            with contextlib.suppress(OSError):  # nobody waits
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))

    writer = threading.Thread(target=end_it_for_who_waits, daemon=True)
    writer.start()
    try:
        done = run(command[0], str(pipe), *command[1:])
        fails_in_one_line(done, 2, "is a pipe; allowed: a file")
        for words in (["route", "--engines"], ["precache"]):
            fails_in_one_line(run(*words, str(pipe)), 2, "is no regular file")
    finally:
        over.set()
        writer.join()


def test_a_child_says_one_json_line_and_goes_with_its_parent(
    serve: Callable[..., Sidecar], environment: dict[str, str], tmp_path: Path
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        endpoint = f"ipc://{tmp_path}/engine.sock"
        sidecar = serve("--endpoint", endpoint, "--http-port", "0", "--parent", str(parent.pid))
        ready = json.loads(sidecar.ready())
        assert ready["ready"] is True
        assert ready["pid"] == sidecar.process.pid
        assert ready["endpoint"] == endpoint
        assert ready["http"].startswith("http://127.0.0.1:")
        # Killed and not yet reaped: a zombie still has a process id.
        parent.kill()
        out, errors = sidecar.end()
        assert out == ""
        assert sidecar.process.returncode == 0, errors
        assert not (tmp_path / "engine.sock").exists()
        assert list((tmp_path / f"kvgraph-{os.getuid()}").glob("*.json")) == []
    finally:
        parent.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such pages")
def test_a_sidecar_asks_for_no_huge_pages(serve: Callable[..., Sidecar]) -> None:
    sidecar = serve()
    assert sidecar.ready()
    assert "THP_enabled:\t0" in Path(f"/proc/{sidecar.process.pid}/status").read_text()


_FREES = """
import ctypes, numpy
from kvgraph.advisor.process.process import tame_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
tame_memory()
numpy.ones(2 << 20)  # 16 MiB, freed at once
before = info().d  # regions that go back to the system when they are freed
held = numpy.ones(1 << 20)
print(info().d - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's")
def test_large_arrays_go_back_to_the_system_after_a_larger_one_was_freed() -> None:
    found = subprocess.run([sys.executable, "-P", "-c", _FREES], capture_output=True, text=True)
    assert found.stdout.split() == ["1"], found.stderr


_TAKES_AGAIN = """
import resource, numpy
from kvgraph.advisor.process.process import tame_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

tame_memory()
pages = 16 << 20 >> 12
for _ in range(2):
    before = faults()
    arrays = [numpy.ones(1 << 17) for _ in range(16)]  # 1 MiB each
    print((faults() - before) / pages)
    del arrays
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's")
def test_memory_of_small_arrays_is_kept_for_the_next_ones() -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-c", _TAKES_AGAIN], capture_output=True, text=True
    )
    first, again = map(float, found.stdout.split())
    assert first > 0.5, found.stderr
    assert again < 0.1, found.stderr


def test_a_child_of_a_dead_parent_ends_at_once(serve: Callable[..., Sidecar]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    sidecar = serve("--parent", str(parent.pid))
    sidecar.end()
    assert sidecar.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_hangup_rereads_the_configuration_and_other_signals_end_it_cleanly(
    serve: Callable[..., Sidecar], number: int, tmp_path: Path
) -> None:
    file = tmp_path / "kvgraph.toml"
    file.write_text("[score]\nage = 1.0\n")
    sidecar = serve("--config", str(file))
    assert "AITHER_KVCACHE_SIDECAR=ipc://" in sidecar.ready()
    file.write_text("[score]\nage = wrong\n")
    sidecar.process.send_signal(signal.SIGHUP)
    assert "not reloaded" in sidecar.process.stderr.readline()
    sidecar.process.send_signal(number)
    _, errors = sidecar.end()
    assert sidecar.process.returncode == 0, errors
    assert "Traceback" not in errors


TIERS = TierReport(
    bytes_per_block=1_000_000, warm_blocks=300, warm_capacity=400, cold_blocks=5, cold_capacity=60,
    spilled=70, spill_lost=1, spill_failed=2, passed_over=80, demoted=6, dropped=3, loaded=20,
    load_failed=4, stalls=9, stall_s=1.5, recomputed=7, prefetched=10, prefetch_useful=6,
    prefetch_wasted=2, prefetch_cancelled=11, load_bytes_per_s=3e9, spill_bytes_per_s=2e9,
    prefill_tokens_per_s=5e3,
)  # fmt: skip


def test_status_and_explain_find_a_running_sidecar(running: Running) -> None:
    endpoint, run = running.said.split("AITHER_KVCACHE_SIDECAR=")[1].split(";")[0], running.run

    def status() -> Any:
        (found,) = json.loads(run("status", "--json").stdout)
        return found

    with FakeEngine(endpoint, 100, 16, "node:1 [red]") as engine:
        until(lambda: any(each["state"] == "synced" for each in status()["engines"]))
        asked = RequestStarted("chatcmpl-r-0-1f3a5b7c", pack(5), 17, 0, 16, "chat")
        for event in (asked, BlocksStored(pack(5), None, 16, "chat"), TIERS):
            engine.client.emit(event)
        until(lambda: status()["graph"]["blocks"])
        assert status()["engines"][0]["name"] == "node:1 [red]"
        shown = run("status")
        assert shown.returncode == 0, shown.stderr
        for fact in (
            "tiers of node:1 [red]", "300 of 400 blocks (300.0 MB, 75 %)", "75 % useful (6 of 8)",
        ):  # fmt: skip
            assert fact in shown.stdout
        block = run("explain", "0x5")
        assert "importance" in block.stdout
        assert "LRU on" in block.stdout
        assert "ranked_by lru, rank 0, of 1, policy_rank 0" in " ".join(block.stdout.split())
        assert json.loads(run("explain", "chat", "--json").stdout)["blocks"] == 1
        (listed,) = json.loads(run("explain", "--json").stdout)
        assert [each["session"] for each in listed["sessions"]] == ["chat"]
        assert "1 of 1 sessions" in run("explain").stdout
        assert "A caller named it" in " ".join(run("explain", "chatcmpl-r").stdout.split())
        for word, said in (
            ("explain", "no session of that name"),
            ("why", "no request or session"),
        ):
            unknown = run(word, "nobody")
            assert unknown.returncode == 1
            assert said in unknown.stderr
            assert "whole key" not in unknown.stderr
        for prefix in ("0x1f3…", "1f3a", "0x1f3", "0x", "0X1F3..."):
            failed = run("explain", prefix)
            assert failed.returncode == 1
            allowed = "a decimal number, or 0x and up to 16 hexadecimal digits"
            assert (allowed in failed.stderr) == (prefix != "0x"), failed.stderr


def test_a_runtime_directory_that_others_may_enter_is_refused(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / f"kvgraph-{os.getuid()}"
    directory.mkdir(mode=0o755)
    done = run("status")
    assert done.returncode == 1
    assert "mode 0700" in done.stderr


def broken(name: str) -> EntryPoint:
    return EntryPoint(name, "kvgraph.nowhere_to_be_found:app", cli.COMMAND_GROUP)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("bench", "`pip install -e tests/bench`"),
        ("calibrate", "pip install 'kvgraph[vllm]'"),
        ("other", "pip install 'kvgraph'"),
    ],
)
def test_a_command_that_lacks_something_says_how_to_install_it(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [broken(each) for each in {command, "bench", "demo", "selftest"}]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: here)
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "graph", "--json"])
    assert caught.value.code == 1
    assert told in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("command", ["bench", "demo", "selftest"])
def test_commands_of_a_clone_say_where_they_are(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(SystemExit) as caught:
        cli.main([command])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert f"`kvgraph {command}` is not installed" in said
    assert "`pip install -e tests/bench`" in said
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert command in capsys.readouterr().out.split("Not installed: ")[1]


def test_help_lists_every_command_under_what_people_do() -> None:
    app = cli.build_app(None)
    listed = [*app.registered_commands, *app.registered_groups]
    panels = [each.rich_help_panel for each in listed if isinstance(each.rich_help_panel, str)]
    assert len(panels) == len(listed) > 20
    assert len(set(panels)) == 5


@pytest.mark.parametrize("name", ["status", "export", "route", "keys", "prior"])
def test_a_command_is_listed_with_its_own_words(name: str) -> None:
    def listed(command: str | None) -> str:
        known: Any = typer.main.get_command(cli.build_app(command))
        return str(known.commands[name].help).split("\n\n")[0].replace("\n", " ")

    assert listed(None) == listed(name)


def test_a_command_without_sub_commands_asks_for_none(run: Run) -> None:
    done = run("demo", "fleet")
    assert done.returncode == 2
    assert "unexpected extra argument" in done.stderr


@pytest.mark.parametrize("name", [name for name, each in cli._COMMANDS.items() if each.place])
def test_help_shows_all_of_its_words(name: str, run: Run) -> None:
    known: Any = typer.main.get_command(cli.build_app(name))
    shown = " ".join(run(name, "--help").stdout.replace("│", " ").split())
    for option in known.commands[name].params:
        words = re.sub(r"[^a-z ]", " ", str(getattr(option, "help", "") or "").lower()).split()
        assert not words or words[-1] in shown.lower(), option.name
        assert "[" not in str(getattr(option, "help", "") or ""), f"{option.name}: eaten as markup"


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        ("import kvgraph.advisor.service", ("torch",)),
        (
            "import contextlib\nfrom kvgraph.advisor.cli import main\n"
            "with contextlib.suppress(SystemExit): main(['--version'])",
            ("torch", "vllm", "fastapi", "kvgraph.hooks", "kvgraph_bench"),
        ),
    ],
    ids=["by the sidecar", "by another command"],
)
def test_what_is_not_needed_is_not_imported(code: str, unneeded: tuple[str, ...]) -> None:
    code += f"\nimport sys\nassert not [n for n in {unneeded} if n in sys.modules]"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_what_an_engine_calls_itself_moves_no_cursor() -> None:
    shown = plain("a\x1b[2J\u202eb\nc[bold]d").plain
    assert shown == "a\ufffd[2J\ufffdb\nc[bold]d"


def test_the_page_is_opened_by_its_address(running: Running) -> None:
    address = running.said.partition("watch it at ")[2].split(";")[0]
    assert f"watch it at {address}" in running.run("status").stdout
    assert running.run("open", "--no-browser").stdout.strip() == address
    assert "/open?token=" in address
    hidden = running.run("open", "--no-browser", "--edit").stdout.strip()
    assert hidden.startswith(address + "#edit=")


RECORDING_BROWSER = """#!/bin/sh
printf '%s' "$*" > "$RECORD.new"
cp -p "${1#file://}" "$RECORD.html"
mv "$RECORD.new" "$RECORD"
"""


def test_a_browsers_command_line_shows_no_token(running: Running, tmp_path: Path) -> None:
    address = running.run("open", "--no-browser", "--edit").stdout.strip()
    program, record = tmp_path / "browser", tmp_path / "record"
    program.write_text(RECORDING_BROWSER)
    program.chmod(0o700)
    shown = {**running.environment, "BROWSER": f"{program} %s", "RECORD": str(record)}
    opening = subprocess.Popen(
        command("open", "--edit"), env=shown, stdout=subprocess.PIPE, text=True
    )
    until(record.exists, "no browser was started")
    opening.send_signal(signal.SIGINT)
    assert opening.communicate(timeout=30)[0].strip() == address
    assert opening.returncode == 0
    said = record.read_text()
    assert said.startswith("file://")
    assert not any(token in said for token in re.findall("[0-9a-f]{48}", address))
    read = record.with_suffix(".html")
    assert address in read.read_text()
    assert read.stat().st_mode & 0o777 == 0o600
    assert not Path(said.removeprefix("file://")).exists()
