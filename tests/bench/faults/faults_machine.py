"""A disk that is full or gone under a sidecar, and a machine's clock that jumps by an hour.

It serves from memory, and its metrics say so; no age is negative, and nobody is forgotten. Where
the clock jumps, sidecar and engine are those of one process here, whose ``time.time`` does: nobody
but root can set a machine's clock, and nobody should for a bench.
"""

from __future__ import annotations

import json
import random
import resource
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

from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .faults import Say, Size

_POOL: Final = 500
_PATIENCE_S: Final = 30.0
_FAILED: Final = 'kvgraph_snapshot_total{what="failed"}'
_SAVED: Final = 'kvgraph_snapshot_total{what="saved"}'
_UNBOUND: Final = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class _SavingSidecar:
    """A sidecar that saves often, and an engine that never rests."""

    def __init__(self, sidecar: SidecarProcess, engine: FakeEngine, seed: int) -> None:
        self._sidecar, self._engine = sidecar, engine
        self._rng = random.Random(seed)
        self.unadvised = 0
        self.looks = 0

    def until_more(self, sample: str) -> bool:
        """Serve until ``sample`` of the metrics has grown; False: it did not."""
        before = self._sidecar.samples().get(sample, 0.0)
        return wait_until(lambda: self._grown(sample, before), _PATIENCE_S, 0.05)

    def _grown(self, sample: str, before: float) -> bool:
        self._engine.run([self._rng.randrange(50_000) for _ in range(160)])
        self.looks += 1
        self.unadvised += self._engine.client.ranking() is None
        return self._sidecar.samples().get(sample, 0.0) > before


def run_disk(figures: Figures, size: Size, say: Say) -> None:
    """Full, well, gone, well; the kernel refuses the bytes, so what writes is the real thing."""
    kept, away = size.folder / "kept", size.folder / "away"
    kept.mkdir()
    settings: dict[str, Any] = {
        "sidecar__snapshot_path": kept / "graph.snap",
        "sidecar__snapshot_interval_s": 0.2,
    }
    options = ClientOptions(tick_s=0.05)
    with (
        SidecarProcess(size.folder, **settings) as sidecar,
        FakeEngine(sidecar.endpoint, num_blocks=_POOL, options=options) as engine,
    ):
        wait_until(lambda: engine.client.ranking() is not None, _PATIENCE_S)
        bench = _SavingSidecar(sidecar, engine, size.seed)
        told = [bench.until_more(_SAVED)]
        say("a file may have 4 KiB")
        sidecar.process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        told.append(bench.until_more(_FAILED))
        sidecar.process.rlimit(resource.RLIMIT_FSIZE, _UNBOUND)
        told.append(bench.until_more(_SAVED))
        say("a file stands where the directory was")
        kept.rename(away)
        kept.touch()
        told.append(bench.until_more(_FAILED))
        kept.unlink()
        away.rename(kept)
        told.append(bench.until_more(_SAVED))
    figures.add("disk_changes_not_told", told.count(False), "", "0")
    figures.add("disk_looks_without_advice", bench.unadvised, f"of {bench.looks}", "0")


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


def run_clock(figures: Figures, size: Size, say: Say) -> None:
    rng, options = random.Random(size.seed), ClientOptions(tick_s=0.05)
    with (
        jumping() as offset,
        _running(size.folder) as service,
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
