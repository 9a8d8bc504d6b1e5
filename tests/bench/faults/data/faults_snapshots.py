"""A snapshot whose writer is killed, whose file is cut, whose bits are flipped: what is loaded."""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import numpy as np
from kvgraph.graph import snapshot
from kvgraph.graph.errors import SnapshotError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.events import BlocksStored, RequestStarted

from ...figures import Figures
from ..faults import Say, Size

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


def run(figures: Figures, size: Size, say: Say) -> None:
    with tempfile.TemporaryDirectory(prefix="kvg-") as folder:
        killed, longest = bad_loads_of_kills(Path(folder), 200, size.seed, say)
        say("cuts and flips")
        damaged = bad_loads_of_damage(Path(folder), 1000, size.seed)
    figures.add("snapshot_bad_loads", killed + damaged, "", "0")
    figures.add("snapshot_load_s", longest, "s", "< 5")
