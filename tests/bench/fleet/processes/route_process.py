"""``kvgraph route`` as a process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from .proxy_process import ProxyProcess


class RouteProcess(ProxyProcess):
    def __init__(self, urls: Sequence[str], runtime: Path, log: Path) -> None:
        super().__init__(log)
        self._urls, self._runtime = urls, runtime

    def command(self) -> Sequence[str]:
        port = str(self.port)
        return [sys.executable, "-m", "kvgraph", "route", *self._urls, "--port", port]

    def environment(self) -> Mapping[str, str]:
        return {"XDG_RUNTIME_DIR": str(self._runtime)}

    def is_up(self) -> bool:
        return all(each["up"] for each in self.status()["engines"])

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/fleet", timeout=30.0, trust_env=False).json()
        return found
