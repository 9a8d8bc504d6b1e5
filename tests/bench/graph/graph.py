"""``kvgraph bench graph``: what ranking, ingest, memory and idling of the graph cost."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import zmq
from kvgraph.advisor.process.process import collect_seldom, tame_memory
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import Keys, Tier
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.advice import EvictionRanking, StillValid
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestStarted,
)
from rich.console import Console
from threadpoolctl import threadpool_limits

from ..figures import Figures
from ..sidecars.sidecar_process import SidecarProcess, wait_until
from .graphs import (
    BLOCK_SIZE,
    CHAIN_BLOCKS,
    ENGINE,
    add_random_edges,
    build_graph,
    chain_events,
    churned_graph,
    random_keys,
    ranking_seconds,
)

_LOCKED_BLOCKS, _SESSIONS, _COPIES, _LINKS = 1_000_000, 100_000, 260_000, 500_000
_SHORT = BLOCK_SIZE // 2  # tokens
_BATCH = 8_192  # blocks that an engine stores and evicts between two batches
_LATER_S = 100.0  # after which links fade
_CHURN = 80  # of those batches: until ghosts were released, and tables grew and were rebuilt


def add_sessions(graph: KVCacheGraph, count: int) -> None:
    """Sessions that had one turn each, too short for a block."""
    turns: list[AnyEvent] = []
    for number in range(count):
        name = f"short-{number}"
        turns.append(RequestStarted(name, b"", _SHORT, 0, BLOCK_SIZE, name))
        turns.append(RequestFinished(name, b"", _SHORT, _SHORT, "stop", name))
    graph.apply(ENGINE, turns)


def lock_seconds() -> dict[str, float]:
    """The longest that each of these holds the lock, in a graph of production size."""
    rng = np.random.default_rng(4)
    graph = build_graph(_LOCKED_BLOCKS, 0)
    add_random_edges(graph, _LINKS, rng)
    add_sessions(graph, _SESSIONS)
    packed = graph.tables.blocks.keys[: graph.tables.blocks.size].astype("<u8").tobytes()
    hello = EngineHello(ENGINE, "synthetic", BLOCK_SIZE, _LOCKED_BLOCKS, "bench")
    copies = BlocksSpilled(packed[: 8 * _COPIES], int(Tier.WARM), 1)
    found = {
        "copies": _longest(graph, [copies]),
        "a resync": _longest(graph, [hello, BlocksResident(packed), copies]),
        "batches under pressure": max(
            _longest(graph, batch) for batch in _pressure(rng, packed, _CHURN)
        ),
    }
    graph.clock = lambda: time.monotonic() + _LATER_S
    found["links fading"] = _longest(graph, [Pressure(_LOCKED_BLOCKS, 0, _LOCKED_BLOCKS, 0, 0)])
    first = random_keys(rng, _LOCKED_BLOCKS // 2).astype("<u8").tobytes()
    found["another's first list"] = _longest(graph, [BlocksResident(first)], "another")
    found["an engine gone"] = _longest_slice(graph.forgetting(ENGINE))
    found["its ghosts released"] = max(
        _longest(graph, [BlocksStored(random_keys(rng, _BATCH).tobytes(), None, BLOCK_SIZE)])
        for _ in range(_CHURN // 2)
    )
    return found


def _pressure(rng: np.random.Generator, packed: bytes, count: int) -> Iterator[list[AnyEvent]]:
    size = 8 * _BATCH
    for start in range(0, count * size, size):
        fresh = random_keys(rng, _BATCH).astype("<u8").tobytes()
        yield [BlocksStored(fresh, None, BLOCK_SIZE), BlocksRemoved(packed[start : start + size])]


def _longest(graph: KVCacheGraph, events: list[AnyEvent], engine: str = ENGINE) -> float:
    return _longest_slice(graph.slices(engine, events))


def _longest_slice(slices: Iterator[None]) -> float:
    longest, more = 0.0, True
    while more:
        started = time.perf_counter()
        more = next(slices, False) is not False
        longest = max(longest, time.perf_counter() - started)
    return longest


_BLOCKS_AN_EVENT, _EVENTS_A_BATCH = 16, 64
_PULSE_S = 0.4
_HELLO = EngineHello("bench", "synthetic", BLOCK_SIZE, 1 << 22, "bench")
_PULSE = Pressure(1 << 22, 1 << 19, 20_000, 0, 0)  # it has no tiers


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
        self.socket.send_multipart([frames.HEADER, self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    def stored(self) -> int:
        return int(self.running.status()["graph"]["counters"].get("blocks_stored", 0))

    def heard(self) -> int:
        """How many batches were applied before the next advice; cheaper than to ask ``/status``."""
        while True:
            _, advice = frames.decode_advice(self.socket.recv_multipart(), 0.0)
            if isinstance(advice, EvictionRanking | StillValid):
                return advice.heard

    def wait_for(self, stored: int) -> None:
        if not wait_until(lambda: self.stored() >= stored, 120, 0.1):  # asking costs it time too
            raise RuntimeError(f"the sidecar did not apply {stored} blocks in two minutes")


@contextlib.contextmanager
def loaded_sidecar(cores: list[int] | None = None) -> Iterator[LoadedSidecar]:
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
            sidecar.send([_HELLO, BlocksResident(b""), _PULSE])
            yield sidecar
        finally:
            socket.close()


def ingest_rates(rounds: int = 5, blocks: int = 3_000_000) -> list[float]:
    """Blocks a second, by round, through ZeroMQ into a sidecar with one core, which plans."""
    rng = np.random.default_rng(2)
    rates = []
    for _ in range(rounds):
        payloads = _encoded_batches(random_keys(rng, blocks))
        with loaded_sidecar(cores=[0]) as sidecar:
            started, rate = time.perf_counter(), 0.0
            for payload in payloads:
                sidecar.send_encoded(payload)
            # Advice comes every half second or so: the last one before the end tells exactly.
            while (heard := sidecar.heard() - 1) < len(payloads):
                applied = heard * _BLOCKS_AN_EVENT * _EVENTS_A_BATCH
                rate = applied / (time.perf_counter() - started)
            rates.append(rate)
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
    before, started = sidecar.running.cpu_s(), time.perf_counter()
    _idle(sidecar, seconds)
    return 100 * (sidecar.running.cpu_s() - before) / (time.perf_counter() - started)


def _idle(sidecar: LoadedSidecar, seconds: float) -> None:
    """Be an engine that has nothing to say but that it lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sidecar.send([_PULSE])
        time.sleep(_PULSE_S)


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


