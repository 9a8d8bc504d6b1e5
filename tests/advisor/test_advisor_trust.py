"""What must hold when things go wrong, in the small: repeated batches, clocks, disks, tenants."""

from __future__ import annotations

import ast
import errno
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from kvgraph.advisor.process.snapshots import SnapshotKeeper
from kvgraph.advisor.sockets.publisher import AdvicePublisher
from kvgraph.advisor.sockets.subscriber import EventSubscriber
from kvgraph.graph import snapshot
from kvgraph.graph.errors import SnapshotError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire import frames as wire
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
    Segment,
)
from waiting import until
from wire_keys import pack

ROOT = Path(__file__).parents[2]


def batches(seed: int, count: int) -> Iterator[list[AnyEvent]]:
    """What an engine tells, batch by batch; the first is its greeting."""
    rng = random.Random(seed)
    yield [EngineHello("e", "m", 16, 1000, "v"), BlocksResident(pack(*range(1, 50)))]
    for number in range(count):
        first = rng.randrange(1, 300)
        keys = pack(*range(first, first + rng.randrange(1, 9)))
        session = f"s{rng.randrange(5)}"
        yield [
            RequestStarted(
                f"r{number}", keys, len(keys) * 2, 16, 16, session, "t",
                (Segment(rng.randrange(10), 0, 32, None, "f", "m"),),
            ),
            BlocksStored(keys, None, 16),
            *([BlocksRemoved(pack(rng.randrange(1, 300)))] if rng.random() < 0.5 else []),
            RequestFinished(f"r{number}", keys, len(keys) * 2, len(keys) * 2, "stop", session, "t"),
        ]  # fmt: skip


