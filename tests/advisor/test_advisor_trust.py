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

import numpy as np
import pytest
import zmq
from kvgraph.advisor.process.snapshots import SnapshotKeeper
from kvgraph.advisor.sockets.publisher import AdvicePublisher
from kvgraph.advisor.sockets.subscriber import EventSubscriber, engine_id
from kvgraph.graph import snapshot
from kvgraph.graph.errors import SnapshotError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import SourceLayer
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
    Segment,
)
from kvgraph.hooks.fake import FakeEngine
from kvgraph.hooks.link.client import ClientOptions
from kvgraph.hooks.link.outbox import Outbox
from kvgraph_bench.sidecars.sidecar_process import SidecarProcess
from sidecar_ends import Dealer, Serving
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
        self.dealer = Dealer(self.context, endpoint)

    def take(self, frames: list[bytes]) -> None:
        self.dealer.socket.send_multipart(frames)
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
            asked = RequestStarted(request, keys, 80, 80 * turn, 16, "chat-1", tenant)
            ended = RequestFinished(request, keys, 80, 80, "stop", "chat-1", tenant)
            graph.apply("e", [asked, BlocksStored(keys, None, 16), ended])
    tables = graph.tables
    assert len(tables.blocks) == 10
    assert len(tables.sessions) == 2
    edges = tables.all_edges.all()
    owner = tables.blocks.tenant
    assert (owner[edges.source] == owner[edges.target]).all(), "no edge between them"
    over = RequestFinished("x", theirs, 80, 80, "stop", "chat-1", "salt-b", session_ended=True)
    graph.apply("e", [over])
    assert graph.explain_session("chat-1", "salt-a")["state"] == "idle"
    order = graph.rank("e", 10).order.tolist()
    assert set(order[:5]) == set(range(101, 106)), "what ended goes first, all of it and only it"
    assert not any(block["shared"] for block in map(graph.explain, range(1, 6)))
    graph.apply("e", [BlocksSpilled(theirs, 2, 1000), BlocksSpilled(ours, 2, 1000)])
    graph.apply("e", [BlocksRemoved(pack(*range(2, 6))), BlocksRemoved(theirs)])
    wanted = set(graph.prefetch_order("e", 10).tolist())
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


@pytest.mark.parametrize(
    "refusal", [SnapshotError("damaged"), MemoryError(), RecursionError("deep"), KeyError("x")]
)
def test_a_refused_snapshot_is_set_aside_and_a_failed_one_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    refusal: Exception,
) -> None:  # fmt: skip
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
    # times of day, or to tell people how long a request waited, or when a cache held what; and
    # where a shared store cannot ask its file system what time it is
    "advisor/cache_watch.py": 1,
    "advisor/tracing.py": 1,
    "advisor/words/times.py": 1,
    "hooks/confkv/cache.py": 1,
    "hooks/store/stores.py": 1,
    "hooks/vllm/observer.py": 1,
}