_POOL = 131_072
_PROMPT = 512  # blocks: a turn of a coding agent, of which half is new
_NEW = _PROMPT // 2
_REQUESTS_A_STEP = 4
_STEPS_A_BATCH = 8


def steady_rates(rounds: int = 5, blocks: int = 400_000) -> list[float]:
    """Blocks per second that a graph with a full pool applies, once a round.

    Each step of the engine four requests start, each the next turn of a session, four end, 1,024
    blocks are stored and as many evicted, the longest unused; eight steps are one batch.
    """
    traffic = Traffic()
    graph = KVCacheGraph()
    graph.apply(ENGINE, [EngineHello(ENGINE, "", BLOCK_SIZE, _POOL, "bench")])
    for batch in traffic.batches(2 * _POOL):  # until the pool is full, and ghosts are many
        graph.apply(ENGINE, batch)
    return [_rate(graph, list(traffic.batches(blocks))) for _ in range(rounds)]


def _rate(graph: KVCacheGraph, batches: list[list[AnyEvent]]) -> float:
    before, started = graph.counters["blocks_stored"], time.perf_counter()
    for batch in batches:
        graph.apply(ENGINE, batch)
    elapsed = time.perf_counter() - started
    return (graph.counters["blocks_stored"] - before) / elapsed


