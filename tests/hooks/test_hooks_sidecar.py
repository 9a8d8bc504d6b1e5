"""The child sidecar: started without waiting, restarted when it dies, ended with the engine."""

from __future__ import annotations

import errno
import logging
import os
import signal
import stat
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvgraph.hooks.sidecar import (
    MAX_STARTS_PER_MINUTE,
    SidecarChild,
    SocketDirectory,
    serve_command,
)
from waiting import until

LIVES = """
import json, os, time
engine = os.getppid()
print(json.dumps({"ready": True, "http": "http://127.0.0.1:1"}), flush=True)
while os.getppid() == engine:
    time.sleep(0.1)
"""


def python(code: str) -> Callable[[str], Sequence[str]]:
    return lambda endpoint: [sys.executable, "-c", code]


Start = Callable[..., SidecarChild]


@pytest.fixture
def child(caplog: pytest.LogCaptureFixture) -> Iterator[Start]:
    """Starts one that runs some Python; it is stopped after the test."""
    children: list[SidecarChild] = []

    def start(code: str, backoff_s: float = 0.005, **options: float) -> SidecarChild:
        caplog.set_level(logging.INFO)
        children.append(SidecarChild(python(code), backoff_s=backoff_s, **options))
        children[-1].start()
        return children[-1]

    yield start
    for each in children:
        each.stop()


def lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def test_one_line_says_where(child: Start, caplog: pytest.LogCaptureFixture) -> None:
    sidecar = child(LIVES)
    until(lambda: lines(caplog, "listens on"))
    (record,) = [r for r in caplog.records if "listens on" in r.getMessage()]
    assert sidecar.endpoint in record.getMessage()
    assert "http://127.0.0.1:1" in record.getMessage()
    assert sidecar.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, sidecar.pid) >= 5


def test_the_socket_lies_where_only_this_user_can_reach_it(child: Start) -> None:
    directory = Path(child(LIVES).endpoint.removeprefix("ipc://")).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_it_is_restarted_when_it_is_killed(child: Start, caplog: pytest.LogCaptureFixture) -> None:
    sidecar = child(LIVES)
    until(lambda: lines(caplog, "listens on") == 1)
    first = sidecar.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: lines(caplog, "listens on") == 2)
    assert sidecar.pid != first
    assert lines(caplog, "ended unexpectedly (exit code -9)") == 1


def test_one_that_always_dies_is_tried_again_less_often(
    child: Start, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = child("raise SystemExit(3)", backoff_s=0.001, rest_s=0.02)
    until(lambda: lines(caplog, "ended unexpectedly") > MAX_STARTS_PER_MINUTE + 2)
    sidecar.stop()
    assert not sidecar.gave_up
    assert lines(caplog, "once a minute") == 1


def test_after_a_bad_minute_the_next_child_lives(
    child: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Five kills for want of memory, and then there is some."""
    code = (
        f"from pathlib import Path; n = Path({str(tmp_path / 'n')!r}); "
        "n.write_text((n.read_text() if n.exists() else '') + 'x')\n"
        f"if len(n.read_text()) <= {MAX_STARTS_PER_MINUTE}: raise SystemExit(9)\n" + LIVES
    )
    child(code, backoff_s=0.001, rest_s=0.1)
    until(lambda: lines(caplog, "listens on"))


def test_a_killed_engines_directory_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from kvgraph.hooks.sidecar import SocketDirectory\n"
        "(SocketDirectory().path / 'kvgraph.sock').touch()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=False)
    (deserted,) = tmp_path.glob("kvgraph-*")
    (tmp_path / "kvgraph-of-somebody-else").mkdir()
    inhabited = SocketDirectory()
    assert not deserted.exists()
    next_one = SocketDirectory()
    assert inhabited.path.exists()
    assert (tmp_path / "kvgraph-of-somebody-else").exists()
    inhabited.close()
    next_one.close()
    assert not inhabited.path.exists()


def test_whatever_a_child_prints_it_is_looked_after(
    child: Start, caplog: pytest.LogCaptureFixture
) -> None:
    odd = (
        "import sys; sys.stdout.buffer.write(b'\\xff\\n[1, 2]\\n' + b'[' * 50_000 + b'\\n'); "
        "sys.stdout.flush()\n"
    )
    sidecar = child(odd + LIVES)
    until(lambda: lines(caplog, "listens on") == 1)
    assert sidecar.pid is not None
    os.kill(sidecar.pid, signal.SIGKILL)
    until(lambda: lines(caplog, "listens on") == 2)


def test_one_that_cannot_be_started_now_is_started_later(
    child: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = subprocess.Popen, [OSError(errno.EMFILE, "Too many open files")]

    def new_process(*args: Any, **kwargs: Any) -> Any:
        if failing:
            raise failing.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr("kvgraph.hooks.sidecar.subprocess.Popen", new_process)
    sidecar = child(LIVES)
    until(lambda: lines(caplog, "listens on") == 1)
    assert not sidecar.gave_up
    assert lines(caplog, "started again after OSError: Too many open files") == 1


def test_one_that_cannot_be_started_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    sidecar = SidecarChild(lambda endpoint: ["/nonexistent/python"])
    sidecar.start()
    until(lambda: sidecar.gave_up)
    sidecar.stop()
    assert lines(caplog, "could not be started") == 1


def test_stopping_ends_the_child_and_its_directory(
    child: Start, caplog: pytest.LogCaptureFixture
) -> None:
    sidecar = child("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + LIVES)
    until(lambda: lines(caplog, "listens on"))
    pid = sidecar.pid
    assert pid is not None
    sidecar.stop(timeout_s=0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not Path(sidecar.endpoint.removeprefix("ipc://")).parent.exists()


def test_an_endless_line_takes_no_memory_and_its_end_is_no_line(
    child: Start, caplog: pytest.LogCaptureFixture
) -> None:
    ready = '{"ready": true, "http": "http://127.0.0.1:2"}'
    tracemalloc.start()
    try:
        child(f"print('x' * (1 << 25) + {ready!r}); print({ready!r} * 2)" + LIVES)
        until(lambda: lines(caplog, "listens on"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 22
    assert lines(caplog, "http://127.0.0.1:2") == 0


def test_the_command_names_the_engine_as_parent() -> None:
    command = serve_command("ipc:///tmp/x")
    assert command[command.index("--parent") + 1] == str(os.getpid())
    assert command[1:5] == ["-P", "-m", "kvgraph", "serve"]
