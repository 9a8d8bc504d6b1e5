"""A real sidecar process under load, and at rest, measured from outside."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import zmq
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.events import AnyEvent, BlocksResident, BlocksStored, EngineHello, Pressure

from ..sidecars.sidecar_process import SidecarProcess
from .graphs import BLOCK_SIZE, CHAIN_BLOCKS, chain_events, random_keys

_BLOCKS_AN_EVENT, _EVENTS_A_BATCH = 16, 64
_PULSE_S = 0.4
_HELLO = EngineHello("bench", "synthetic", BLOCK_SIZE, 1 << 20, "bench")
_PULSE = Pressure(1 << 20, 1 << 19, 20_000, 0, 0)


@dataclass
class LoadedSidecar:
    """A running sidecar and the one engine connected to it."""

    running: SidecarProcess
    socket: zmq.Socket[bytes]
    seq: int = 0

    def send(self, events: list[AnyEvent]) -> None:
        """Send one batch; blocks while the sidecar's queue is full (a bench may, an engine not)."""
        self.socket.send_multipart(frames.encode_events(self.seq, events))
        self.seq += 1

    def send_encoded(self, payload: bytes) -> None:
        """Send a batch that was encoded beforehand."""
        self.socket.send_multipart([frames.HEADER, self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    def stored(self) -> int:
        """Blocks that the sidecar has applied."""
        return int(self.running.status()["graph"]["counters"].get("blocks_stored", 0))

    def wait_for(self, stored: int) -> None:
        """Until the sidecar has applied so many blocks."""
        deadline = time.monotonic() + 120
        while self.stored() < stored:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the sidecar did not apply {stored} blocks in two minutes")
            time.sleep(0.1)  # asking costs the sidecar time too


@contextlib.contextmanager
def loaded_sidecar(cores: list[int] | None = None) -> Iterator[LoadedSidecar]:
    """Start a sidecar (on these cores only), connect an engine, end both."""
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder), policy__guard="true") as running,
        zmq.Context() as context,
    ):
        if cores is not None:
            _pin(running.process, cores)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        try:
            socket.connect(running.endpoint)
            sidecar = LoadedSidecar(running, socket)
            sidecar.send([_HELLO, BlocksResident(b"")])
            yield sidecar
        finally:
            socket.close()


def ingest_rates(rounds: int = 5, blocks: int = 600_000) -> list[float]:
    """Blocks a second through ZeroMQ into a sidecar that has one core, once a round.

    Events store 16 blocks each, 64 events a batch; planning and HTTP go on meanwhile.
    """
    rng = np.random.default_rng(2)
    rates = []
    for _ in range(rounds):
        payloads = _encoded_batches(random_keys(rng, blocks))
        with loaded_sidecar(cores=[0]) as sidecar:
            started = time.perf_counter()
            for payload in payloads:
                sidecar.send_encoded(payload)
            sidecar.wait_for(blocks)
            rates.append(blocks / (time.perf_counter() - started))
    return rates


def idle_cpu_percent(rounds: int = 3, seconds: float = 10.0) -> list[float]:
    """Percent of a core that a sidecar uses while an idle engine of 20,000 blocks is connected."""
    with loaded_sidecar() as sidecar:
        keys = random_keys(np.random.default_rng(3), 20_000)
        sidecar.send(list(chain_events(keys)))
        sidecar.wait_for(len(keys))
        _idle(sidecar, 2.0)
        return [_cpu_share(sidecar, seconds) for _ in range(rounds)]


def _cpu_share(sidecar: LoadedSidecar, seconds: float) -> float:
    before, started = _cpu_seconds(sidecar), time.perf_counter()
    _idle(sidecar, seconds)
    return 100 * (_cpu_seconds(sidecar) - before) / (time.perf_counter() - started)


def _idle(sidecar: LoadedSidecar, seconds: float) -> None:
    """Be an engine that has nothing to say but that it lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sidecar.send([_PULSE])
        time.sleep(_PULSE_S)


def _cpu_seconds(sidecar: LoadedSidecar) -> float:
    times = sidecar.running.process.cpu_times()
    return float(times.user + times.system)


def _encoded_batches(keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[bytes]:
    size = _BLOCKS_AN_EVENT * _EVENTS_A_BATCH
    return [
        frames.encode_events(0, _stores(keys[start : start + size]))[2]
        for start in range(0, len(keys), size)
    ]


def _stores(keys: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[AnyEvent]:
    """Chains of ``CHAIN_BLOCKS``, sixteen blocks an event."""
    events: list[AnyEvent] = []
    for start in range(0, len(keys), _BLOCKS_AN_EVENT):
        parent = None if start % CHAIN_BLOCKS == 0 else int(keys[start - 1])
        packed = keys[start : start + _BLOCKS_AN_EVENT].astype("<u8").tobytes()
        events.append(BlocksStored(packed, parent, BLOCK_SIZE))
    return events


def _pin(process: psutil.Process, cores: list[int]) -> None:
    """All threads of a process, those of ZeroMQ too, onto these cores."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)
