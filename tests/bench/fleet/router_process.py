"""Routers that are processes: started, asked whether they are up, and stopped."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx

from ..errors import ServerError
from ..serving.listening import free_port

_START_S: Final = 90.0  # on a busy machine it takes long to import


class RouterProcess:
    """A router before engines on a free port, by the ``words`` after ``python -m``, and a log."""

    words: Sequence[str]

    def __init__(self, log: Path, **variables: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log, self._variables = log, variables
        self._process: subprocess.Popen[bytes] | None = None

    def is_up(self) -> bool:
        """Whether it takes requests; raises ``httpx.TransportError`` where nobody answers."""
        return httpx.get(f"{self.url}/health", timeout=30.0, trust_env=False).is_success

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *self.words], env={**os.environ, **self._variables},
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self, grace_s: float = 40.0) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait(self) -> None:
        """Until it is up; raises ServerError if it is not."""
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if self.is_up():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise ServerError(f"a router was not up in time, or ended; its log is {self._log}")


class RouteProcess(RouterProcess):
    def __init__(self, urls: Sequence[str], runtime: Path, log: Path) -> None:
        super().__init__(log, XDG_RUNTIME_DIR=str(runtime))
        self.words = ["kvgraph", "route", *urls, "--port", str(self.port)]

    def is_up(self) -> bool:
        return all(each["up"] for each in self.status()["engines"])

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/fleet", timeout=30.0, trust_env=False).json()
        return found


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


class RayProcess(RouterProcess):
    """``ray_front`` as a process; only in a network of its own."""

    def __init__(self, urls: Sequence[str], log: Path) -> None:
        super().__init__(log, RAY_USAGE_STATS_ENABLED="0")
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.words = [f"{__package__}.ray_front", str(self.port), self._folder.name, *urls]

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._folder.cleanup()
