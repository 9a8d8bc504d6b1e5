"""Rows, edges, sessions and names under growth, reuse and hostile input."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgraph.graph.compiled import core
from kvgraph.graph.errors import GraphError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.blocks import BlockTable
from kvgraph.graph.tables.columns import Columns, RowPool, column
from kvgraph.graph.tables.hash_index import HashIndex
from kvgraph.graph.tables.sessions import QuietRows, SessionTable
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import NO_ROW, Keys, Rows, Tier, as_keys
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksAttended,
    BlocksEmbedded,
    BlocksRemoved,
    BlocksResident,
    BlocksStored,
    RequestFinished,
    RequestStarted,
)
from turns import Told, removed, spilled, started, stored, turn_events
from wire_keys import pack


def spread(numbers: Iterable[int]) -> Keys:
    """Keys that differ in their high bits."""
    return np.array([number * 2**55 + number for number in numbers], np.uint64)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 300), max_size=60)), max_size=40))
def test_the_index_is_a_dict(script: list[tuple[bool, set[int]]]) -> None:
    index, model, fresh = HashIndex(16), dict[int, int](), 0
    for adds, numbers in script:
        keys = spread(sorted(numbers)).tolist()
        if adds:
            new = [key for key in keys if key not in model]
            rows = list(range(fresh, fresh + len(new)))
            fresh += len(new)
            list(index.growing(max(fresh, 16)))
            index.insert(np.array(new, np.uint64), np.array(rows, np.int32))
            model.update(zip(new, rows, strict=True))
        else:
            gone = [model.pop(key) for key in keys if key in model]
            index.remove(np.array(gone, np.int32))
        assert len(index) == len(model)
        probe = spread(range(301))
        assert index.find(probe).tolist() == [model.get(key, NO_ROW) for key in probe.tolist()]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 80), max_size=40), max_size=12), st.data())
def test_the_index_adds_what_it_lacks_in_the_order_of_its_first_appearance(
    batches: list[list[int]], data: st.DataObject
) -> None:
    index, model, rows = HashIndex(1024), dict[int, int](), RowPool()
    for batch in batches:
        keys, known = spread(batch), set(model)
        for key in keys.tolist():
            model.setdefault(key, len(model))
        found, added = index.ensure(keys, rows.take)
        assert found.tolist() == [model[key] for key in keys.tolist()]
        assert added.tolist() == [key not in known for key in keys.tolist()]
    gone = data.draw(st.sets(st.sampled_from(sorted(model)))) if model else set()
    index.remove(np.array([model[key] for key in sorted(gone)], np.int32))
    found = index.find(np.array(list(model), np.uint64)).tolist()
    assert found == [NO_ROW if key in gone else row for key, row in model.items()]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 80), max_size=40), max_size=8))
def test_an_index_takes_what_was_looked_for_as_what_was_not(batches: list[list[int]]) -> None:
    one, other, ones, others = HashIndex(1024), HashIndex(1024), RowPool(), RowPool()
    for batch in batches:
        keys = spread(batch)
        expected, fresh = one.ensure(keys, ones.take)
        rows = other.find(keys)
        unknown = int(np.count_nonzero(rows == NO_ROW))
        new = other.complete(keys, rows, unknown, others.take, np.zeros(1024, dtype=np.bool_))
        assert rows.tolist() == expected.tolist()
        assert new.tolist() == fresh.tolist()
        assert len(one) == len(other)
        gone = rows[: len(rows) // 2]
        one.remove(np.unique(gone))
        other.remove(np.unique(gone))


def test_an_index_without_room_for_new_rows_is_as_it_was() -> None:
    index, keys = HashIndex(1024), np.arange(10, dtype=np.uint64)
    index.ensure(keys[:3], lambda count: np.arange(count, dtype=np.int32))

    def full(count: int) -> Rows:
        raise MemoryError

    with pytest.raises(MemoryError):
        index.ensure(keys, full)
    assert index.find(keys).tolist() == [0, 1, 2] + [NO_ROW] * 7
    assert len(index) == 3


def test_an_index_finds_what_stands_beyond_a_full_group_that_lost_a_key() -> None:
    scrambled = np.arange(40, dtype=np.uint64) << np.uint64(24)  # of one group, and one way on
    keys = scrambled * np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
    index, rows = HashIndex(1024), np.arange(40, dtype=np.int32)
    index.insert(keys, rows)
    left = rows.copy()
    for gone in np.random.default_rng(1).permutation(rows):
        index.remove(np.array([gone], dtype=np.int32))
        left[gone] = NO_ROW
        assert index.find(keys).tolist() == left.tolist()


def test_an_index_whose_keys_come_and_go_is_rarely_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashIndex, "rebuild", None)
    index, rows = HashIndex(1024), RowPool()
    keys = np.random.default_rng(2).integers(1, 1 << 63, (400, 50), dtype=np.uint64)
    held = [index.ensure(batch, rows.take)[0] for batch in keys[:4]]
    for batch in keys[4:]:
        index.remove(held[0])
        rows.give_back(held.pop(0))
        held.append(index.ensure(batch, rows.take)[0])
    assert sorted(index.rows()) == sorted(np.concatenate(held))


class Shelf(Columns):
    width: Rows = column(np.int32, 7)
    label: Rows = column(np.int32, NO_ROW, rare=True)


def test_a_rare_column_takes_no_room_before_it_is_written() -> None:
    shelf = Shelf(4)
    assert shelf.columns_nbytes(4) == 4 * 4
    shelf.grow(8)
    assert shelf.label.tolist() == [NO_ROW] * 8
    with pytest.raises(ValueError, match="read-only"):
        shelf.label[2] = 5
    shelf.for_writing("label")[2] = 5
    shelf.grow(10)
    shelf.refresh(np.arange(8, 10, dtype=np.int32))
    assert shelf.label.tolist() == [NO_ROW, NO_ROW, 5] + [NO_ROW] * 5 + [NO_ROW] * 2
    assert shelf.columns_nbytes(10) == 2 * 4 * 10


def test_a_column_comes_back_as_it_was_and_a_rare_one_of_nothing_takes_no_room() -> None:
    shelf, empty, full = Shelf(3), Shelf(5), Shelf(5)
    shelf.width[:] = [1, 2, 3]
    empty.fill(shelf.views(3), 3)
    assert empty.columns_nbytes(5) == 4 * 5
    shelf.for_writing("label")[1] = 9
    full.fill(shelf.views(3), 3)
    assert full.width[:3].tolist() == [1, 2, 3]
    assert full.label.tolist() == [NO_ROW, 9, NO_ROW, NO_ROW, NO_ROW]


def test_ghosts_are_remembered_up_to_their_limit_the_latest_used_longest() -> None:
    told = Told(limits=GraphLimits(max_ghosts=100))
    for batch in range(40):
        told.now += 1
        keys = range(1000 * batch + 1, 1000 * batch + 21)
        told.tell(stored(*keys), removed(*keys))
        assert len(told.graph.tables.blocks) <= 145
    assert told.graph.explain(39_001)["tiers"] == {}
    with pytest.raises(GraphError, match="long forgotten"):
        told.graph.explain(1)


def test_a_block_that_returns_has_its_history() -> None:
    told = Told(stored(1), started("r", 1, found=1, session="s"), removed(1))
    told.tell(stored(1))
    assert told.graph.explain(1)["hits"] == 1


@pytest.mark.parametrize(
    "events",
    [
        [stored(1, 2, 3, behind=3)],
        [stored(1, behind=1)],
        [stored(1, behind=2), stored(2, behind=1)],
        [stored(1, 2), stored(3, 1, behind=2)],
        [stored(1, 1, 1)],
        [stored(9, behind=8), stored(8, behind=7), stored(7, behind=9)],
    ],
)
def test_cycles_cannot_be_made(events: list[BlocksStored]) -> None:
    told = Told(*events)
    for event in events:
        told.tell(event)
    assert told.order()


class Visited(np.ndarray):  # type: ignore[type-arg]
    """A column that counts how many of its values are looked at."""

    rows = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Visited.rows += getattr(found, "size", 1)
        return found


def rows_visited(graph: KVCacheGraph, event: AnyEvent) -> int:
    """How many values of the columns that chains are made of one event costs."""
    blocks, Visited.rows = graph.tables.blocks, 0
    blocks.parent, blocks.depth = blocks.parent.view(Visited), blocks.depth.view(Visited)
    graph.apply("e", [event])
    blocks.parent, blocks.depth = blocks.parent.view(np.ndarray), blocks.depth.view(np.ndarray)
    return Visited.rows


A_KEY_COSTS = 64  # values of two columns, at most
OTHERS = 50_000


def crowded(*chains: range) -> KVCacheGraph:
    """A graph that knows some chains, and many blocks behind the first of them."""
    graph = KVCacheGraph()
    for chain in chains:
        graph.apply("e", [stored(*chain)])
    for start in range(10**6, 10**6 + OTHERS, 500):
        graph.apply("e", [stored(*range(start, start + 500), behind=chains[0][-1])])
    return graph


@pytest.mark.parametrize("length", [1, 2, 47, 48, 64, 250, 3000])
def test_a_chain_told_behind_its_own_end_costs_what_it_says_and_only_once(length: int) -> None:
    chain = range(1, length + 1)
    graph = crowded(chain)
    parents = graph.tables.blocks.parent[:length].tolist()
    bad = stored(*chain, behind=chain[-1])
    assert rows_visited(graph, bad) <= A_KEY_COSTS * (length + 8)
    assert graph.tables.blocks.parent[:length].tolist() == parents, "what was known stays"
    for turn in range(3):
        begun = started(f"r{turn}", *chain, 10**7 + turn, more=1, session=f"s{turn}")
        assert rows_visited(graph, begun) <= A_KEY_COSTS * (length + 8)
    graph.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 48, 1000])
def test_a_ring_of_blocks_whose_beginning_nobody_told_is_cut_once(length: int) -> None:
    graph = crowded(range(1, 3))
    ring = range(10, 10 + length)
    for place, key in enumerate(ring):  # each behind the next, the last behind the first
        behind = ring[(place + 1) % length]
        seen = rows_visited(graph, stored(key, behind=behind))
        assert seen <= A_KEY_COSTS * (place + 8), "those above it may have to rise"
    graph.check_integrity()
    assert graph.counters["links_refused"] == 1
    linked = sum(graph.tables.blocks.parent[row] != NO_ROW for row in rows_of(graph, ring))
    assert linked == length - 1


def test_chains_that_cross_cost_what_they_say() -> None:
    one, other = range(1, 301), range(301, 601)
    graph = crowded(one, other)
    for crossing in ((*one, *other), (*other, *one), (*one[::-1],), (*one[::2], *other[::-1])):
        for behind in (None, one[-1], other[-1], 10**6 + 499):
            seen = rows_visited(graph, stored(*crossing, behind=behind))
            assert seen <= A_KEY_COSTS * len(crossing)
            graph.check_integrity()
        begun = started("r", *crossing, more=1, session="s")
        assert rows_visited(graph, begun) <= A_KEY_COSTS * len(crossing)
        graph.check_integrity()
    depths = graph.tables.blocks.depth[rows_of(graph, one)]
    assert depths.tolist() == list(range(300))


def test_a_long_chain_without_a_beginning_cannot_be_made_to_rise_for_ever() -> None:
    """Each of these events wants all that stands above it to make room."""
    graph = KVCacheGraph()
    long = range(1, 100_001)
    graph.apply("e", [stored(*long, behind=10**9)])
    for key in range(10**6, 10**6 + 50):
        graph.apply("e", [stored(key + 10**6, behind=key)])
    ends = list(range(10**6, 10**6 + 50))
    seen = rows_visited(graph, stored(*ends, behind=long[-1]))
    assert seen <= 4 * (1 << 14) + A_KEY_COSTS * 50
    graph.check_integrity()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_chain_told_in_pieces_in_any_order_is_whole_in_the_end(data: st.DataObject) -> None:
    length = data.draw(st.integers(2, 40))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(1, length - 1), max_size=8))})
    pieces = [range(a + 1, b + 1) for a, b in itertools.pairwise(cuts)]
    graph = KVCacheGraph()
    for piece in data.draw(st.permutations(pieces)):
        graph.apply("e", [stored(*piece, behind=piece[0] - 1 or None)])
        graph.apply("e", [stored(1000 + piece[0], behind=piece[-1])])  # a branch
        graph.check_integrity()
    rows = rows_of(graph, range(1, length + 1))
    assert graph.tables.blocks.parent[rows].tolist() == [NO_ROW, *rows[:-1]]
    branches = rows_of(graph, [1000 + piece[0] for piece in pieces])
    ends = rows_of(graph, [piece[-1] for piece in pieces])
    assert graph.tables.blocks.parent[branches].tolist() == ends
    graph.apply("e", [started("r", *range(1, length + 1), session="s")])
    graph.check_integrity()
    assert graph.tables.blocks.depth[rows].tolist() == list(range(length))
    assert graph.counters["links_refused"] == 0


def rows_of(graph: KVCacheGraph, keys: Iterable[int]) -> list[int]:
    found: list[int] = graph.tables.blocks.find(np.array(list(keys), dtype=np.uint64)).tolist()
    return found


contrary_chains = st.lists(
    st.lists(st.integers(1, 8), min_size=1, max_size=6).map(
        lambda keys: started("r", *keys, session="s")
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(contrary_chains, st.booleans())
def test_prompts_that_contradict_each_other_break_nothing(
    turns: list[RequestStarted], together: bool
) -> None:
    graph = KVCacheGraph()
    for batch in [turns] if together else [[turn] for turn in turns]:
        graph.apply("e", batch)
        graph.check_integrity()
    repeated = sum(len(set(keys_of(turn))) < len(keys_of(turn)) for turn in turns)
    assert graph.counters["events_refused"] == repeated
    assert graph.counters["requests"] == len(turns) - repeated


def keys_of(turn: RequestStarted) -> list[int]:
    keys: list[int] = np.frombuffer(turn.hashes, "<u8").tolist()
    return keys


def test_a_chain_of_a_million_blocks_is_walked_without_recursion() -> None:
    graph, length, tokens = KVCacheGraph(), 1_000_000, 16_000_000
    keys = np.arange(1, length + 1, dtype="<u8").tobytes()
    started = RequestStarted("r", keys, tokens, 0, 16, "s")
    graph.apply("e", [started, BlocksStored(keys, None, 16, "s")])
    graph.apply("e", [RequestFinished("r", keys, tokens, tokens, "stop", "s")])
    graph.apply("e", [RequestStarted("q", pack(1, 2 * length), 32, 0, 16, "s")])
    assert graph.explain(length // 2)["superseded"]
    assert graph.rank("e", 2).order.tolist() == [length, length - 1]


@pytest.mark.parametrize(
    "event",
    [
        BlocksStored(b"\0" * 7, None, 16),
        BlocksRemoved(b"\0" * 9),
        BlocksResident(b"\0" * 3),
        RequestStarted("r", b"\0" * 12, 16, 0, 16, "s"),
        RequestStarted("r", pack(1, 1), 32, 0, 16, "s"),
        spilled(1, tier=3),
        BlocksEmbedded(pack(1), 4, b"\0" * 7),
        *(
            BlocksAttended(pack(1), np.array([mass], dtype="<f4").tobytes())
            for mass in (3e38, -1.0, np.nan, np.inf)
        ),
    ],
)
def test_events_without_meaning_change_nothing_and_are_counted(event: object) -> None:
    graph = KVCacheGraph()
    graph.apply("e", [event])
    assert len(graph.tables.blocks) == 0
    assert graph.counters["events_refused"] == 1


def alike(graph: KVCacheGraph, key: int) -> dict[str, float]:
    links = [link for link in graph.neighbors(key) if link["type"] == "semantic"]
    return {link["node"]: link["weight"] for link in links}


def test_near_embeddings_are_linked_and_far_ones_are_not() -> None:
    told = Told(*(stored(key) for key in (1, 2, 3)))
    vectors = np.array([[1, 0, 0, 0], [0.98, 0.1, 0, 0], [0, 1, 0, 0]], dtype="<f2")
    told.tell(BlocksEmbedded(pack(1, 2, 3), 4, vectors.tobytes()))
    assert alike(told.graph, 1) == {f"{2:#018x}": pytest.approx(0.995, abs=0.01)}
    assert not alike(told.graph, 3)


def test_embeddings_of_two_tenants_are_not_linked() -> None:
    told = Told(started("r", 1, 2, tenant="acme"), started("q", 3, tenant="zeta"))
    told.tell(BlocksEmbedded(pack(1, 2, 3), 4, np.ones((3, 4), dtype="<f2").tobytes()))
    assert set(alike(told.graph, 1)) == {f"{2:#018x}"}
    assert not alike(told.graph, 3)


def test_sessions_are_reused_when_full_the_quietest_first() -> None:
    told = Told(limits=GraphLimits(max_sessions=3))
    for number in range(6):
        told.now += 1
        told.turn(f"s{number}", number + 1)
    assert sorted(told.graph.tables.sessions.names) == ["s3", "s4", "s5"]
    assert told.graph.explain(1)["session"] is None


def test_residency_columns_are_made_when_engines_come() -> None:
    graph = KVCacheGraph()
    graph.apply("first", [stored(*range(1, 3001))])
    alone = graph.tables.blocks.nbytes
    for number in range(20):
        graph.apply(f"e{number}", [stored(number + 1)])
    assert len(graph.tables.blocks.tiers) == 21
    assert graph.tables.blocks.nbytes - alone <= 20 * 1.3 * 3000
    assert graph.rank("e19", 5).order.tolist() == [20]
    assert set(graph.explain(20)["tiers"]) == {"first", "e19"}
    graph.check_integrity()


SESSIONS = 1_024  # four are chosen at a time


def test_the_longest_quiet_go_first_and_nobody_who_runs_or_came_back() -> None:
    rows, running = QuietRows(), np.zeros(1_000, dtype=np.int32)
    last_seen = np.arange(1_000, dtype=np.float64)
    running[1] = 1
    row, chosen = rows.take(running, last_seen)
    assert row == 0
    assert chosen.tolist() == [0, 2, 3]
    last_seen[2], running[0] = 5_000.0, 1  # row 2 came back meanwhile
    assert rows.take(running, last_seen)[0] == 3
    last_seen[3] = 5_001.0
    row, chosen = rows.take(running, last_seen)
    assert row == 4
    assert chosen.tolist() == [4, 5, 6]
    running[:] = 1
    assert rows.take(running, last_seen)[0] in range(1_000), "all run: somebody has to go"


def test_no_block_names_a_session_whose_row_another_one_has() -> None:
    now = [0.0]
    graph = KVCacheGraph(limits=GraphLimits(max_sessions=SESSIONS), clock=lambda: now[0])
    for number in range(2 * SESSIONS + 7):
        now[0] += 1.0
        graph.apply("e", turn_events(f"s{number}", 1 + 2 * number, 2 + 2 * number, tenant=""))
        if number == SESSIONS:
            graph.apply("e", turn_events("s2", 5, 6, tenant=""))  # which was to go next
    tables = graph.tables
    assert len(tables.sessions) == SESSIONS
    walked = tables.blocks.session[: tables.blocks.size]
    for row in np.unique(walked[walked != NO_ROW]).tolist():
        number = int(tables.sessions.names[row][1:])
        keys = {1 + 2 * number, 2 + 2 * number}
        assert set(tables.blocks.keys[np.flatnonzero(walked == row)].tolist()) <= keys
    graph.check_integrity()


def test_the_sessions_of_some_blocks_are_found_without_a_look_at_the_others() -> None:
    sessions = SessionTable(10)
    rows = [sessions.ensure(f"s{number}", NO_ROW, 0.0) for number in range(5)]
    for row in rows:
        sessions.begin_turn(row, 0, float(row), 10)
        sessions.end_turn(row, NO_ROW, float(row), 10, 20)
    of_blocks = np.array([3, NO_ROW, 1, 3], dtype=np.int32)
    found = sessions.among(of_blocks)
    assert found.tolist() == [1, 3]
    everybody = sessions.credit(9.0, 300.0, np.array(rows, dtype=np.int32))
    assert sessions.credit(9.0, 300.0, found).tolist() == everybody[[1, 3]].tolist()
    assert sessions.among(of_blocks[1:2]).tolist() == []


def test_compiled_loops_follow_columns_that_are_replaced() -> None:
    sessions, blocks = SessionTable(10), BlockTable()
    row = sessions.ensure("s", NO_ROW, 0.0)
    rows, _ = blocks.ensure(as_keys([5, 6]), 0.0)
    for _ in range(2):
        sessions.begin_turn(row, 0, 1.0, 10)
        core.walk(blocks, rows, 2, 16, 1.0)
        sessions.grow(2 * len(sessions.state))
        blocks.grow(2 * len(blocks.alive))
    assert sessions.running[row] == 2
    assert blocks.walkers[rows].tolist() == blocks.hit_count[rows].tolist() == [2, 2]


def test_compiled_loops_refuse_what_is_no_table_of_theirs() -> None:
    blocks, sessions, rows = BlockTable(), SessionTable(10), np.zeros(1, dtype=np.int32)
    with pytest.raises(TypeError, match="bound"):
        core.begin_walk(sessions, sessions, 0, rows, 0, 0.0, 0, True)
    with pytest.raises(AttributeError):
        core.begin_walk(None, sessions, 0, rows, 0, 0.0, 0, True)
    with pytest.raises(TypeError, match="row"):
        core.begin_turn(sessions, len(sessions.state), 0, 0.0, 0, NO_ROW, NO_ROW)
    with pytest.raises(TypeError, match="engine"):
        core.block(blocks, len(blocks.tiers), 0)


def test_a_key_is_not_found_beside_another_in_a_row_that_is_no_longer_in_use() -> None:
    blocks = BlockTable()
    rows, _ = blocks.ensure(as_keys([5, 6]), 0.0)
    blocks.release(rows[1:])
    _, new = blocks.ensure(as_keys([5, 6]), 1.0)
    assert new.tolist() == [False, True]


def test_blocks_leave_a_pool_in_any_order_and_once() -> None:
    blocks, keys = BlockTable(), [5, 6, 7, 8, 9]
    rows, _ = blocks.ensure(as_keys(keys), 0.0)
    blocks.mark(0, rows[:4], Tier.HOT)
    left = blocks.unhold(0, as_keys([8, 7, 6, 6, 5, 7, 9, 1]), np.uint64(0))
    assert left.tolist() == rows[:4].tolist()
    assert not blocks.resident(0).any()
