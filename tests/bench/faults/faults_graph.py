"""What a graph survives: events of any bytes, hours of churn, and damaged snapshots."""

from __future__ import annotations

import copy
import multiprocessing
import multiprocessing.connection
import random
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import psutil
from kvgraph.advisor.page.status import log_totals
from kvgraph.advisor.shadows.runner import ShadowRunner
from kvgraph.dashboards.metrics import SidecarCollector
from kvgraph.dashboards.source import EngineStatus, LogTotals, SidecarStatus
from kvgraph.graph import snapshot
from kvgraph.graph.errors import GraphError, SnapshotError, WireError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.wire import frames
from kvgraph.graph.wire.events import (
    AdviceApplied,
    AnyEvent,
    BlocksAttended,
    BlocksCleared,
    BlocksEmbedded,
    BlocksLoaded,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    ConfidenceSampled,
    CopiesDropped,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from ..figures import Figures
from .faults import Say, Size

BATCH: Final = 8
CHECK_EVERY: Final = 20_000  # mutants
_LIMITS: Final = GraphLimits(max_ghosts=2000, max_sessions=200, max_names=100, max_pairs=500)
_KEYS: Final = 400
_NASTY: Final[Sequence[Any]] = (
    0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1e308, -1e308,
    5e-324, float("nan"), float("inf"), -float("inf"), "", "a\0b", "\u202e", "x" * 256, "x" * 257,
    b"", b"\xff" * 8, b"\0" * 7, b"\1" * 16, None, True, False, [], [[]], {}, [1, 2], 9, 10,
)  # fmt: skip


class Mutants:
    """An endless source of events, each a valid one of which something was changed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def batch(self) -> bytes:
        return msgspec.msgpack.encode([[self._mutant() for _ in range(BATCH)]])

    def _mutant(self) -> Any:
        whole = msgspec.to_builtins(self._event(), builtin_types=(bytes,))
        for _ in range(self._rng.choice((0, 1, 1, 1, 2, 3))):
            self._change(whole)
        return whole

    def _change(self, fields: list[Any]) -> None:
        rng = self._rng
        if not fields:
            return
        place = rng.randrange(len(fields))
        value = fields[place]
        if isinstance(value, list) and value and rng.random() < 0.7:
            inner = rng.choice(value)
            if isinstance(inner, list):
                self._change(inner)
            return
        how = rng.random()
        if how < 0.5:
            fields[place] = copy.copy(rng.choice(_NASTY))
        elif how < 0.7 and isinstance(value, bytes):
            fields[place] = self._bytes(value)
        elif how < 0.8:
            del fields[place]
        elif how < 0.9:
            fields.insert(place, copy.copy(rng.choice(_NASTY)))
        elif isinstance(value, int):
            changed = value + rng.choice((-1, 1, 16, 2**16, 2**31))
            fields[place] = min(max(changed, -(2**63)), 2**64 - 1)  # what MessagePack can say

    def _bytes(self, value: bytes) -> bytes:
        rng = self._rng
        if rng.random() < 0.3:
            return value + rng.randbytes(rng.randrange(1, 9))
        changed = bytearray(value or b"\0")
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        return bytes(changed)

    def _keys(self) -> bytes:
        start = self._rng.randrange(_KEYS)
        count = self._rng.randrange(9)
        return b"".join((1 + (start + i) % _KEYS).to_bytes(8, "little") for i in range(count))

    def _event(self) -> AnyEvent:
        rng, keys = self._rng, self._keys()
        count = len(keys) // 8
        session, tenant = f"s{rng.randrange(300)}", f"t{rng.randrange(150)}"
        request = f"r{rng.randrange(50)}"
        segments = tuple(
            Segment(rng.randrange(10), 0, 16 * rng.randrange(9), rng.random(), session, tenant)
            for _ in range(rng.randrange(4))
        )
        makers: tuple[AnyEvent, ...] = (
            BlocksStored(keys, rng.choice((None, rng.randrange(1, _KEYS))), 16, session),
            BlocksStored(keys, None, 16),
            BlocksRemoved(keys),
            BlocksResident(keys),
            BlocksCleared(),
            RequestStarted(request, keys, 16 * count, 16, 16, session, tenant, segments),
            RequestFinished(request, keys, 16, 16 * count, "stop", session, tenant, True, 3.0),
            SessionSignal(session, tenant, False, 2.0, rng.random() < 0.3),
            BlocksAttended(keys, rng.randbytes(4 * count)),
            ConfidenceSampled(keys, rng.random()),
            BlocksEmbedded(keys, 4, rng.randbytes(8 * count)),
            BlocksSpilled(keys, rng.choice((2, 4)), 1000),
            BlocksLoaded(keys),
            CopiesDropped(keys, rng.choice((2, 4))),
            Pressure(100, 50, 50, 1, 1),
            AdviceApplied(1, 2**40, 3, 4, 5, 6),
            EngineHello(f"e{rng.randrange(3)}", "m", 16, 100, "v"),
        )
        return rng.choice(makers)


def apply_mutants(seed: int, count: int) -> dict[str, int]:
    """Apply ``count`` mutants; returns what became of them. AssertionError: an invariant broke."""
    rng = random.Random(seed)
    mutants, now = Mutants(rng), [0.0]
    graph = KVCacheGraph(limits=_LIMITS, clock=lambda: now[0])
    done = {"mutants": 0, "applied": 0, "refused_batches": 0, "unknown": 0, "crashes": 0}
    while done["mutants"] < count:
        now[0] += rng.choice((0.0, 0.001, 1.0, 1e6 * (rng.random() < 0.001)))
        _apply_batch(graph, mutants.batch(), f"engine-{rng.randrange(3)}", done)
        done["mutants"] += BATCH
        if done["mutants"] % CHECK_EVERY == 0:
            _check(graph)
    _check(graph)
    return done


def _apply_batch(graph: KVCacheGraph, payload: bytes, engine: str, done: dict[str, int]) -> None:
    try:
        message = frames.decode_events([frames.HEADER, bytes(8), payload])
        graph.apply(engine, message.events)
    except (WireError, GraphError):
        done["refused_batches"] += 1
        return
    except Exception:
        done["crashes"] += 1
        raise
    done["applied"] += len(message.events)
    done["unknown"] += message.unknown


def _check(graph: KVCacheGraph) -> None:
    graph.check_integrity()
    tables = graph.tables
    assert len(tables.sessions) <= _LIMITS.max_sessions, "more sessions than allowed"
    assert len(tables.tenants) <= _LIMITS.max_names, "more tenants than allowed"
    for engine in graph.engines:
        ranking = graph.rank(engine, 100)
        assert len(ranking.order) <= 100, "a ranking is longer than asked for"


def run_mutants(figures: Figures, size: Size, say: Say) -> None:
    say("a million typed mutants")
    done = apply_mutants(size.seed, 1_000_000)
    figures.add("mutants_applied", done["applied"], "events")
    figures.add("mutants_crashes", done["crashes"], "", "0")


RESIDENT: Final = 500_000
GHOSTS: Final = 500_000  # with the resident ones a million blocks
SESSIONS: Final = 100_000  # that are known
COMING: Final = 5_000_000  # in all
BLOCKS_A_SESSION: Final = 10
AT_ONCE: Final = 1_000  # sessions
TENANTS: Final = 70_000  # more than have a name of their own
RSS_CAP: Final = 600 << 20
"""Bytes: a million blocks and three million edges at the README's sizes are 290 MB; as much again
for what a ranking and a growing table need for a moment. Chosen before it was measured."""


class _Source:
    """What ``/metrics`` reads, of a graph alone."""

    def __init__(self, graph: KVCacheGraph) -> None:
        self._graph = graph

    def status(self) -> SidecarStatus:
        stats = self._graph.stats()
        engine = EngineStatus(
            id="e", name="e", model="m", version="v", kind="hook", state="synced", silent_s=0.0,
            gaps=0, resyncs=0, ranking_epoch=1, ranking_age_s=0.1, ranked=1, ranked_protected=0,
            graph=stats.engines["e"], tiers=None,
        )  # fmt: skip
        return SidecarStatus(
            version="0", pid=1, uptime_s=1.0, endpoint="", http="", engines=(engine,),
            graph=stats, counters={"graph": stats.counters}, snapshot={}, config={},
        )  # fmt: skip

    def totals(self) -> LogTotals:
        return log_totals(self._graph.tables, ShadowRunner(self._graph, self._graph.clock))


def churn(sessions: int) -> tuple[int, int, int, int]:
    """Peak RSS in bytes, metric series, blocks and sessions known, after so many sessions."""
    now = [0.0]
    limits = GraphLimits(max_ghosts=GHOSTS, max_sessions=SESSIONS)
    graph, peak, process = KVCacheGraph(limits=limits, clock=lambda: now[0]), 0, psutil.Process()
    for first in range(0, sessions, AT_ONCE):
        now[0] += 5.0
        graph.apply("e", _turns(range(first, min(first + AT_ONCE, sessions))))
        if first % 20_000 == 0:
            graph.rank("e", 8192)
            peak = max(peak, process.memory_info().rss)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(_Source(graph)))  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    series = sum(not line.startswith("#") for line in text.splitlines())
    graph.check_integrity()
    return peak, series, len(graph.tables.blocks), len(graph.tables.sessions)


def _turns(numbers: range) -> list[AnyEvent]:
    """One turn each of new sessions that run at once; as many blocks of old ones leave."""
    asked: list[AnyEvent] = []
    stored: list[AnyEvent] = []
    ended: list[AnyEvent] = []
    tokens = 16 * BLOCKS_A_SESSION
    for number in numbers:
        keys = _keys_from(1 + number * BLOCKS_A_SESSION, BLOCKS_A_SESSION)
        name, tenant = f"session-{number}", f"tenant-{number % TENANTS}"
        asked.append(RequestStarted(name, keys, tokens, 0, 16, name, tenant))
        stored.append(BlocksStored(keys, None, 16))
        ended.append(RequestFinished(name, keys, tokens, tokens, "stop", name, tenant))
    left = 1 + numbers.start * BLOCKS_A_SESSION - RESIDENT
    if left > 0:
        stored.append(BlocksRemoved(_keys_from(left, len(numbers) * BLOCKS_A_SESSION)))
    return [*asked, *stored, *ended]


def _keys_from(first: int, count: int) -> bytes:
    return np.arange(first, first + count, dtype="<u8").tobytes()


def _in_a_process(sessions: int, answer: multiprocessing.connection.Connection) -> None:
    answer.send(churn(sessions))


def run_churn(figures: Figures, size: Size, say: Say) -> None:
    say(f"{COMING:,} sessions, {COMING * BLOCKS_A_SESSION:,} blocks")
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_in_a_process, args=(COMING, theirs), daemon=True)
    process.start()
    theirs.close()
    peak, series, blocks, known = mine.recv()
    process.join()
    figures.add("churn_sessions", COMING, "", "5,000,000")
    figures.add("churn_rss_mb", peak / 1e6, "MB", f"≤ {RSS_CAP / 1e6:.0f}")
    figures.add("churn_metric_series", series, "", "≤ 2,000")
    figures.add("churn_blocks_known", blocks, "", "≤ 1,125,000")
    figures.add("churn_sessions_known", known, "", f"≤ {SESSIONS:,}")


BLOCKS: Final = 20_000
_CUT_EVERY: Final = 4096
_STEP: Final = 100  # blocks between two snapshots


def grown(graph: KVCacheGraph, generation: int) -> None:
    """Let the graph grow by what every generation has: so a whole one can be told."""
    first = 1 + BLOCKS + generation * _STEP
    keys = np.arange(first, first + _STEP, dtype="<u8").tobytes()
    graph.apply(
        "e",
        [
            BlocksStored(keys, None, 16),
            RequestStarted(f"r{generation}", keys, 16 * _STEP, 0, 16, f"s{generation}", "t"),
        ],
    )


def base() -> KVCacheGraph:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    graph.apply("e", [BlocksStored(np.arange(1, 1 + BLOCKS, dtype="<u8").tobytes(), None, 16)])
    return graph


def is_whole(graph: KVCacheGraph) -> bool:
    """Whether it is what some generation was, invariants and all."""
    graph.check_integrity()
    blocks, sessions = len(graph.tables.blocks), len(graph.tables.sessions)
    generation, rest = divmod(blocks - BLOCKS, _STEP)
    return rest == 0 and generation == sessions


def _write_forever(path: Path, begun: Event) -> None:
    graph = base()
    for generation in range(1_000_000):
        grown(graph, generation)
        snapshot.save(graph, path)
        begun.set()


def bad_loads_of_kills(directory: Path, kills: int, seed: int, say: Say) -> tuple[int, float]:
    """How often a load after SIGKILL of the writer was not whole; the longest load in seconds."""
    rng, bad, longest = random.Random(seed), 0, 0.0
    path, context = directory / "graph.snap", multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, not by each writer
    for number in range(kills):
        say(f"kill {number + 1} of {kills}")
        begun = context.Event()
        writer = context.Process(target=_write_forever, args=(path, begun), daemon=True)
        writer.start()
        begun.wait(60)
        time.sleep(rng.random() * 0.2)
        writer.kill()
        writer.join()
        took, whole = _load(path)
        bad, longest = bad + (not whole), max(longest, took)
    return bad, longest


def _load(path: Path) -> tuple[float, bool]:
    started, graph = time.monotonic(), KVCacheGraph(clock=lambda: 2000.0)
    try:
        snapshot.load(graph, path)
        return time.monotonic() - started, is_whole(graph)
    except (SnapshotError, AssertionError):
        return time.monotonic() - started, False  # the last good one stays: it must load


def bad_loads_of_damage(directory: Path, flips: int, seed: int) -> int:
    """How many of a cut at each 4 KiB and of flipped bits were loaded all the same."""
    rng, path = random.Random(seed), directory / "damaged.snap"
    graph = base()
    grown(graph, 0)
    snapshot.save(graph, path)
    whole = path.read_bytes()
    bad = sum(_loads(path, whole[:cut]) for cut in range(0, len(whole), _CUT_EVERY))
    for _ in range(flips):
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        bad += _loads(path, bytes(flipped))
    return bad


def _loads(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    graph = KVCacheGraph()
    try:
        snapshot.load(graph, path)
    except SnapshotError:
        return len(graph.tables.blocks) > 0
    return True


def run_snapshots(figures: Figures, size: Size, say: Say) -> None:
    killed, longest = bad_loads_of_kills(size.folder, 200, size.seed, say)
    say("cuts and flips")
    damaged = bad_loads_of_damage(size.folder, 1000, size.seed)
    figures.add("snapshot_bad_loads", killed + damaged, "", "0")
    figures.add("snapshot_load_s", longest, "s", "< 5")
