"""A router that is a process: started, asked whether it is up, and stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import httpx

from ...errors import ServerError
from ...serving.listening import free_port

_START_S: Final = 90.0  # on a busy machine it takes long to import


class ProxyProcess(ABC):
    """A router before some engines, on a free port, that writes to ``log``; a context manager."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> Sequence[str]:
        """What starts it."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """Variables that it gets beside this process's own."""

    @abstractmethod
    def is_up(self) -> bool:
        """Whether it takes requests; raises ``httpx.TransportError`` where nobody answers."""

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command(), env={**os.environ, **self.environment()}, stdout=log,
                stderr=subprocess.STDOUT,
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
