"""A real sidecar process that can be killed, and what it says of itself while it is mistreated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil


class SidecarProcess:
    """``kvgraph serve`` on an ipc socket in ``directory``; a context manager.

    Args:
        directory: Short enough for a socket's path; also the sidecar's runtime directory.
        settings: ``section.key`` → value.
    """

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._directory = directory
        self._settings = {key.replace("__", "."): value for key, value in settings.items()}
        self.endpoint = f"ipc://{directory}/s"
        self.http = ""
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> SidecarProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it and wait until it is ready."""
        command = [sys.executable, "-P", "-m", "kvgraph", "serve", "--endpoint", self.endpoint]
        command += ["--parent", str(os.getpid()), "--http-port", "0"]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGRAPH_")}
        environment["XDG_RUNTIME_DIR"] = str(self._directory)
        environment["KVGRAPH_POLICY__GUARD"] = "false"  # rankings are what is looked at here
        self._child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self._child.stdout is not None
        self.http = json.loads(self._child.stdout.readline())["http"]

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def status(self) -> dict[str, Any]:
        """``/status``, at most a quarter of a second old."""
        with urllib.request.urlopen(f"{self.http}/status", timeout=30) as answer:
            status: dict[str, Any] = json.load(answer)
        return status

    def rss(self) -> int:
        """Bytes of memory in use."""
        assert self._child is not None
        return int(psutil.Process(self._child.pid).memory_info().rss)

    def series(self) -> int:
        """Lines of ``/metrics`` that are a sample."""
        with urllib.request.urlopen(f"{self.http}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return sum(not line.startswith("#") for line in text.splitlines())


def wait_until(condition: Any, seconds: float, pause_s: float = 0.02) -> bool:
    """Whether ``condition()`` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
