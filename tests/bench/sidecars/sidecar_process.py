"""A real sidecar process that can be killed and stopped, and what it says of itself meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

_HEARD_S: Final = 1.5  # chosen


class SidecarProcess:
    """``kvgraph serve`` in ``directory``; its policy ranks from the start unless told otherwise."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        config: Path | None = None,
        token: str | None = None,
        **settings: Any,
    ) -> None:
        self._directory, self._port, self._config, self._token = directory, port, config, token
        chosen = {"policy__guard": "false", **settings}
        self._settings = {key.replace("__", "."): value for key, value in chosen.items()}
        self.endpoint = f"ipc://{directory}/s"
        self.http = ""
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> SidecarProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def process(self) -> psutil.Process:
        assert self._child is not None
        return psutil.Process(self._child.pid)

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "kvgraph", "serve", "--endpoint", self.endpoint]
        command += ["--parent", str(os.getpid()), "--http-port", str(self._port)]
        if self._config is not None:
            command += ["--config", str(self._config)]
        for key, value in self._settings.items():
            command += ["--set", f"{key}={value}"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVGRAPH_")}
        environment["XDG_RUNTIME_DIR"] = str(self._directory)
        if self._token is not None:
            environment["KVGRAPH_SIDECAR__TOKEN"] = self._token
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

    def stop(self) -> None:
        """SIGSTOP: it is there, its sockets too, and it does nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        """``/status``, at most a quarter of a second old."""
        status: dict[str, Any] = json.loads(self._get("/status"))
        return status

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def samples(self) -> dict[str, float]:
        """``/metrics``: each sample's name, with its labels, and its value."""
        lines = self._get("/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def let_engines_report(self) -> None:
        """Wait until engines have told of what they did so far: they report twice a second."""
        time.sleep(_HEARD_S)

    def tier_events(self, name: str) -> dict[str, int]:
        """What engines counted of their tiers under a name, by the sample of each engine."""
        marks = ("kvgraph_tier_events", f'"{name}"')
        samples = self.samples().items()
        return {key: int(value) for key, value in samples if all(mark in key for mark in marks)}

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.http}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
        return text


def counted_since(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """What was counted meanwhile, by the samples that are there yet."""
    return sum(count - before.get(key, 0) for key, count in after.items())


def wait_until(condition: Callable[[], object], seconds: float, pause_s: float = 0.02) -> bool:
    """Whether ``condition()`` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
    return True
