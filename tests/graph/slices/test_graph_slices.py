"""Long work in slices: after each of them the tables are whole, and whoever reads gets a turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from kvgraph.advisor.intake import Intake
from kvgraph.advisor.sockets.subscriber import ReceivedBatch
from kvgraph.graph.errors import GraphError
from kvgraph.graph.ingest import chains
from kvgraph.graph.ingest.chains import ChainLinker
from kvgraph.graph.ingest.slices import CHURN, SLICE_KEYS, event_runs, oldest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.evictions import RowMark
from kvgraph.graph.tables.blocks import UNPLACED
from kvgraph.graph.tables.columns import refilled, taken_in_parts
from kvgraph.graph.tables.hash_index import HashIndex
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import MAX_ENGINES, EdgeType, Keys, Tier
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksCleared,
    BlocksEmbedded,
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
from kvgraph.hooks.link.outbox import as_tip
from kvgraph_bench.graph.graphs import BLOCK_SIZE, chain_events, random_keys
from turns import SIZE, Told, removed, stored, turn_events
from wire_keys import pack

POOL = 20_000
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

    def take(self, *events: AnyEvent, engine: str = "e") -> int:
        """Take events in slices, and check the tables after each; returns how many there were."""
        count = 0
        for _ in self.graph.slices(engine, list(events)):
            self.graph.check_integrity()
            count += 1
        self.graph.check_integrity()
        return count

    def resident(self, engine: str = "e") -> Keys:
        blocks, column = self.graph.tables.blocks, self.graph.tables.engines[engine]
        return np.sort(blocks.keys[: blocks.size][blocks.resident(column)])


def packed(keys: Keys) -> bytes:
    return keys.astype("<u8").tobytes()


def test_a_listing_is_taken_in_slices_and_counts_whole_at_its_end() -> None:
    world = World()
    fresh = random_keys(np.random.default_rng(6), POOL // 2)
    listed = np.concatenate([world.keys[: POOL // 2], fresh])
    hello = EngineHello("e", "", BLOCK_SIZE, POOL, "v")
    seen, ranked = [], []
    slices = world.graph.slices("e", [hello, BlocksResident(packed(listed))])
    for number, _ in enumerate(slices):
        world.graph.check_integrity()
        seen.append(world.graph.tables.is_listing("e"))
        if number % 3 == 0:  # a ranking of them all takes a while
            ranked.append(np.isin(world.graph.rank("e", POOL).order, world.resident()).all())
    assert seen.count(True) >= -(-POOL // SLICE_KEYS)
    listing = seen[seen.index(True) :]  # the greeting may take a slice of its own
    assert listing == sorted(listing, reverse=True), "then tables are made ready for more"
    assert all(ranked), "a ranking in between names what the engine may have"
    assert not world.graph.tables.is_listing("e")
    assert np.array_equal(world.resident(), np.sort(listed))


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
    keys = random_keys(np.random.default_rng(13), 200_000)
    graph.apply("e", [BlocksResident(packed(keys))])
    assert graph.resident_count("e") == len(keys)
    assert max(rebuilt) < 1 << 16, "those with more are rebuilt part by part"
    graph.apply("e", list(chain_events(random_keys(np.random.default_rng(14), 150_000))))
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
    world.take(LIFE)  # makes room for more of them
    world.now += 59.0
    assert world.take(LIFE) == 0
    world.now += 241.0  # a half-life in all
    assert world.take(LIFE) >= len(before) // (1 << 16)
    after = edges.weight[edges.of_kind(EdgeType.CO_ATTEND)]
    assert after == pytest.approx(before[before >= 0.1] / 2)
    assert world.take(LIFE) == 0, "not before the next minute"


def test_ghosts_go_in_slices_and_nothing_is_left_that_names_them() -> None:
    world = World(max_ghosts=1000)
    blocks, edges = world.graph.tables.blocks, world.graph.tables.edges
    kept = world.keys[-64:]
    world.now += 1.0
    world.graph.apply("other", [RequestStarted("last", packed(kept), 1024, 0, 16, "last")])
    rows = blocks.find(world.keys)
    weights = np.ones(POOL // 2, dtype=np.float32)
    ends = np.sort(np.stack([rows[: POOL // 2], rows[POOL // 2 :]]), axis=0)
    edges.upsert(EdgeType.CO_ATTEND, ends[0], ends[1], weights, world.now)
    world.graph.forget_engine("e")
    world.graph.check_integrity()
    assert world.take(LIFE, engine="other") == 0, "it may be back in a moment"
    fresh = random_keys(np.random.default_rng(12), 300)
    whole = BlocksStored(packed(fresh), None, BLOCK_SIZE)
    assert world.take(whole, engine="other") > POOL // SLICE_KEYS
    assert len(blocks) == 750 + len(fresh)
    assert (blocks.find(kept) >= 0).all(), "the last used are remembered for longest"
    assert len(edges) == 0
    tips = world.graph.tables.sessions.tip[: world.graph.tables.sessions.size]
    assert 0 < np.count_nonzero(tips >= 0) <= 750 // 64 + 3, "of one chain two sessions' tips"


def test_ingest_goes_on_while_more_ghosts_wait_than_one_batch_releases() -> None:
    world = World(max_ghosts=1000)
    more = random_keys(np.random.default_rng(7), (1 << 17) + 10_000)
    world.graph.apply("e", [BlocksStored(packed(more), None, BLOCK_SIZE)])
    world.graph.forget_engine("e")
    sizes = [len(world.graph.tables.blocks)]
    for number in range(3):
        keys = random_keys(np.random.default_rng(100 + number), 5_000)
        whole = BlocksStored(packed(keys), None, BLOCK_SIZE)
        world.take(whole, BlocksRemoved(packed(keys[:1000])), engine="other")
        sizes.append(len(world.graph.tables.blocks))
        assert np.isin(keys[1000:], world.resident("other")).all()
    assert sizes[0] == POOL + len(more)
    assert sizes[1] == POOL + 10_000 + 5_000, "the others wait for the next batch"
    assert sizes[2] <= 10_000 + 1_250


def test_slices_and_one_stroke_leave_the_same_graph() -> None:
    one, other = World(max_ghosts=500), World(max_ghosts=500)
    fresh = random_keys(np.random.default_rng(8), 20_000)
    events: list[AnyEvent] = [
        BlocksStored(packed(fresh), None, BLOCK_SIZE, "s"),
        BlocksRemoved(packed(world_half := one.keys[: POOL // 2])),
        BlocksSpilled(packed(world_half[: POOL // 4]), int(Tier.WARM), 100),
        BlocksResident(packed(fresh)),
    ]
    one.graph.apply("e", events)
    assert other.take(*events) > 5
    assert np.array_equal(one.resident(), other.resident())
    here, there = one.graph.tables.blocks.columns(), other.graph.tables.blocks.columns()
    for name, column in here.items():
        assert np.array_equal(column, there[name]), name
    assert one.graph.counters == other.graph.counters


def test_long_events_are_cut_and_short_ones_joined() -> None:
    keys = random_keys(np.random.default_rng(9), 2 * SLICE_KEYS + 10)
    short = [BlocksStored(packed(keys[at : at + 4]), None, BLOCK_SIZE) for at in range(0, 40, 4)]
    long = BlocksStored(packed(keys), 7, BLOCK_SIZE, "s")
    runs = list(event_runs([*short, long, LIFE, LIFE, BlocksRemoved(b"torn" + packed(keys))]))
    assert [len(run.events) for run in runs] == [10, 1, 1, 1, 1, 1, 1]
    assert all(run.keys <= SLICE_KEYS for run in runs[:-1])
    parts = [run.events[0] for run in runs[1:4]]
    assert all(run.kind is CHURN for run in runs[:4])
    assert b"".join(part.hashes for part in parts) == long.hashes  # type: ignore[union-attr]
    assert [part.parent for part in parts] == [  # type: ignore[union-attr]
        7, int(keys[SLICE_KEYS - 1]), int(keys[2 * SLICE_KEYS - 1])
    ]  # fmt: skip
    assert runs[-1].events[0].hashes.startswith(b"torn"), "to be refused whole"  # type: ignore


def test_many_embeddings_are_applied_in_slices_and_torn_ones_refused_whole() -> None:
    """Finding the neighbours of one takes as long as storing a hundred blocks."""
    rng, count, dim = np.random.default_rng(3), 200, 8
    keys = random_keys(rng, count)
    vectors = rng.standard_normal((count, dim)).astype("<f2")
    told = BlocksEmbedded(packed(keys), dim, vectors.tobytes())
    graph = KVCacheGraph(clock=lambda: 1.0)
    graph.apply("e", [BlocksStored(packed(keys), None, BLOCK_SIZE)])
    assert sum(1 for _ in graph.slices("e", [told])) >= count // 40, "some milliseconds each"
    rows = graph.tables.blocks.find(keys, graph.tables.salt(0))
    kept = graph.embeddings()
    held = dict(zip(kept["rows"].tolist(), kept["vectors"], strict=True))
    assert all(
        np.array_equal(held[row], own) for row, own in zip(rows.tolist(), vectors, strict=True)
    )
    graph.apply("e", [BlocksEmbedded(packed(keys), dim, vectors.tobytes()[:-1])])
    assert graph.counters["events_refused"] == 1


def held_by_key(graph: KVCacheGraph) -> dict[int, tuple[int, int, int]]:
    """Key → the key before it (0: none), its depth if its place is known, where it is."""
    blocks = graph.tables.blocks
    keys = [*blocks.keys[: blocks.size].tolist(), 0]  # the last one stands for NO_ROW
    parents, depths = blocks.parent[: blocks.size].tolist(), blocks.depth[: blocks.size].tolist()
    tiers = blocks.tiers[0, : blocks.size].tolist()
    return {
        key: (keys[parent], min(depth, UNPLACED), tier)
        for key, parent, depth, tier in zip(keys[:-1], parents, depths, tiers, strict=True)
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_run_leaves_what_its_events_leave_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    events: list[AnyEvent] = []
    for _ in range(300):
        at, count = int(rng.integers(40)), int(rng.integers(1, 6))
        keys = pack(*range(at + 1, at + 1 + count))
        stores = rng.random() < 0.5
        events.append(BlocksStored(keys, at or None, 16) if stores else BlocksRemoved(keys))
    together, apart = KVCacheGraph(clock=lambda: 1.0), KVCacheGraph(clock=lambda: 1.0)
    together.apply("e", events)
    for event in events:
        apart.apply("e", [event])
    assert held_by_key(together) == held_by_key(apart), seed
    assert together.counters == apart.counters, seed
    together.check_integrity()


@pytest.mark.parametrize(("pool", "runs"), [(0, 1), (200, 64)])
def test_blocks_that_are_evicted_as_soon_as_they_are_stored_make_few_runs(
    monkeypatch: pytest.MonkeyPatch, pool: int, runs: int
) -> None:
    """Or as soon as a small pool is full."""
    graph, extended = KVCacheGraph(clock=lambda: 1.0), list[int]()
    extend = ChainLinker.extend
    monkeypatch.setattr(ChainLinker, "extend", lambda *args: (extended.append(1), extend(*args))[1])
    churn: list[AnyEvent] = [stored(1)]
    for key in range(2, 2000):
        churn.append(stored(key))
        if key > pool + 1:
            churn.append(removed(key - pool))
    graph.apply("e", churn)
    assert 1 <= len(extended) <= runs
    assert graph.resident_count("e") == pool + 1
    graph.check_integrity()


def test_one_block_that_comes_and_goes_is_applied_in_slices() -> None:
    graph = KVCacheGraph(clock=lambda: 1.0)
    there: list[AnyEvent] = [stored(1), removed(1)]
    assert sum(1 for _ in graph.slices("e", there * 1000)) > 10
    assert graph.counters["blocks_removed"] == 1000


@pytest.mark.parametrize(
    "events",
    [
        [BlocksCleared()] * 2000,
        [Pressure(1, 1, 1, 0, 0)] * 2000,
        [RequestStarted(f"r{number}", b"", 5, 0, 16) for number in range(2000)],
        [stored(1), RequestFinished("r", b"", 5, 5, "x")] * 1000,
    ],
    ids=["clears", "reports", "short prompts", "in turn"],
)
def test_events_without_keys_are_applied_in_slices_too(events: list[AnyEvent]) -> None:
    graph = KVCacheGraph(clock=lambda: 1.0)
    graph.apply("e", [EngineHello("e", "m", 16, 100, "v")])
    assert sum(1 for _ in graph.slices("e", events)) >= 50, "some milliseconds each"


def test_a_large_index_is_rebuilt_ahead_of_need() -> None:
    index, count = HashIndex(200_000), 77_000
    keys = random_keys(np.random.default_rng(10), 2 * count)
    rows = np.arange(2 * count, dtype=np.int32)
    alive = rows < count
    index.insert(keys[:count], rows[:count])
    index.remove(rows[: count // 2])
    alive[: count // 2] = False
    while not (parts := sum(1 for _ in index.tidying(alive, count))):
        index.insert(keys[count : count + 500], rows[count : count + 500])
        alive[count : count + 500] = True
        count += 500
    assert parts > 1
    live = rows[77_000 // 2 : count]
    assert (index.find(keys[live]) == live).all()
    assert (index.find(keys[: 77_000 // 2]) == -1).all()
    assert not list(index.tidying(alive, count)), "there is room again"


def test_whoever_waits_for_the_lock_gets_it_in_the_middle_of_a_listing() -> None:
    world = World()
    keys = random_keys(np.random.default_rng(11), 400_000)
    arrived = [ReceivedBatch("e", [BlocksResident(packed(keys))], 1)]
    ears: Any = SimpleNamespace(receive=lambda *_: iter(arrived), peer=lambda _: None)
    planner: Any = SimpleNamespace(applied=lambda: None)
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


RNG = np.random.default_rng(3)
SPREADS = {
    "even": RNG.uniform(0, 1e6, 30_000),
    "equal": np.full(30_000, 7.0),
    "two": RNG.integers(0, 2, 30_000).astype(np.float64),
    "batches": np.repeat(np.arange(30.0), 1_000),
    "never": np.where(RNG.uniform(size=30_000) < 0.9, -np.inf, 5.0),
    "one apart": np.concatenate([np.full(29_999, 3.0), [1.0]]),
    "in step with the sample": np.tile(np.arange(8.0), 3_750),
}


def taken(slices: Generator[None, None, Any], between: Callable[[], object] = bool) -> Any:
    """What slices give back in the end."""
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return ended.value
        between()


@pytest.mark.parametrize("spread", SPREADS)
def test_the_oldest_are_those_of_a_stable_sort(spread: str) -> None:
    times: npt.NDArray[np.float64] = SPREADS[spread]
    rows = np.flatnonzero(RNG.uniform(size=2 * len(times)) < 0.9)[: len(times)].astype(np.int32)
    cuts = [0, 11_000, 11_000, 29_000]
    parts = np.split(rows, cuts), np.split(times, cuts)
    for count in (0, 1, 100, 15_000, 29_999, 30_000):
        expected = np.sort(np.argsort(times, kind="stable")[:count])
        assert np.array_equal(taken(oldest(*parts, count)), rows[expected]), count


def turn(number: int, keys: range, found: int, session: str | None) -> list[AnyEvent]:
    """A request whose first ``found`` blocks are cached, and which writes its last two."""
    start, _, end = turn_events(
        session, *keys, found=found, prompt=len(keys) - 2, request=f"r{number}"
    )
    parent = keys[found - 1] if found else None
    return [start, stored(*keys[found:], behind=parent), end]


def told(tips: bool, session: str | None) -> KVCacheGraph:
    told = Told(EngineHello("e", "m", SIZE, 10_000, "v"))
    for number, (length, found) in enumerate([(700, 0), (900, 700), (1600, 900)]):
        told.now += 1
        events = turn(number, range(1, length + 1), found, session)
        told.tell(*(as_tip(event) if tips else event for event in events))
    return told.graph


@pytest.mark.parametrize("session", ["s", None])
def test_a_session_told_by_tips_has_the_same_turns_and_the_same_end(session: str | None) -> None:
    chains, tips = told(False, session), told(True, session)
    assert tips.counters["tips_unknown"] == tips.counters["blocks_superseded"] == 0
    for name in ("turns", "tokens", "tip", "running", "state"):
        ours, theirs = (getattr(each.tables.sessions, name)[0] for each in (tips, chains))
        assert ours == theirs, name
    rows = tips.tables.blocks.find(np.arange(1, 1601, dtype=np.uint64), tips.tables.salt(0))
    blocks, others = tips.tables.blocks, chains.tables.blocks
    same = others.find(np.arange(1, 1601, dtype=np.uint64), chains.tables.salt(0))
    for name in ("depth", "hit_count", "session", "tokens"):
        assert (getattr(blocks, name)[rows] == getattr(others, name)[same]).all(), name


def test_a_tip_is_one_key_long() -> None:
    started, stored, finished = turn(0, range(1, 101), 40, "s")
    tip, same, end = as_tip(started), as_tip(stored), as_tip(finished)
    assert (tip.hashes, tip.skipped) == (pack(40), 39)  # type: ignore[union-attr]
    assert (end.hashes, end.skipped) == (pack(100), 99)  # type: ignore[union-attr]
    assert same is stored
    fresh = as_tip(turn(0, range(1, 101), 0, "s")[0])
    assert (fresh.hashes, fresh.skipped) == (b"", 0)  # type: ignore[union-attr]
    # A start that says what its blocks are is told whole.
    tagged = msgspec.structs.replace(started, segments=(Segment(0, 0, 160),))
    assert as_tip(tagged) is tagged


def test_a_tip_of_a_chain_that_is_not_known_tells_of_no_block() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [stored(5, 6)])
    for tip in (6, 7):
        end = RequestFinished(f"r{tip}", pack(tip), 64, 80, "stop", "s", skipped=4)
        graph.apply("e", [end])
    graph.check_integrity()
    assert graph.counters["tips_unknown"] == 2
    assert len(graph.tables.blocks) == 2
    assert graph.tables.sessions.rows_named("s") == [0]


def test_what_is_new_is_found_behind_what_was_skipped() -> None:
    graph = KVCacheGraph()
    graph.apply("e", turn(0, range(1, 101), 0, "s"))
    graph.apply(
        "e", [RequestStarted("r", pack(98, 200, 201), 101 * 16, 98 * 16, 16, "s", skipped=97)]
    )
    graph.check_integrity()
    row = int(graph.tables.blocks.find(np.array([201], dtype=np.uint64))[0])
    assert graph.tables.blocks.depth[row] == 99


def test_what_a_tip_leaves_out_counts_where_runs_end() -> None:
    tips = [
        RequestStarted(f"r{number}", pack(1), 16, 16, 16, skipped=SLICE_KEYS // 2)
        for number in range(6)
    ]
    runs = list(event_runs(tips))
    assert [len(run.events) for run in runs] == [1] * 6
    assert runs[0].keys == SLICE_KEYS // 2 + 1
    one_more = [msgspec.structs.replace(tip, skipped=SLICE_KEYS // 2 - 1) for tip in tips]
    assert [len(run.events) for run in event_runs(one_more)] == [2] * 3


@pytest.mark.parametrize("length", [1, 2, 99, 3000])
def test_a_chain_is_found_wherever_its_rows_are(length: int) -> None:
    rng = np.random.default_rng(length)
    keys = random_keys(rng, length)
    graph = KVCacheGraph(clock=lambda: 1.0)
    graph.apply("e", [BlocksResident(packed(rng.permutation(keys)))])  # after a resync
    graph.apply("e", [BlocksStored(packed(keys), None, SIZE)])
    linker = graph._ingest._chains
    rows = graph.tables.blocks.find(keys, graph.tables.salt(0))
    last = int(rows[-1])
    assert np.array_equal(linker.from_root(last, length), rows)
    for wrong in (0, length - 1, length + 1, 1 << 30):
        assert not len(linker.from_root(last, wrong)), wrong
    assert not len(linker.from_root(-1, 1))


def test_deep_ends_of_unknown_place_are_walked_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, looked = KVCacheGraph(clock=lambda: 1.0), list[int]()
    keys = random_keys(np.random.default_rng(3), 40_000)
    first = [BlocksStored(packed(keys[:-1000]), 7, SIZE)]  # nobody knows what 7 follows
    graph.apply("e", first)
    graph.apply("e", [BlocksSpilled(packed(keys[-1000:]), int(Tier.WARM), 1)])
    to_raise = chains.core.to_raise

    def counted(*args: Any) -> tuple[int, bytes | None]:
        told = to_raise(*args)
        looked.append(told[0])
        return told

    monkeypatch.setattr(chains.core, "to_raise", counted)
    end = int(keys[-1001])
    graph.apply("e", [BlocksStored(packed(keys[at:][:1]), end, SIZE) for at in range(-1000, 0)])
    graph.check_integrity()
    assert len(looked) == 1000, "each of them is too deep"
    assert sum(looked) < (1 << 14) + 2 * len(looked), "they share one bound"
    assert graph.counters["links_refused"] == 1000


FORGETTING_POOL = 160_000


@pytest.fixture(scope="module")
def keys() -> Keys:
    return random_keys(np.random.default_rng(5), FORGETTING_POOL)


@pytest.fixture
def graph(keys: Keys) -> KVCacheGraph:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    graph.apply("e", [EngineHello("e", "m", BLOCK_SIZE, FORGETTING_POOL, "v"), *chain_events(keys)])
    graph.apply("e", [BlocksSpilled(packed(keys[:1000]), int(Tier.WARM), 1)])
    graph.apply("other", [EngineHello("other", "m", BLOCK_SIZE, 64, "v")])
    graph.apply("other", [BlocksResident(packed(keys[-64:]))])
    return graph


def held(graph: KVCacheGraph, column: int) -> int:
    return int(np.count_nonzero(graph.tables.blocks.tiers[column]))


def counts_of(graph: KVCacheGraph, column: int, slices: Iterator[None]) -> list[int]:
    """How many blocks the column has after each slice, with the tables whole."""
    counts = []
    for _ in slices:
        graph.check_integrity()
        counts.append(held(graph, column))
    graph.check_integrity()
    return [*counts, held(graph, column)]


def test_it_goes_in_parts_and_is_gone_from_the_first_on(graph: KVCacheGraph, keys: Keys) -> None:
    history, column = graph.tables.history, graph.tables.engines["e"]
    awaited = [len(history.running.of(column))]
    assert awaited[0] > 2_048

    def noted() -> Iterator[None]:
        for each in graph.forgetting("e"):
            awaited.append(len(history.running.of(column)))
            yield each

    slices = noted()
    next(slices)
    assert graph.engines == ["other"]
    assert graph.resident_count("e") == 0
    assert not graph.rank("e", 100).order.size
    counts = counts_of(graph, column, slices)
    lost = -np.diff([FORGETTING_POOL, *counts])
    assert len(counts) > 2
    assert max(lost) < FORGETTING_POOL / 2, "no slice takes most of them"
    assert counts[-1] == 0
    assert len(graph.tables.blocks) == FORGETTING_POOL, "they are remembered"
    ranking = graph.rank("other", 64)
    assert {*ranking.order.tolist(), *ranking.protected.tolist()} == set(keys[-64:].tolist())
    assert awaited[1] > 0, "no slice takes all requests that are awaited"
    assert awaited == sorted(awaited, reverse=True)
    assert awaited[-1] == 0
    assert not (history.evictions[column].marks & RowMark.COMPUTING).any()


@pytest.mark.parametrize("after", [1, 4])  # slices: requests still run; some blocks are gone
def test_one_that_comes_back_meanwhile_keeps_all_that_it_says(
    graph: KVCacheGraph, keys: Keys, after: int
) -> None:
    slices = graph.forgetting("e")
    for _ in range(after):
        next(slices)
    fresh = random_keys(np.random.default_rng(6), 1000)
    hello = EngineHello("e", "m", BLOCK_SIZE, FORGETTING_POOL, "v")
    listed = [BlocksResident(packed(keys[:5000])), stored(fresh)]
    graph.apply("e", [hello, *listed])
    for _ in slices:
        graph.check_integrity()
    assert graph.resident_count("e") == 6000
    blocks = graph.tables.blocks
    resident = blocks.resident(graph.tables.engines["e"])
    expected = {*keys[:5000].tolist(), *fresh.tolist()}
    assert set(blocks.wire_keys(np.flatnonzero(resident).astype(np.int32)).tolist()) == expected
    assert graph.tables.pool_blocks[graph.tables.engines["e"]] == FORGETTING_POOL


def test_nobody_is_given_its_column_before_the_last_slice() -> None:
    graph = KVCacheGraph()
    whole = stored(1, 2)
    for number in range(MAX_ENGINES):
        graph.apply(f"e{number}", [whole])
    slices = graph.forgetting("e3")
    next(slices)
    with pytest.raises(GraphError, match=f"at most {MAX_ENGINES} engines"):
        graph.apply("new", [whole])
    assert list(slices) == []
    graph.apply("new", [])
    assert graph.tables.engines["new"] == 3
    assert graph.rank("new", 5).order.tolist() == []
    assert graph.rank("e0", 5).order.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("event", "left"),
    [
        pytest.param(BlocksCleared(), 1000, id="a pool that is emptied: copies stay"),
        pytest.param(
            EngineHello("e", "another", BLOCK_SIZE, FORGETTING_POOL, "v"), 0, id="another model"
        ),
    ],
)
def test_blocks_of_before_go_part_by_part(graph: KVCacheGraph, event: AnyEvent, left: int) -> None:
    column = graph.tables.engines["e"]
    counts = counts_of(graph, column, graph.slices("e", [event]))
    assert len(set(counts)) > 2
    assert counts[-1] == left
    assert graph.tables.models[column] == getattr(event, "model", "m")
    assert graph.resident_count("other") == 64


def test_a_pool_that_is_emptied_again_costs_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, parts = KVCacheGraph(clock=lambda: 1000.0), list[slice]()
    keys = random_keys(np.random.default_rng(5), 50_000)
    graph.apply("e", [EngineHello("e", "m", BLOCK_SIZE, 50_000, "v"), *chain_events(keys)])
    graph.apply("e", [BlocksCleared()])
    emptied = graph.tables.history.emptied
    monkeypatch.setattr(
        graph.tables.history, "emptied", lambda *args: (parts.append(args[1]), emptied(*args))
    )
    graph.apply("e", [BlocksCleared()] * 10)
    assert not parts, "nothing is there"
    last = BlocksStored(packed(keys[-1:]), int(keys[-2]), BLOCK_SIZE)
    graph.apply("e", [last, BlocksCleared()] * 10)
    assert len(parts) == 10
    assert graph.resident_count("e") == 0
    graph.check_integrity()


def test_what_is_written_while_memory_is_taken_is_kept() -> None:
    values = np.arange(1 << 19, dtype=np.float64)
    parts = itertools.count(1)

    def write() -> None:
        values[next(parts)] = -1.0

    room = refilled(taken(taken_in_parts(values, 1 << 20), write), values)
    assert next(parts) == 5, "four of a mebibyte each"
    assert np.array_equal(room[: 1 << 19], values)
    assert not room[1 << 19 :].any()
