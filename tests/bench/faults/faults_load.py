"""Block events as fast as a large engine makes them, some batches lost: each loss is noticed.

Lag is from a batch's sending to the moment that the sidecar has counted it, read from ``/status``
(a quarter of a second of which is the status's own age). Then ten times the usual load, through the
client that an engine has: what an engine pays for it.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import zmq
from kvgraph.graph.errors import WireError
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.advice import ResyncRequest
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksResident,
    BlocksStored,
    EngineHello,
    Pressure,
)
from kvgraph.hooks.link.client import AdvisorClient

from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .faults import Say, Size

BATCHES_A_SECOND: Final = 1000
BLOCKS_A_BATCH: Final = 50  # stored, and as many removed: 100 block events
POOL: Final = 200_000
SHARES: Final = (0.001, 0.01, 0.1)
_SHORT_S: Final = 90
_FULL_S: Final = 600
_WARM_UP_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0


class ChurningEngine:
    """An engine with a full pool: as many blocks leave as enter; a ``share`` is lost on the way."""

    def __init__(self, endpoint: str, share: float, rng: random.Random) -> None:
        self._share, self._rng = share, rng
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._seq = 0
        self._first = 1  # keys from here …
        self._next = 1 + POOL  # … to here are cached
        self._lost_before = False
        self.holes = 0  # runs of lost batches, each of which one gap has to show
        self.lost = 0
        self.sent = 0
        self.batches = 0
        self.resyncs = 0

    @property
    def cached(self) -> int:
        return self._next - self._first

    def greet(self) -> None:
        keys = np.arange(self._first, self._next, dtype="<u8").tobytes()
        hello = EngineHello("churn", "synthetic", 16, POOL, "bench")
        self._send([hello, BlocksResident(keys)])

    def churn(self) -> None:
        self.batches += 1
        stored = np.arange(self._next, self._next + BLOCKS_A_BATCH, dtype="<u8").tobytes()
        removed = np.arange(self._first, self._first + BLOCKS_A_BATCH, dtype="<u8").tobytes()
        self._first += BLOCKS_A_BATCH
        self._next += BLOCKS_A_BATCH
        if self._rng.random() < self._share:
            self._seq += 1
            self.lost += 1
            self.holes += not self._lost_before
            self._lost_before = True
            return
        self._send([BlocksStored(stored, None, 16), BlocksRemoved(removed)])

    def pulse(self) -> None:
        """A sign of life; it also shows a loss just before it."""
        self._send([Pressure(POOL, 0, POOL, 1, 0)])

    def listen(self) -> None:
        asked = False
        while self._socket.poll(0):
            try:
                _, advice = frames.decode_advice(self._socket.recv_multipart(), 0.0)
            except WireError:
                continue
            asked |= isinstance(advice, ResyncRequest)
        if asked:
            self.resyncs += 1
            self.greet()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _send(self, events: list[AnyEvent]) -> None:
        self._socket.send_multipart(frames.encode_events(self._seq, events))
        self._seq += 1
        self.sent += 1
        self._lost_before = False


@dataclass
class Observed:
    lags: list[float] = field(default_factory=list)  # seconds
    rss: list[tuple[float, int]] = field(default_factory=list)  # when, bytes

    @property
    def slope(self) -> float:
        """Bytes a second that its memory grew by, after the warm-up."""
        settled = [(at, size) for at, size in self.rss if at >= _WARM_UP_S] or self.rss
        if len(settled) < 2:
            return 0.0
        at, sizes = np.array(settled, dtype=np.float64).T
        return float(np.polyfit(at, sizes, 1)[0])


@dataclass(frozen=True)
class Loss:
    """How one run ended."""

    share: float
    events_per_s: float
    holes: int
    # gaps in an engine's sequence numbers, plus batches received before its hello (an engine that
    # was silent on a busy machine is forgotten, and must list its blocks again). The second may be
    # more than the losses meanwhile, and then hides others
    noticed: int
    forgotten: int  # how often that happened; 0: ``noticed`` is gaps alone
    in_step: bool
    observed: Observed


def lose(directory: Path, share: float, seconds: float, seed: int) -> Loss:
    """Churn for so long with this share of batches lost, and compare at the end."""
    with SidecarProcess(directory) as sidecar:
        engine = ChurningEngine(sidecar.endpoint, share, random.Random(seed))
        try:
            engine.greet()
            observed = _churn(engine, sidecar, seconds)
            through = engine.sent + 1  # the first pulse shows a loss just before it
            in_step = wait_until(lambda: _agrees(engine, sidecar, through), 30.0, 0.3)
            counted = sidecar.status()["counters"]["ingest"]
            rate = engine.batches * 2 * BLOCKS_A_BATCH / seconds
            noticed = counted.get("gaps", 0) + counted.get("batches_before_hello", 0)
            forgotten = counted.get("engines_lost", 0)
            return Loss(share, rate, engine.holes, noticed, forgotten, in_step, observed)
        finally:
            engine.close()


def _churn(engine: ChurningEngine, sidecar: SidecarProcess, seconds: float) -> Observed:
    observed, sent = Observed(), deque([(time.monotonic(), 0)])
    start = time.monotonic()
    done, look = 0, start + _LOOK_EVERY_S
    while (now := time.monotonic()) < start + seconds:
        due = int((now - start) * BATCHES_A_SECOND)
        for _ in range(min(due - done, 100)):
            engine.churn()
            done += 1
        engine.listen()
        sent.append((now, engine.sent))
        if now >= look:
            look += _LOOK_EVERY_S
            _look(sidecar, sent, observed, now - start)
        time.sleep(0.002)
    return observed


def _look(
    sidecar: SidecarProcess, sent: deque[tuple[float, int]], observed: Observed, at: float
) -> None:
    asked = time.monotonic()
    received = sidecar.status()["counters"]["ingest"].get("messages", 0)
    while len(sent) > 1 and sent[1][1] <= received:
        sent.popleft()
    behind = asked - sent[0][0] if received < sent[-1][1] else 0.0
    observed.lags.append(max(behind, 0.0))
    observed.rss.append((at, sidecar.rss()))


def _agrees(engine: ChurningEngine, sidecar: SidecarProcess, through: int) -> bool:
    """Whether the sidecar has taken in ``through`` messages, and knows what the pool holds."""
    engine.listen()
    engine.pulse()
    status = sidecar.status()
    engines, received = status["engines"], status["counters"]["ingest"].get("messages", 0)
    return (
        bool(engines)
        and received >= through
        and (engines[0]["state"] == "synced" and engines[0]["graph"]["resident"] == engine.cached)
    )


def run_load(figures: Figures, size: Size, say: Say) -> None:
    """Nothing is lost: how far behind the sidecar is, and how its memory grows."""
    seconds = size.of(_SHORT_S, _FULL_S)
    say(f"{BATCHES_A_SECOND * 2 * BLOCKS_A_BATCH:,} block events a second, {seconds} s")
    (loss,) = _losses((0.0,), seconds, size.seed)
    figures.add("load_seconds", seconds, "s", f"{_FULL_S} in a full run")
    figures.add("load_events_per_s", loss.events_per_s, "/s", "≈ 100,000")
    figures.add("load_gaps", loss.noticed, "", "0")
    figures.add("ingest_lag_p99_s", _p99(loss.observed.lags), "s", "< 1")
    figures.add("rss_slope_mb_per_min", loss.observed.slope * 60 / 1e6, "MB/min", "< 1")


def run_losses(figures: Figures, size: Size, say: Say) -> None:
    seconds = size.of(_SHORT_S, _FULL_S)
    say(f"{', '.join(f'{share:.1%}' for share in SHARES)} of batches lost, {seconds} s each")
    losses = _losses(SHARES, seconds, size.seed)
    figures.add("losses_seconds_each", seconds, "s", f"{_FULL_S} in a full run")
    figures.add("losses_injected", sum(loss.holes for loss in losses), "gaps")
    undetected = sum(max(0, loss.holes - loss.noticed) for loss in losses)
    figures.add("undetected_losses", undetected, "", "0")
    figures.add("losses_engine_forgotten", sum(loss.forgotten for loss in losses), "times")
    figures.add("losses_out_of_step", sum(not loss.in_step for loss in losses), "runs", "0")
    lags = [lag for loss in losses for lag in loss.observed.lags]
    figures.add("losses_ingest_lag_p99_s", _p99(lags), "s", "< 1")
    slope = max(loss.observed.slope for loss in losses)
    figures.add("losses_rss_slope_mb_per_min", slope * 60 / 1e6, "MB/min", "< 1")


def _losses(shares: tuple[float, ...], seconds: float, seed: int) -> list[Loss]:
    losses = []
    for share in shares:
        with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
            losses.append(lose(Path(folder), share, seconds, seed))
    return losses


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


EMITS_A_SECOND: Final = 10_000  # of 100 block events each: 1,000,000 a second
BLOCKS: Final = 100
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


def run_burst(figures: Figures, size: Size, say: Say) -> None:
    say("ten times the load for 30 s")
    waits, took, dropped = burst(size.folder, 30.0)
    figures.add("burst_publish_p99_ms", float(np.percentile(waits, 99)) * 1e3, "ms", "< 1")
    figures.add("burst_emits_per_s", len(waits) / 30.0, "/s", f"≈ {EMITS_A_SECOND:,}")
    figures.add("burst_dropped_events", dropped, "", "what does not fit is dropped and made good")
    figures.add("burst_caught_up_s", took if took is not None else _CAUGHT_UP_WITHIN_S, "s", "< 60")