class Sidecar:
    """A subscriber on a real socket and the graph behind it, on a clock that stands."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        endpoint = f"inproc://trust-{os.urandom(4).hex()}"
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(endpoint)
        self.graph = KVCacheGraph(clock=lambda: 1000.0)
        publisher = AdvicePublisher(self.router, lambda: 1000.0)
        self.subscriber = EventSubscriber(
            self.router, publisher.request_resync, publisher.refuse, lambda: 1000.0,
            engine_timeout_s=1.8,
        )  # fmt: skip
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.IDENTITY, b"the same engine")
        self.dealer.connect(endpoint)

    def take(self, frames: list[bytes]) -> None:
        self.dealer.send_multipart(frames)
        assert self.router.poll(5000)
        for said in self.subscriber.receive(10):
            self.graph.apply(said.engine, said.events)

    def state(self) -> dict[str, bytes]:
        """Every column of every table, residency too, and every name."""
        tables = self.graph.tables
        columns = snapshot.columns_of(tables, 0.0) | {"engines": tables.blocks.tiers}
        return {name: column.tobytes() for name, column in columns.items()}

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.mark.parametrize("seed", range(5))
def test_repeated_late_and_overlapping_batches_leave_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    log = [wire.encode_events(seq, events) for seq, events in enumerate(batches(seed, 60))]
    plain, disturbed = Sidecar(), Sidecar()
    try:
        for place, frames in enumerate(log):
            plain.take(frames)
            disturbed.take(frames)
            for late in rng.sample(range(place + 1), min(place + 1, rng.randrange(4))):
                disturbed.take(log[late])
            if rng.random() < 0.1:  # a whole stretch once more
                for again in log[max(0, place - 5) : place + 1]:
                    disturbed.take(again)
        assert disturbed.subscriber.counters["duplicates"] > 10
        assert disturbed.state() == plain.state()
        disturbed.graph.check_integrity()
    finally:
        plain.close()
        disturbed.close()


def test_two_tenants_with_one_prompt_and_two_salts_share_nothing() -> None:
    """Two salts give two hashes of the same text: what follows from it in the graph."""
    graph = KVCacheGraph(clock=lambda: 1000.0)
    ours, theirs = pack(*range(1, 6)), pack(*range(101, 106))
    for keys, tenant in ((ours, "salt-a"), (theirs, "salt-b")):
        for turn in range(2):
            request = f"{tenant}-{turn}"
            graph.apply(
                "e",
                [
                    RequestStarted(request, keys, 80, 80 * turn, 16, "chat-1", tenant),
                    BlocksStored(keys, None, 16),
                    RequestFinished(request, keys, 80, 80, "stop", "chat-1", tenant),
                ],
            )
    tables = graph.tables
    assert len(tables.blocks) == 10
    assert len(tables.sessions) == 2
    edges = tables.all_edges.all()
    owner = tables.blocks.tenant
    assert (owner[edges.source] == owner[edges.target]).all(), "no edge between them"
    graph.apply(
        "e", [RequestFinished("x", theirs, 80, 80, "stop", "chat-1", "salt-b", False, None, True)]
    )
    assert graph.explain_session("chat-1", "salt-a")["state"] == "idle"
    order = graph.rank("e", 10).order.tolist()
    assert set(order[:5]) == set(range(101, 106)), "what ended goes first, all of it and only it"
    assert not any(block["shared"] for block in map(graph.explain, range(1, 6)))
    graph.apply("e", [BlocksSpilled(theirs, 2, 1000), BlocksSpilled(ours, 2, 1000)])
    graph.apply("e", [BlocksRemoved(ours), BlocksRemoved(theirs)])
    wanted = set(graph.suggest_prefetch([1], 10))
    assert not wanted & set(range(101, 106)), "nothing of the other is brought back for us"


def test_a_disk_that_fails_costs_a_line_and_a_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    graph.apply("e", [BlocksStored(pack(1, 2, 3), None, 16)])
    keeper = SnapshotKeeper(graph, tmp_path / "graph.snap", 60.0, time.monotonic)
    keeper.save()
    good = (tmp_path / "graph.snap").read_bytes()

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        for key in (4, 5, 6):
            graph.apply("e", [BlocksStored(pack(key), None, 16)])
            keeper.save()
    assert keeper.counters["failed"] == 3
    assert "Input/output error" in keeper.status()["error"]
    assert caplog.text.count("serving from memory") == 1
    assert (tmp_path / "graph.snap").read_bytes() == good
    assert [each.name for each in tmp_path.iterdir()] == ["graph.snap"]
    keeper.save()
    assert keeper.status()["error"] is None


def test_an_error_of_ours_ends_no_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    graph.apply("e", [BlocksStored(pack(1, 2, 3), None, 16)])
    keeper = SnapshotKeeper(graph, tmp_path / "graph.snap", 0.01, time.monotonic)

    def broken(*_: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("kvgraph.advisor.process.snapshots.save", broken)
        keeper.start()
        until = time.monotonic() + 20
        while keeper.counters["failed"] < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert keeper.status()["error"] == "MemoryError" or keeper.counters["saved"]
    while not keeper.counters["saved"] and time.monotonic() < until:
        time.sleep(0.01)
    assert keeper.counters["saved"]
    keeper.stop()


@pytest.mark.parametrize(
    "refusal", [SnapshotError("damaged"), MemoryError(), RecursionError("deep"), KeyError("x")]
)
def test_a_refused_snapshot_is_set_aside_and_a_failed_one_is_tried_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Exception,
) -> None:
    path = tmp_path / "graph.snap"
    path.write_bytes(b"of another build")
    graph = KVCacheGraph()
    keeper = SnapshotKeeper(graph, path, 0.01, time.monotonic)
    keeper.restore()
    assert [each.name for each in tmp_path.iterdir()] == ["graph.snap.refused"]
    assert (tmp_path / "graph.snap.refused").read_bytes() == b"of another build"
    assert len(caplog.records) == 1
    assert "graph.snap.refused" in caplog.text

    def fails(*_: object) -> int:
        raise refusal

    monkeypatch.setattr("kvgraph.advisor.process.snapshots.save", fails)
    graph.apply("e", [BlocksStored(b"\1" * 8, None, 16)])
    keeper.start()
    try:
        until(lambda: keeper.counters["failed"] >= 3)
        monkeypatch.undo()
        until(lambda: keeper.counters["saved"] >= 1)
    finally:
        keeper.stop()
    assert caplog.text.count("serving from memory") == 1


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_a_snapshot_that_cannot_be_read_starts_an_empty_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "graph.snap").symlink_to("/proc/self/mem")  # reading its start is EIO
    graph = KVCacheGraph()
    keeper = SnapshotKeeper(graph, tmp_path / "graph.snap", 60.0, time.monotonic)
    keeper.restore()
    assert keeper.counters["refused"] == 1
    assert "Input/output error" in caplog.text
    assert len(graph.tables.blocks) == 0


WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
FOR_PEOPLE = {  # files, and how often each reads the wall clock: to turn the graph's moments into
    # times of day, or to tell people how long a request waited, or when a cache held what
    "advisor/cache_watch.py": 1,
    "advisor/tracing.py": 1,
    "advisor/words/times.py": 1,
    "hooks/confkv/cache.py": 1,
    "hooks/vllm/observer.py": 1,
}


def test_no_wall_clock_is_read_where_ages_are_made() -> None:
    """A clock that is set forward or back an hour then can change nothing."""
    found: Counter[str] = Counter()
    for folder in ("graph", "advisor", "hooks", "dashboards"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    reads = (node.value.id, node.attr) in WALL_CLOCKS
                    found[path.relative_to(ROOT).as_posix()] += reads
    assert {path: count for path, count in found.items() if count} == FOR_PEOPLE


def test_a_wall_clock_that_leaps_changes_no_age(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = KVCacheGraph()
    subscriber_clock = time.monotonic
    keys = pack(1, 2, 3)
    graph.apply("e", [RequestStarted("r", keys, 48, 0, 16, "s"), BlocksStored(keys, None, 16)])
    for leap in (3600.0, -3600.0, 86_400.0):
        wall = time.time() + leap
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        before = subscriber_clock()
        graph.apply("e", [Pressure(10, 5, 5, 1, 0)])
        assert 0 <= graph.explain(1)["age_s"] < 60
        assert 0 <= graph.explain_session("s")["idle_s"] < 60
        assert graph.rank("e", 5).order.size == 3
        assert subscriber_clock() >= before
