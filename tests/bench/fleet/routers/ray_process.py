"""``RayProcess``: Ray Serve before engines that run."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from ..processes.proxy_process import ProxyProcess


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


class RayProcess(ProxyProcess):
    """``ray_front`` as a process; only in a network of its own."""

    def __init__(self, urls: Sequence[str], log: Path) -> None:
        super().__init__(log)
        self._urls = urls
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._folder.cleanup()

    def command(self) -> Sequence[str]:
        program = f"{__package__}.ray_front"
        place = [str(self.port), self._folder.name]
        return [sys.executable, "-P", "-m", program, *place, *self._urls]

    def environment(self) -> Mapping[str, str]:
        return {"RAY_USAGE_STATS_ENABLED": "0"}

    def is_up(self) -> bool:
        answer = httpx.get(f"{self.url}/health", timeout=30.0, trust_env=False)
        return answer.status_code == 200
