"""The compiled loops beside plain Python, and callers who say too much."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import kvgraph._graph as core
import numpy as np
import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.ingest.segments import LayerBook, SegmentTagger
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.blocks import DEPTH_TIE, keep_chains_whole, places_of
from kvgraph.graph.tables.hash_index import HashIndex
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import EdgeType, SessionState, SourceLayer
from kvgraph.graph.wire.events import Segment, SessionSignal
from turns import SIZE, Told, started, turn_events

ROWS, KEYS = np.zeros(4, dtype=np.int32), np.zeros(4, dtype=np.uint64)


def forest(rng: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
    """Places, parents before their children, and each one's parent; ``size`` for none."""
    order = rng.permutation(size).tolist()
    above = [size] * (size + 1)
    for at in range(1, size):
        if rng.random() < 0.7:
            above[order[at]] = order[int(rng.integers(at))]
    return order, above


@pytest.mark.parametrize("size", [0, 1, 2, 50])
def test_no_block_goes_before_those_behind_it_in_whatever_order_they_stand(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(50):
        order, above = forest(rng, size)
        scores, lengths = rng.normal(size=size), rng.integers(1, 5, size)
        wanted, of_runs = scores.copy(), scores.copy()
        for at in reversed(order):
            if (up := above[at]) < size:
                wanted[up] = min(wanted[up], wanted[at] - DEPTH_TIE)
                of_runs[up] = min(of_runs[up], of_runs[at] - lengths[up] * DEPTH_TIE)
        places = np.array(above, dtype=np.int64)
        assert np.array_equal(keep_chains_whole(scores, places), wanted)
        assert np.array_equal(keep_chains_whole(scores, places, lengths), of_runs)


def test_the_highest_are_found_and_of_equals_the_first() -> None:
    rng = np.random.default_rng(2)
    for size in (0, 1, 9, 400, 30_000):
        for limit in (0, 1, size // 3, size):
            scores, among = np.round(rng.normal(size=size), 1), rng.random(size) < 0.8
            scores[: size // 5] = -0.0
            found = np.empty(limit, dtype=np.int64)
            found = found[: core.highest(scores, among, found)]
            places = np.flatnonzero(among)
            wanted = places[np.argsort(-scores[places], kind="stable")][:limit]
            assert found.tolist() == wanted.tolist()


def test_the_highest_of_runs_are_those_of_their_blocks() -> None:
    rng = np.random.default_rng(3)
    for size in (0, 1, 9, 400):
        for limit in (0, 1, size, 4 * size):
            scores, lengths = np.round(rng.normal(size=size), 4), rng.integers(1, 40, size)
            among = rng.random(size) < 0.8
            runs, offsets = np.empty((2, limit), dtype=np.int64)
            found = core.highest_of_runs(scores, lengths, among, runs, offsets)
            told = scores[runs[:found]] + offsets[:found] * DEPTH_TIE
            every = [
                score + offset * DEPTH_TIE
                for score, length, there in zip(scores, lengths, among, strict=True)
                for offset in range(length if there else 0)
            ]
            assert np.allclose(told, sorted(every, reverse=True)[:limit], atol=1e-12)
            assert len(set(zip(runs[:found].tolist(), offsets.tolist(), strict=False))) == found


def test_runs_end_where_a_link_or_a_value_says_so() -> None:
    rng = np.random.default_rng(5)
    for size in (0, 1, 31, 32, 33, 700):
        parent = np.arange(-1, size - 1, dtype=np.int32)
        depth, children = np.arange(size, dtype=np.int32), np.ones(size, dtype=np.uint32)
        columns = [np.zeros(size, dtype=kind) for kind in ("?", "u1", "u2", "f4", "f8")]
        for column in (parent, depth, children, *columns):
            places = rng.integers(0, max(1, size), size // 60)
            column[places] = rng.integers(0, 3, len(places))
        rows = np.flatnonzero(rng.random(size) < 0.97).astype(np.int32)
        starts = np.empty(len(rows), dtype=np.int64)
        marked = rng.random(len(rows)) < 0.05 if size % 2 else np.zeros(0, dtype=np.bool_)
        found = core.runs(parent, depth, children, rows, columns, marked, starts)
        begins = [
            at
            for at, row in enumerate(rows.tolist())
            if not at
            or (len(marked) and marked[at])
            or rows[at - 1] != row - 1
            or parent[row] != row - 1
            or parent[row - 1] < 0
            or depth[row] != depth[row - 1] + 1
            or children[row - 1] != 1
            or children[row] != 1
            or any(column[row] != column[row - 1] for column in columns)
        ]
        assert starts[:found].tolist() == begins


def test_keys_of_runs_are_those_of_blocks_that_are_there_still() -> None:
    keys, created = np.arange(10, 18, dtype=np.uint64), np.array([1.0] * 4 + [2.0] * 4)
    firsts, then = np.array([0, 4], dtype=np.int32), np.array([1.0, 2.0])
    runs, offsets = np.array([1, 1, 0]), np.array([3, 2, 1])
    marks, out = np.array([True, False]), np.empty((2, 3), dtype=np.uint64)
    told = core.keys_of_runs(firsts, then, runs, offsets, created, keys, 8, marks, *out)
    assert (told, out[0].tolist(), out[1, :1].tolist()) == ((3, 1), [25, 24, 3], [3])
    created[6] = 3.0  # another block has the row by now
    told = core.keys_of_runs(firsts, then, runs, offsets, created, keys, 8, marks, *out)
    assert (told, out[0, :2].tolist()) == ((2, 1), [25, 3])


def test_a_mark_is_looked_for_among_rows() -> None:
    marks, values = np.zeros(256, dtype=np.bool_), np.arange(200, dtype=np.uint8)
    marks[150] = True
    assert core.is_any(marks, values, np.array([3, 150], dtype=np.int32))
    assert not core.is_any(marks, values, np.array([3, 149], dtype=np.int32))
    rows = np.delete(np.arange(len(values), dtype=np.int32), [20, 21, 60])  # most are consecutive
    for row in range(len(values)):
        values[:] = 0
        values[row] = 150
        assert core.is_any(marks, values, rows) == (row in rows), row


def test_parents_are_found_among_rows_and_others_are_not() -> None:
    rows = np.array([2, 3, 4, 9, 12], dtype=np.int32)
    parent = np.array([-1, 2, 7, 4, 2], dtype=np.int32)
    assert places_of(rows, parent).tolist() == [5, 0, 5, 2, 0, 5]


def runs_of(rows: np.ndarray, begins: np.ndarray | None = None) -> int:
    begins = np.zeros(0, dtype=np.bool_) if begins is None else begins
    starts = np.zeros(4, dtype=np.int64)
    return core.runs(ROWS, ROWS, ROWS.view(np.uint32), rows, [], begins, starts)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: core.find(np.zeros(3, dtype=np.int32), KEYS, KEYS, ROWS),
        lambda: core.find(ROWS.astype(np.int64), KEYS, KEYS, ROWS),
        lambda: core.lower(np.zeros(3), np.array([5, 0, 0]), None),
        lambda: core.lower(np.zeros((3, 1)), np.zeros(4, dtype=np.int64), None),
        lambda: core.gather([np.zeros(3)], np.array([7], dtype=np.int32), [np.zeros(1)], 0),
        lambda: core.gather([np.zeros(3)], ROWS[:1], [np.zeros(1, np.int8)], 0),
        lambda: core.gather([np.zeros(3)], ROWS[:1], [np.zeros(1)], 1),
        lambda: runs_of(ROWS),
        lambda: runs_of(np.arange(4, dtype=np.int32), np.zeros(3, dtype=np.bool_)),
        lambda: core.is_any(np.zeros(256, np.uint8), np.zeros(3, np.uint8), ROWS + 3),
        lambda: core.is_any(np.zeros(9, np.uint8), np.zeros(9, np.uint8), ROWS),
        lambda: core.lru(np.array([0, 9]), ROWS, ROWS[:1], 4, 3, ROWS[:1].copy()),
        lambda: core.lru(np.array([0, 4]), ROWS + 7, ROWS[:1], 4, 3, ROWS[:1].copy()),
        lambda: core.LruStack([3]).use(ROWS, KEYS[:2]),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        wrong()


def test_a_pool_that_follows_nothing_is_refused_by_its_number() -> None:
    pools = core.RankedPools()
    for _ in range(16):
        pools.join(4)
    with pytest.raises(ValueError, match="at most 16"):
        pools.join(4)
    pools.leave(3)
    with pytest.raises(ValueError, match="pool 3 follows nothing"):
        pools.use_up(3)


def test_keys_with_gaps_between_them_are_found() -> None:
    """A field of records has a stride of its own, as the page's logs hand it over."""
    records = np.zeros(8, dtype=[("key", np.uint64), ("at", np.float64)])
    records["key"] = np.arange(100, 108, dtype=np.uint64)
    index = HashIndex(16)
    rows, _ = index.ensure(records["key"], lambda count: np.arange(count, dtype=np.int32))
    assert index.find(records["key"]).tolist() == rows.tolist() == list(range(8))
    assert index.find(records["key"][::-1]).tolist() == list(range(7, -1, -1))
    index.remove(rows[::2])
    assert index.find(records["key"]).tolist() == [-1, 1, -1, 3, -1, 5, -1, 7]


_WITHOUT = "import sys; sys.modules['kvgraph._graph'] = None\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KVGRAPH_")}
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT + program],
        capture_output=True, text=True, timeout=120, env=plain,
    )  # fmt: skip


