"""Ten times the usual load, through the client that an engine has: what an engine pays for it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from kvgraph.graph.wire.events import AnyEvent, BlocksRemoved, BlocksStored, EngineHello, Pressure
from kvgraph.hooks.link.client import AdvisorClient

from ...figures import Figures
from ...sidecars.sidecar_process import SidecarProcess, wait_until
from ..faults import Say, Size

EMITS_A_SECOND: Final = 10_000  # of 100 block events each: 1,000,000 a second
BLOCKS: Final = 100
POOL: Final = 200_000
USUAL_S: Final = 5.0
_CAUGHT_UP_WITHIN_S: Final = 120.0


class BurstingEngine:
    """An ``EngineEnd`` whose pool turns over."""

    def __init__(self, endpoint: str) -> None:
        self._first, self._next = 1, 1 + POOL
        self.client = AdvisorClient(endpoint, self)
        self.waits: list[float] = []  # seconds that one emit took

    def publish(self) -> None:
        first, self._next = self._next, self._next + BLOCKS
        self._emit(BlocksStored(_keys(first, BLOCKS), None, 16))
        first, self._first = self._first, self._first + BLOCKS
        self._emit(BlocksRemoved(_keys(first, BLOCKS)))

    def is_followed(self) -> bool:
        """Whether the sidecar's newest ranking is of blocks that are cached, all of them known."""
        ranking = self.client.ranking()
        if ranking is None or not len(ranking.order):
            return False
        return bool((ranking.order >= self._first).all() and (ranking.order < self._next).all())

    @property
    def batches(self) -> int:
        """Sent to the sidecar, or dropped with their number."""
        return self.client.outbox.batches

    def has_told(self) -> bool:
        return not len(self.client.outbox)

    def _emit(self, event: AnyEvent) -> None:
        started = time.perf_counter()
        self.client.emit(event)
        self.waits.append(time.perf_counter() - started)

    def hello(self) -> EngineHello:
        return EngineHello("burst", "synthetic", 16, POOL + 10 * BLOCKS, "bench")

    def resident(self) -> bytes:
        return _keys(self._first, self._next - self._first)

    def copies(self) -> list[AnyEvent]:
        return []

    def held(self) -> list[AnyEvent]:
        return []

    def heartbeat(self, dropped: int) -> list[AnyEvent]:
        return [Pressure(POOL, 0, POOL, 1, 0)]


def _keys(first: int, count: int) -> bytes:
    return np.arange(first, first + count, dtype="<u8").tobytes()


def _at_rate(a_second: float, seconds: float) -> Iterator[None]:
    start = time.monotonic()
    done = 0
    while (now := time.monotonic()) < start + seconds:
        due = int((now - start) * a_second)
        for _ in range(min(due - done, 50)):
            yield
            done += 1
        time.sleep(0.001)


def burst(directory: Path, seconds: float) -> tuple[list[float], float | None, int]:
    """Waits of the engine in seconds, seconds until it was caught up with (None: never), drops."""
    with SidecarProcess(directory) as sidecar:
        engine = BurstingEngine(sidecar.endpoint)
        engine.client.start()
        try:
            wait_until(engine.is_followed, 30.0)
            for _ in _at_rate(EMITS_A_SECOND / 20, USUAL_S):
                engine.publish()
            engine.waits.clear()
            for _ in _at_rate(EMITS_A_SECOND / 2, seconds):
                engine.publish()
            return engine.waits, _catching_up(sidecar, engine), engine.client.dropped
        finally:
            engine.client.close()


def _catching_up(sidecar: SidecarProcess, engine: BurstingEngine) -> float | None:
    """Seconds from now until the sidecar has taken all that was told, and ranks by it."""
    ended = time.monotonic()
    wait_until(engine.has_told, _CAUGHT_UP_WITHIN_S, 0.05)
    told = engine.batches

    def is_caught_up() -> bool:
        taken = sidecar.status()["counters"]["ingest"].get("messages", 0)
        heard = taken >= told or engine.client.dropped > 0  # a hole has a number, and no message
        return heard and engine.is_followed()

    caught_up = wait_until(is_caught_up, _CAUGHT_UP_WITHIN_S, 0.05)
    return time.monotonic() - ended if caught_up else None


def run(figures: Figures, size: Size, say: Say) -> None:
    say("ten times the load for 30 s")
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        waits, took, dropped = burst(Path(folder), 30.0)
    figures.add("burst_publish_p99_ms", float(np.percentile(waits, 99)) * 1e3, "ms", "< 1")
    figures.add("burst_emits_per_s", len(waits) / 30.0, "/s", f"≈ {EMITS_A_SECOND:,}")
    figures.add("burst_dropped_events", dropped, "", "what does not fit is dropped and made good")
    figures.add("burst_caught_up_s", took if took is not None else _CAUGHT_UP_WITHIN_S, "s", "< 60")
