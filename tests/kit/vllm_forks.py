"""Programs in forks of one process that has imported vLLM: to import it takes longer than to run
most of them. But for that they are as started by themselves.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn


class Fork:
    """A program that runs, as the leader of a session and with a process group of its own."""

    def __init__(self, stdout: int, fate: int) -> None:
        self.stdout = os.fdopen(stdout)  # errors and output; whoever reads it closes it
        self._fate = os.fdopen(fate)
        self._code: int | None = None
        self.pid = int(self._fate.readline())

    def poll(self) -> int | None:
        """Its exit status, negative for a signal, or None while it runs."""
        if self._code is None and select.select([self._fate], [], [], 0.0)[0]:
            self._code = int(self._fate.readline())
            self._fate.close()
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        if self._code is None and not select.select([self._fate], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {self.pid} runs after {timeout_s} s")
        code = self.poll()
        assert code is not None
        return code

    def kill(self) -> None:
        """End it, and what it started, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()


class VllmForks:
    """The process that imports vLLM, in this environment."""

    def __init__(self, env: dict[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=env, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    def start(self, script: Path, argument: str, env: dict[str, str]) -> Fork:
        """Run ``script argument`` in this environment, as Python was started for all of them."""
        output, stdout = os.pipe()
        fate, told = os.pipe()
        with tempfile.TemporaryFile("w+") as order:
            json.dump([str(script), argument, env], order)
            order.flush()
            socket.send_fds(self._control, [b"+"], [order.fileno(), stdout, told])
        os.close(stdout)
        os.close(told)
        return Fork(output, fate)

    def close(self) -> None:
        self._control.close()
        self._process.wait(60)


def _next_order(control: socket.socket) -> tuple[int, int, int]:
    """Returns in a fork for each order; ends when nobody is left to give one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        word, files, *_ = socket.recv_fds(control, 1, 3)
        if not word:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            order, stdout, told = files
            return order, stdout, told
        for file in files:
            os.close(file)


def _tell(told: int, pid: int) -> NoReturn:
    """Say which process runs a program, and how it ends."""
    with os.fdopen(told, "w", buffering=1) as fate:
        fate.write(f"{pid}\n")
        fate.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    os._exit(0)


def _run(order: int, stdout: int, told: int, added: dict[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(stdout)
        _tell(told, pid)
    os.setsid()
    os.close(told)
    for stream in (1, 2):
        os.dup2(stdout, stream)
    os.close(stdout)
    with os.fdopen(order) as file:
        file.seek(0)
        script, argument, env = json.load(file)
    os.environ.clear()
    # What vLLM's import sets, and sets again in a process that this one spawns, may not come first:
    # setproctitle looks for a process's title beside the first variable of its environment.
    os.environ.update(env | added)
    sys.argv = [script, argument]
    runpy.run_path(script, run_name="__main__")


def _import_vllm() -> dict[str, str]:
    """The variables that vLLM sets when it is imported."""
    before = dict(os.environ)
    from vllm import LLM  # noqa: F401 -- with all that it imports

    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


if __name__ == "__main__":
    control = socket.socket(fileno=int(sys.argv[1]))
    added = _import_vllm()
    _run(*_next_order(control), added)