def test_a_sidecar_says_in_a_line_what_it_lacks() -> None:
    done = run("from kvgraph.advisor.cli import main; main(['serve', '--http-port', '0'])")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("kvgraph: a sidecar")
    assert "kvgraph._graph" in line
    assert "C++ compiler" in line


def test_an_engine_needs_none_of_it() -> None:
    done = run(
        "import kvgraph.hooks.fake, kvgraph.hooks.link.client, kvgraph.graph.admission\n"
        "engine = kvgraph.hooks.fake.FakeEngine('ipc:///tmp/kvgraph-nobody')\n"
        "print(engine.client.dropped)"
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_thousand_segments_over_the_whole_prompt_cost_a_bounded_number_of_edges() -> None:
    graph, keys = KVCacheGraph(clock=lambda: 1.0), range(1, 1001)
    before = graph.tables.blocks.nbytes + graph.tables.edges.nbytes
    for request in range(3):
        segments = tuple(
            Segment(4, 0, SIZE * len(keys), None, None, f"{request}:{number}")
            for number in range(1024)
        )
        graph.apply("e", [started(f"r{request}", *keys, segments=segments)])
    blocks, edges = graph.tables.blocks, graph.tables.edges
    assert edges.counts[EdgeType.MEMORY_REF] <= 4 * len(keys)
    assert blocks.sums[EdgeType.MEMORY_REF].degree.max() <= 4
    assert blocks.nbytes + edges.nbytes - before < 2_000_000
    assert graph.counters["segments_left_out"] >= 3 * 1000
    graph.check_integrity()


def test_of_too_many_segments_the_most_precious_are_kept() -> None:
    whole = [Segment(9, 0, SIZE * 100)] * 500
    rules = Segment(int(SourceLayer.RULES), 0, SIZE)
    told = Told(started("r", *range(1, 101), segments=(*whole, rules)))
    assert told.graph.explain(1)["layer"] == "rules"


def test_many_short_segments_side_by_side_are_all_kept() -> None:
    tokens = SIZE * 100
    short = [Segment(4, at, at + 7, None, f"f{at}") for at in range(0, tokens - 7, 7)]
    told = Told(started("r", *range(1, 101), segments=(*short, Segment(7, 0, tokens))))
    assert told.graph.counters["segments_left_out"] == 0


def random_segment(rng: np.random.Generator, blocks: int) -> Segment:
    first, *_, end = np.sort(rng.integers(-2, SIZE * (blocks + 2), 3)).clip(0).tolist()
    end = min(end, first + 3 * SIZE)
    name, memory = rng.choice(["a", "b", ""], 2)
    return Segment(
        int(rng.integers(10)), first, end, rng.choice([None, 0.2, 0.9]), name or None,
        str(memory) or None, int(rng.integers(3)), rng.choice([None, 5.0, 50.0]),
    )  # fmt: skip


def test_segments_applied_together_leave_what_each_in_turn_leaves() -> None:
    rng, blocks = np.random.default_rng(7), 40
    written = ("layer", "importance", "stated", "raised_by", "identity", "chunk", "pinned_until")
    for _ in range(60):
        segments = [random_segment(rng, blocks) for _ in range(rng.integers(1, 14))]
        left = []
        for parts in ([segments], [[each] for each in sorted(segments, key=lambda x: -x.layer)]):
            told = Told(started("r", *range(1, blocks + 1), session="s", tenant="t"))
            tables, counters = told.graph.tables, Counter[str]()
            tables.pool_blocks[0] = 100 * blocks
            tagger = SegmentTagger(tables, LayerBook(tables), counters)
            rows = tables.blocks.find(np.arange(1, blocks + 1, dtype=np.uint64), tables.salt(0))
            for part in parts:
                request = started("q", *range(1, blocks + 1), segments=tuple(part))
                list(tagger.tag(0, request, rows, 0, 2.0))
            columns = [getattr(tables.blocks, each)[rows].tolist() for each in written]
            recalled = [(each.recalls, each.last_recalled) for each in tables.memory_facts.values()]
            edges = tables.edges.counts[EdgeType.MEMORY_REF]
            left.append((columns, counters, recalled, int(edges)))
        assert left[0] == left[1], segments


def test_of_too_many_leases_the_most_precious_blocks_get_theirs() -> None:
    told = Told(started("r", *range(1, 41)))
    tables = told.graph.tables
    tables.pool_blocks[0] = 40
    segments = [Segment(7, 0, 40 * SIZE, pinned_s=9.0), Segment(7, 0, 30 * SIZE, pinned_s=90.0)]
    rules = Segment(int(SourceLayer.RULES), 36 * SIZE, 40 * SIZE, pinned_s=30.0)
    told.graph.apply("e", [started("q", *range(1, 41), segments=(*segments, rules))])
    until = tables.blocks.pinned_until[:40]
    leased = np.flatnonzero(until > 1.0)
    assert len(leased) == int(tables.kept_share(0) * 40), "also where segments overlap"
    assert set(range(36, 40)) <= set(leased.tolist())
    assert until[0] > 90.0


def test_many_segments_are_applied_in_slices() -> None:
    graph, keys = KVCacheGraph(clock=lambda: 1.0), range(1, 1001)
    of_memories = tuple(
        Segment(4, SIZE * at, SIZE * (at + 1), None, None, f"m{at}") for at in range(len(keys))
    )
    graph.apply("e", [started("r0", *keys)])
    assert len(list(graph.slices("e", [started("r1", *keys, segments=of_memories)]))) > 100
    alternating = tuple(Segment(3 + at % 4, SIZE * at, SIZE * (at + 1)) for at in range(100))
    requests = [started(f"q{number}", *keys, segments=alternating) for number in range(20)]
    assert len(list(graph.slices("e", requests))) >= 10
    graph.check_integrity()


def test_tenants_beyond_the_limit_of_names_are_still_kept_apart() -> None:
    graph = KVCacheGraph(limits=GraphLimits(max_names=2), clock=lambda: 1.0)
    tenants = [f"tenant-{number}" for number in range(200)]
    for number, tenant in enumerate(tenants):
        keys = range(10 * number + 1, 10 * number + 4)
        start, _, end = turn_events("chat-1", *keys, request=tenant, tenant=tenant)
        graph.apply("e", [start, end])
    sessions = graph.tables.sessions
    assert (len(graph.tables.tenants), len(sessions)) == (2, len(tenants))
    with pytest.raises(GraphError, match="name one of"):
        graph.explain_session("chat-1")
    graph.apply("e", [SessionSignal("chat-1", tenants[4], ended=True)])
    ended = sessions.state[: sessions.size] == SessionState.ENDED
    assert ended.sum() == 1
    assert graph.explain_session("chat-1", tenants[4])["state"] == "ended"
    assert graph.explain_session("chat-1", tenants[5])["blocks"] == 3
    shown = {graph.explain(10 * number + 1)["tenant"] for number in range(200)}
    assert len(shown) == 200, "and they can be told apart"
    assert not any(flag & 2 for flag in graph.tables.blocks.flags), "no block is taken for shared"
    assert graph.counters["blocks_superseded"] == 0
    graph.check_integrity()


def test_nobody_can_aim_at_the_id_of_an_unnamed_tenant() -> None:
    ids = []
    for _ in range(2):
        graph = KVCacheGraph(limits=GraphLimits(max_names=1), clock=lambda: 1.0)
        graph.tables.tenants.intern("first")
        ids.append(graph.tables.tenants.intern("second"))
    assert ids[0] != ids[1]
    assert max(ids) < -1
