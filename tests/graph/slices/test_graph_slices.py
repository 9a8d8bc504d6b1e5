"""Long work in slices: after each of them the tables are whole, and whoever reads gets a turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from kvgraph.advisor.intake import Intake
from kvgraph.advisor.planner import GraphEvictionAdvisor
from kvgraph.advisor.sockets.subscriber import EventSubscriber, ReceivedBatch
from kvgraph.graph.ingest.slices import CHURN, SLICE_KEYS, event_runs
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.hash_index import HashIndex
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import EdgeType, Keys, Tier
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestStarted,
)
from kvgraph_bench.graph.graphs import BLOCK_SIZE, chain_events, random_keys

POOL = 100_000
LIFE = Pressure(POOL, POOL, 0, 0, 0)


class World:
    """An engine whose pool is full, and a clock that stands."""

    def __init__(self, **limits: float) -> None:
        self.now = 1000.0
        bounds = GraphLimits(**{"ghost_share": 0.0, **limits})  # type: ignore[arg-type]
        self.graph = KVCacheGraph(limits=bounds, clock=lambda: self.now)
        self.keys = random_keys(np.random.default_rng(5), POOL)
        self.graph.apply("e", [EngineHello("e", "", BLOCK_SIZE, POOL, "v")])
        self.graph.apply("e", list(chain_events(self.keys)))

    def take(self, slices: Iterator[None]) -> int:
        """Take all slices, and check the tables after each; returns how many there were."""
        count = 0
        for _ in slices:
            self.graph.check_integrity()
            count += 1
        self.graph.check_integrity()
        return count

    def resident(self, engine: str = "e") -> set[int]:
        blocks, column = self.graph.tables.blocks, self.graph.tables.engines[engine]
        return set(blocks.keys[: blocks.size][blocks.resident(column)].tolist())


def pack(keys: Keys) -> bytes:
    return keys.astype("<u8").tobytes()


def test_a_listing_is_taken_in_slices_and_counts_whole_at_its_end() -> None:
    world = World()
    fresh = random_keys(np.random.default_rng(6), 60_000)
    listed = np.concatenate([world.keys[: POOL - 60_000], fresh])
    hello = EngineHello("e", "", BLOCK_SIZE, POOL, "v")
    seen, ranked = [], []
    slices = world.graph.slices("e", [hello, BlocksResident(pack(listed))])
    for _ in slices:
        world.graph.check_integrity()
        seen.append(world.graph.tables.is_listing("e"))
        ranked.append(set(world.graph.rank("e", POOL).order.tolist()) <= world.resident())
    assert seen.count(True) >= -(-POOL // SLICE_KEYS)
    assert seen == sorted(seen, reverse=True), "then tables are made ready for more"
    assert all(ranked), "a ranking in between names what the engine may have"
    assert not world.graph.tables.is_listing("e")
    assert world.resident() == set(listed.tolist())


def test_a_listing_of_unknown_blocks_never_rebuilds_a_large_index_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rebuilt: list[int] = []
    at_once = HashIndex.rebuild

    def rebuild(self: HashIndex, new: int) -> None:
        rebuilt.append(len(self))
        at_once(self, new)

    monkeypatch.setattr(HashIndex, "rebuild", rebuild)
    graph = KVCacheGraph()
    keys = random_keys(np.random.default_rng(13), 500_000)
    graph.apply("e", [BlocksResident(pack(keys))])
    assert graph.resident_count("e") == len(keys)
    assert max(rebuilt) < 1 << 16, "those with more are rebuilt part by part"
    graph.apply("e", list(chain_events(random_keys(np.random.default_rng(14), 300_000))))
    assert max(rebuilt) < 1 << 16, "nor do many events of one batch"


def test_links_fade_in_slices_once_a_minute() -> None:
    world = World()
    edges = world.graph.tables.edges
    rng = np.random.default_rng(15)
    ends = np.sort(rng.integers(0, POOL, size=(200_000, 2), dtype=np.int32), axis=1)
    ends = ends[ends[:, 0] != ends[:, 1]]
    weights = rng.uniform(0.01, 8.0, len(ends)).astype(np.float32)
    edges.upsert(EdgeType.CO_ATTEND, ends[:, 0], ends[:, 1], weights, world.now)
    before = edges.weight[edges.of_kind(EdgeType.CO_ATTEND)]
    world.take(world.graph.slices("e", [LIFE]))  # makes room for more of them
    world.now += 59.0
    assert world.take(world.graph.slices("e", [LIFE])) == 0
    world.now += 241.0  # a half-life in all
    assert world.take(world.graph.slices("e", [LIFE])) >= len(before) // (1 << 16)
    after = edges.weight[edges.of_kind(EdgeType.CO_ATTEND)]
    assert after == pytest.approx(before[before >= 0.1] / 2)
    assert world.take(world.graph.slices("e", [LIFE])) == 0, "not before the next minute"


def test_ghosts_go_in_slices_and_nothing_is_left_that_names_them() -> None:
    world = World(max_ghosts=1000)
    blocks, edges = world.graph.tables.blocks, world.graph.tables.edges
    kept = world.keys[-64:]
    world.now += 1.0
    world.graph.apply("other", [RequestStarted("last", pack(kept), 1024, 0, 16, "last")])
    rows = blocks.find(world.keys)
    weights = np.ones(POOL // 2, dtype=np.float32)
    ends = np.sort(np.stack([rows[: POOL // 2], rows[POOL // 2 :]]), axis=0)
    edges.upsert(EdgeType.CO_ATTEND, ends[0], ends[1], weights, world.now)
    world.graph.forget_engine("e")
    world.graph.check_integrity()
    assert world.take(world.graph.slices("other", [LIFE])) == 0, "it may be back in a moment"
    fresh = random_keys(np.random.default_rng(12), 300)
    stored = BlocksStored(pack(fresh), None, BLOCK_SIZE)
    assert world.take(world.graph.slices("other", [stored])) > POOL // SLICE_KEYS
    assert len(blocks) == 750 + len(fresh)
    assert (blocks.find(kept) >= 0).all(), "the last used are remembered for longest"
    assert len(edges) == 0
    tips = world.graph.tables.sessions.tip[: world.graph.tables.sessions.size]
    assert 0 < np.count_nonzero(tips >= 0) <= 750 // 64 + 3, "of one chain two sessions' tips"


def test_ingest_goes_on_while_more_ghosts_wait_than_one_batch_releases() -> None:
    world = World(max_ghosts=1000)
    more = random_keys(np.random.default_rng(7), POOL)
    world.graph.apply("e", [BlocksStored(pack(more), None, BLOCK_SIZE)])
    world.graph.forget_engine("e")
    sizes = [len(world.graph.tables.blocks)]
    for number in range(3):
        keys = random_keys(np.random.default_rng(100 + number), 5_000)
        stored = BlocksStored(pack(keys), None, BLOCK_SIZE)
        world.take(world.graph.slices("other", [stored, BlocksRemoved(pack(keys[:1000]))]))
        sizes.append(len(world.graph.tables.blocks))
        assert set(keys[1000:].tolist()) <= world.resident("other")
    assert sizes[0] == 2 * POOL
    assert sizes[1] == 2 * POOL + 5_000 - (1 << 17), "the others wait for the next batch"
    assert sizes[2] <= 10_000 + 1_250


def test_slices_and_one_stroke_leave_the_same_graph() -> None:
    one, other = World(max_ghosts=500), World(max_ghosts=500)
    fresh = random_keys(np.random.default_rng(8), 40_000)
    events: list[AnyEvent] = [
        BlocksStored(pack(fresh), None, BLOCK_SIZE, "s"),
        BlocksRemoved(pack(world_half := one.keys[: POOL // 2])),
        BlocksSpilled(pack(world_half[:20_000]), int(Tier.WARM), 100),
        BlocksResident(pack(fresh)),
    ]
    one.graph.apply("e", events)
    assert other.take(other.graph.slices("e", events)) > 10
    assert one.resident() == other.resident()
    here, there = one.graph.tables.blocks.columns(), other.graph.tables.blocks.columns()
    for name, column in here.items():
        assert np.array_equal(column, there[name]), name
    assert one.graph.counters == other.graph.counters


def test_long_events_are_cut_and_short_ones_joined() -> None:
    keys = random_keys(np.random.default_rng(9), 2 * SLICE_KEYS + 10)
    short = [BlocksStored(pack(keys[at : at + 4]), None, BLOCK_SIZE) for at in range(0, 40, 4)]
    long = BlocksStored(pack(keys), 7, BLOCK_SIZE, "s")
    runs = list(event_runs([*short, long, LIFE, LIFE, BlocksRemoved(b"torn" + pack(keys))]))
    assert [len(run.events) for run in runs] == [10, 1, 1, 1, 1, 1, 1]
    assert all(run.keys <= SLICE_KEYS for run in runs[:-1])
    parts = [run.events[0] for run in runs[1:4]]
    assert all(run.kind is CHURN for run in runs[:4])
    assert b"".join(part.hashes for part in parts) == long.hashes  # type: ignore[union-attr]
    assert [part.parent for part in parts] == [  # type: ignore[union-attr]
        7, int(keys[SLICE_KEYS - 1]), int(keys[2 * SLICE_KEYS - 1])
    ]  # fmt: skip
    assert runs[-1].events[0].hashes.startswith(b"torn"), "to be refused whole"  # type: ignore


def test_a_large_index_is_rebuilt_ahead_of_need() -> None:
    index, count = HashIndex(200_000), 77_000
    keys = random_keys(np.random.default_rng(10), 2 * count)
    rows = np.arange(2 * count, dtype=np.int32)
    index.insert(keys[:count], rows[:count])
    index.remove(rows[: count // 2])
    while not (parts := sum(1 for _ in index.tidying())):
        index.insert(keys[count : count + 500], rows[count : count + 500])
        count += 500
    assert parts > 1
    live = rows[77_000 // 2 : count]
    assert (index.find(keys[live]) == live).all()
    assert (index.find(keys[: 77_000 // 2]) == -1).all()
    assert not list(index.tidying()), "there is room again"


class OneMessage:
    """What arrived: one run of events."""

    def __init__(self, events: list[AnyEvent]) -> None:
        self._events = events

    def receive(self, limit: int, seconds: float) -> Iterator[ReceivedBatch]:
        yield ReceivedBatch("e", self._events, 1)

    def peer(self, engine: str) -> None:
        return None


class _Planner:
    def applied(self) -> None:
        pass


@pytest.mark.parametrize("attempt", range(2))
def test_whoever_waits_for_the_lock_gets_it_in_the_middle_of_a_listing(attempt: int) -> None:
    world = World()
    keys = random_keys(np.random.default_rng(11), 400_000)
    ears: EventSubscriber = OneMessage([BlocksResident(pack(keys))])  # type: ignore[assignment]
    planner: GraphEvictionAdvisor = _Planner()  # type: ignore[assignment]
    intake = Intake(world.graph, ears, [], planner, None, lambda: world.now)
    over, seen = threading.Event(), 0

    def read() -> None:
        nonlocal seen
        while not over.is_set():
            with world.graph.lock:
                seen += world.graph.tables.is_listing("e")
            over.wait(0.0005)

    reader = threading.Thread(target=read)
    reader.start()
    intake.receive_and_apply()
    over.set()
    reader.join()
    assert seen >= 1
    assert len(world.resident()) == len(keys)