class Traffic:
    """Sessions that take turns: each second turn extends the one before it."""

    def __init__(self, pool: int = _POOL) -> None:
        self._pool = pool
        self._rng = np.random.default_rng(6)
        self._held: list[Keys] = []  # what the pool holds, the longest unused first
        self._held_blocks = 0
        self._requests = 0

    def batches(self, blocks: int) -> Iterator[list[AnyEvent]]:
        for _ in range(blocks // (_NEW * _REQUESTS_A_STEP * _STEPS_A_BATCH)):
            batch: list[AnyEvent] = []
            for _ in range(_STEPS_A_BATCH):
                batch += self._step()
            yield batch

    def _step(self) -> list[AnyEvent]:
        turns = [self._turn() for _ in range(_REQUESTS_A_STEP)]
        started, stored, finished = zip(*turns, strict=True)
        return [*started, *self._evicted(), *stored, *finished]

    def _turn(self) -> tuple[RequestStarted, BlocksStored, RequestFinished]:
        keys = random_keys(self._rng, _NEW)
        number, self._requests = self._requests, self._requests + 1
        old = self._held[-1] if number % 2 and self._held else keys[:0]
        self._held.append(keys)
        self._held_blocks += _NEW
        chain = np.concatenate([old, keys]).astype("<u8").tobytes()
        session, tokens = f"s{number // 2}", len(chain) // 8 * BLOCK_SIZE
        parent = int(old[-1]) if len(old) else None
        name = f"r{number}"
        return (
            RequestStarted(name, chain, tokens, len(old) * BLOCK_SIZE, BLOCK_SIZE, session),
            BlocksStored(keys.astype("<u8").tobytes(), parent, BLOCK_SIZE, session),
            RequestFinished(name, chain, tokens, tokens, "stop", session),
        )

    def _evicted(self) -> list[AnyEvent]:
        gone: list[Keys] = []
        while self._held_blocks > self._pool:
            gone.append(self._held.pop(0))
            self._held_blocks -= _NEW
        return [BlocksRemoved(np.concatenate(gone).astype("<u8").tobytes())] if gone else []


_ROUNDS = 50


def run(progress: bool) -> Figures:
    threadpool_limits(1, user_api="blas")  # as a sidecar does
    collect_seldom()  # likewise
    tame_memory()
    figures = Figures("graph")
    console = Console(stderr=True, quiet=not progress)
    with console.status("ranking 20,000 blocks, 60,000 edges") as status:
        _small(figures)
        status.update("ranking churned tables of 20,000, 200,000 and 2,000,000 blocks")
        ranking_s = _churned(figures)
        status.update("ranking 1,000,000 blocks, 3,000,000 edges")
        _large(figures)
        status.update("an engine under pressure")
        figures.add("steady_blocks_per_s", steady_rates(), "blocks/s", "≥ 3,000,000")
        status.update("1,000,000 blocks, 100,000 sessions, 260,000 copies")
        holds = {"a ranking": ranking_s, **lock_seconds()}
        held = {what: seconds * 1e3 for what, seconds in holds.items()}
        figures.add("longest_lock_ms", max(held.values()), "ms", "≤ 2")
        console.print(", ".join(f"{what} {ms:.3g} ms" for what, ms in held.items()))
        status.update("ingesting through ZeroMQ")
        figures.add("ingest_blocks_per_s", ingest_rates(), "blocks/s", "≥ 5,000,000")
        status.update("sidecar idling over 20,000 blocks")
        figures.add("idle_cpu_percent", idle_cpu_percent(), "%", "≤ 0.2")
    return figures


def _small(figures: Figures) -> None:
    graph = build_graph(20_000, 60_000)
    stats = graph.stats()
    figures.add("bytes_per_block", stats.bytes_per_block, "B", "≤ 110")
    figures.add("bytes_per_edge", stats.bytes_per_edge, "B", "≤ 64")

    add_sessions(graph, 100_000)
    rank = timed(lambda: graph.rank(ENGINE, 20_000), _ROUNDS)
    figures.add("rank_20k_100k_sessions_ms", [s * 1e3 for s in rank], "ms", "≤ 1.5")


def _churned(figures: Figures) -> float:
    """Rank tables that traffic has churned, by the default; returns the longest lock in seconds."""
    longest_s = 0.0
    for blocks, name, rounds, target in (
        (20_000, "rank_20k_ms", _ROUNDS, "≤ 0.5"),
        (200_000, "rank_200k_ms", 20, "≤ 4"),
        (2_000_000, "rank_2m_ms", 5, "≤ 30"),
    ):
        rank, hold_s = ranking_seconds(*churned_graph(blocks), rounds)
        figures.add(name, [seconds * 1e3 for seconds in rank], "ms", target)
        longest_s = max(longest_s, hold_s)
    return longest_s


def _large(figures: Figures) -> None:
    graph = build_graph(1_000_000, 3_000_000)
    rank = timed(lambda: graph.rank(ENGINE, 4096), 10)
    figures.add("rank_1m_top4096_ms", [seconds * 1e3 for seconds in rank], "ms", "≤ 40")


def timed(action: Callable[[], object], rounds: int) -> list[float]:
    """Seconds that each of ``rounds`` calls took, after one that is not counted."""
    action()
    samples = []
    for _ in range(rounds):
        started = time.perf_counter()
        action()
        samples.append(time.perf_counter() - started)
    return samples