def test_no_wall_clock_is_read_where_ages_are_made() -> None:
    """A clock that is set forward or back an hour then can change nothing."""
    found: Counter[str] = Counter()
    for folder in ("graph", "advisor", "hooks", "dashboards"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            if not any(".".join(reads) in text for reads in WALL_CLOCKS):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    reads = (node.value.id, node.attr) in WALL_CLOCKS
                    found[path.relative_to(ROOT).as_posix()] += reads
    assert {path: count for path, count in found.items() if count} == FOR_PEOPLE


QUICK = ClientOptions(tick_s=0.01, heartbeat_s=0.1, resync_gap_s=0.05)


class InProcess(Serving):
    """A service in a thread, whose graph can be looked into."""

    def resident(self, engine: FakeEngine) -> set[int] | None:
        """The keys that the graph holds resident; None while the engine is not in step."""
        identity = engine_id(engine.client.identity)
        peers = {peer.engine: peer for peer in self.service.parts.subscriber.peers}
        if identity not in peers or not peers[identity].synced:
            return None
        graph = self.service.graph
        with graph.lock:
            blocks = graph.tables.blocks
            rows = blocks.resident(graph.tables.engines[identity])
            return set(blocks.wire_keys(blocks.pick(rows).rows).tolist())

    def agrees_with(self, engine: FakeEngine) -> bool:
        return self.resident(engine) == engine.cached

    def check(self) -> None:
        with self.service.graph.lock:
            self.service.graph.check_integrity()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[InProcess]:
    sidecar = InProcess(f"ipc://{tmp_path}/s")
    yield sidecar
    sidecar.stop()


@pytest.fixture
def endpoint(sidecar: InProcess) -> str:
    return sidecar.service.endpoint


def prompts(seed: int, count: int) -> Iterator[tuple[list[int], str]]:
    """Turns of a few sessions that share their beginning: prompt and session."""
    rng = random.Random(seed)
    histories: dict[str, list[int]] = {}
    for _ in range(count):
        session = f"s{rng.randrange(6)}"
        history = histories.setdefault(session, list(range(32)))
        if len(history) > 16 * 12:
            history = histories[session] = list(range(32))
        history += [rng.randrange(1000) for _ in range(16 * rng.randint(1, 3))]
        yield list(history), session


def serve(engine: FakeEngine, seed: int, count: int, pause_s: float = 0.002) -> None:
    for tokens, session in prompts(seed, count):
        engine.run(tokens, session)
        time.sleep(pause_s)


def is_advised(engine: FakeEngine) -> bool:
    """Whether the engine holds a fresh ranking of all that it caches."""
    ranking = engine.client.ranking()
    return (
        ranking is not None
        and {*ranking.order.tolist(), *ranking.protected.tolist()} == engine.cached
    )


def test_the_picture_equals_the_engines_memory(sidecar: InProcess, endpoint: str) -> None:
    seed = random.randrange(1 << 30)
    with FakeEngine(endpoint, num_blocks=40, options=QUICK) as engine:
        serve(engine, seed, 200)
        until(lambda: sidecar.agrees_with(engine), f"seed {seed}")
        assert engine.evicted
        engine.reset()
        until(lambda: sidecar.agrees_with(engine), f"seed {seed}, after a reset")
    sidecar.check()


def test_protected_blocks_survive_pressure(sidecar: InProcess, endpoint: str) -> None:
    rules = (Segment(int(SourceLayer.RULES), 0, 64),)
    with FakeEngine(endpoint, num_blocks=24, options=QUICK) as engine:
        precious = list(range(64))
        engine.run(precious, "boss", segments=rules)
        kept = engine.keys(precious)
        for salt in range(30):
            filler = [5000 + salt, *range(16 * 6 - 1)]
            until(lambda: is_advised(engine), "a ranking that knows everything")
            engine.run(filler, f"filler-{salt}")
        assert set(kept) <= engine.cached
        stock = FakeEngine("ipc:///nowhere", num_blocks=24)
        stock.run(precious)
        for salt in range(30):
            stock.run([5000 + salt, *range(16 * 6 - 1)])
        assert not set(kept) & stock.cached, "without advice they are lost"


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_lost_batches_are_noticed_and_made_good(
    sidecar: InProcess, endpoint: str, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    send, lost = Outbox.send, []

    def lossy(outbox: Outbox, socket: Any, events: list[Any]) -> bool:
        if rng.random() < share:
            outbox.frames(events)  # its number is used, and nobody hears it
            lost.append(len(events))
            return True
        return send(outbox, socket, events)

    with FakeEngine(endpoint, num_blocks=40, options=QUICK) as engine:
        with monkeypatch.context() as broken:
            broken.setattr(Outbox, "send", lossy)
            serve(engine, seed, 300)
        # The number after the last loss shows it.
        until(lambda: sidecar.agrees_with(engine), f"seed {seed}")
        if lost:
            assert sidecar.service.parts.subscriber.counters["resyncs"] > 0
    sidecar.check()


@pytest.mark.timing
def test_a_killed_sidecar_is_back_in_step_after_each_restart(socket_directory: Path) -> None:
    sidecar = SidecarProcess(socket_directory, sidecar__interval_s=0.05)
    took, started = list[float](), 0.0
    with sidecar, FakeEngine(sidecar.endpoint, num_blocks=40, options=QUICK) as engine:
        for generation in range(5):
            serve(engine, generation, 50)
            until(lambda: is_advised(engine), f"generation {generation}")
            if generation:
                took.append(time.monotonic() - started)
            sidecar.kill()
            serve(engine, generation, 50)  # nobody listens: it goes on
            until(lambda: engine.client.ranking() is None, "old advice is let go")
            started = time.monotonic()
            sidecar.start()
    assert float(np.median(took)) < 5, "seconds until it advises again"


def test_a_stopped_sidecar_is_done_without_and_taken_up_again(socket_directory: Path) -> None:
    sidecar = SidecarProcess(socket_directory, sidecar__interval_s=0.05)
    with sidecar, FakeEngine(sidecar.endpoint, num_blocks=40, options=QUICK) as engine:
        serve(engine, 1, 30)
        until(lambda: is_advised(engine), "advised")
        sidecar.stop()
        until(lambda: engine.client.ranking() is None, "stale advice is not used")
        serve(engine, 2, 300)
        sidecar.go_on()
        until(lambda: is_advised(engine), "advised again")
