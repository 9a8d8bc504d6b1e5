"""``kvgraph route`` as a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from ..errors import ServerError

_START_S: Final = 90.0  # on a busy machine it takes long to import


class RouteProcess:
    """The command before some engines; a context manager.

    Args:
        urls: The engines'.
        runtime: Where sidecars say that they run.
        log: What it says goes there.
    """

    def __init__(self, urls: Sequence[str], runtime: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "kvgraph", "route", *urls, "--port", str(port)]
        self._runtime, self._log = runtime, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RouteProcess:
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self._runtime)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def status(self) -> dict[str, Any]:
        """What it says of its engines, its decisions and its requests."""
        found: dict[str, Any] = httpx.get(f"{self.url}/fleet", timeout=30.0, trust_env=False).json()
        return found

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self, grace_s: float = 40.0) -> None:
        """Tell it to stop, and end it if it has not after ``grace_s``."""
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
        """Until all engines are up.

        Raises:
            ServerError: They are not.
        """
        assert self._process is not None
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if all(each["up"] for each in self.status()["engines"]):
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise ServerError(f"kvgraph route did not find its engines; its log is {self._log}")
