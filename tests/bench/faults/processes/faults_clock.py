"""The machine's clock jumps by an hour, to and fro: no age is negative, nobody is forgotten.

Sidecar and engine are those of one process here, whose ``time.time`` jumps: nobody but root can set
a machine's clock, and nobody should for a bench.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.config.config import load
from kvgraph.advisor.service import Service
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions

from ...figures import Figures
from ...sidecars.sidecar_process import wait_until
from ..faults import Say, Size

JUMPS: Final = (3600.0, -3600.0, -7200.0, 0.0)  # seconds from the true time
_A_JUMP_S: Final = 2.5  # longer than a ranking is acted on
_SESSIONS: Final = 50


class _Watch:
    def __init__(self, service: Service, engine: FakeEngine, rng: random.Random) -> None:
        self._service, self._engine, self._rng = service, engine, rng
        self.oldest, self.negative, self.fewest = 0.0, 0, _SESSIONS

    def look(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            session = f"s{self._rng.randrange(_SESSIONS)}"
            self._engine.run([self._rng.randrange(50_000) for _ in range(64)], session)
            held = self._engine.client.ranking()
            self.oldest = max(self.oldest, time.monotonic() - held.ts if held else seconds)
            status = self.status()
            self.negative += sum(age < 0 for age in _seconds_in(status))
            self.fewest = min(self.fewest, self.sessions(status))
            time.sleep(0.02)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._service.http}/status", timeout=30) as answer:
            status: dict[str, Any] = json.load(answer)
        return status

    @staticmethod
    def sessions(status: dict[str, Any]) -> int:
        """Sessions that are known, but for those that are over."""
        return sum(n for state, n in status["graph"]["sessions"].items() if state != "ended")


def _seconds_in(value: Any, name: str = "") -> Iterator[float]:
    """Every number in a status that is a time."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _seconds_in(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _seconds_in(each, name)
    elif isinstance(value, (int, float)) and name.endswith("_s"):
        yield value


@contextmanager
def jumping() -> Iterator[list[float]]:
    """``time.time`` is off by as many seconds as the list's one number says."""
    offset, true_time, true_ns = [0.0], time.time, time.time_ns
    time.time = lambda: true_time() + offset[0]
    time.time_ns = lambda: true_ns() + int(offset[0] * 1e9)
    try:
        yield offset
    finally:
        time.time, time.time_ns = true_time, true_ns


@contextmanager
def _running(directory: Path) -> Iterator[Service]:
    overrides = {"sidecar.endpoint": f"ipc://{directory}/s", "policy.guard": False}
    service = Service(load(overrides=overrides), overrides=overrides)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join()


def run(figures: Figures, size: Size, say: Say) -> None:
    rng, options = random.Random(size.seed), ClientOptions(tick_s=0.05)
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        jumping() as offset,
        _running(Path(folder)) as service,
        FakeEngine(service.endpoint, num_blocks=2000, options=options) as engine,
    ):
        watch = _Watch(service, engine, rng)
        for number in range(_SESSIONS):
            engine.run([number, *range(63)], f"s{number}")
        wait_until(lambda: engine.client.ranking() is not None, 30.0)
        wait_until(lambda: watch.sessions(watch.status()) >= _SESSIONS, 30.0)
        for jump in JUMPS:
            say(f"{jump:+,.0f} s")
            offset[0] = jump
            watch.look(_A_JUMP_S)
    figures.add("clock_negative_ages", watch.negative, "", "0")
    figures.add("clock_sessions_lost", _SESSIONS - watch.fewest, "", "0")
    figures.add("clock_advice_age_max_s", watch.oldest, "s", "≤ 2")
