"""An engine that is gone is forgotten in slices; its memory is taken in slices, too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kvgraph.graph.errors import GraphError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.evictions import RowMark
from kvgraph.graph.tables.columns import refilled, taken_in_parts
from kvgraph.graph.types import MAX_ENGINES, Keys, Tier
from kvgraph.graph.wire.events import (
    BlocksCleared,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
)
from kvgraph_bench.graph.graphs import BLOCK_SIZE, chain_events, random_keys

POOL = 300_000


def pack(keys: Keys) -> bytes:
    return keys.astype("<u8").tobytes()


@pytest.fixture(scope="module")
def keys() -> Keys:
    return random_keys(np.random.default_rng(5), POOL)


@pytest.fixture
def graph(keys: Keys) -> KVCacheGraph:
    graph = KVCacheGraph(clock=lambda: 1000.0)
    graph.apply("e", [EngineHello("e", "m", BLOCK_SIZE, POOL, "v"), *chain_events(keys)])
    graph.apply("e", [BlocksSpilled(pack(keys[:1000]), int(Tier.WARM), 1)])
    graph.apply("other", [EngineHello("other", "m", BLOCK_SIZE, 64, "v")])
    graph.apply("other", [BlocksResident(pack(keys[-64:]))])
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


def test_it_goes_part_by_part_and_is_not_found_from_the_first_on(
    graph: KVCacheGraph, keys: Keys
) -> None:
    column, slices = graph.tables.engines["e"], graph.forgetting("e")
    next(slices)
    assert graph.engines == ["other"]
    assert graph.resident_count("e") == 0
    assert not graph.rank("e", 100).order.size
    counts = counts_of(graph, column, slices)
    lost = -np.diff([POOL, *counts])
    assert len(counts) > 2
    assert max(lost) < POOL / 2, "no slice takes most of them"
    assert counts[-1] == 0
    assert len(graph.tables.blocks) == POOL, "they are remembered"
    assert set(graph.rank("other", 64).order.tolist()) | set(
        graph.rank("other", 64).protected.tolist()
    ) == set(keys[-64:].tolist())


def test_its_requests_are_awaited_no_more_some_at_a_time(graph: KVCacheGraph) -> None:
    history, column = graph.tables.history, graph.tables.engines["e"]
    awaited = [len(history.running.of(column))]
    assert awaited[0] > 4_000
    awaited += [len(history.running.of(column)) for _ in graph.forgetting("e")]
    assert awaited[1] > 0, "no slice takes all of them"
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
    hello = EngineHello("e", "m", BLOCK_SIZE, POOL, "v")
    listed = [BlocksResident(pack(keys[:5000])), BlocksStored(pack(fresh), None, BLOCK_SIZE)]
    graph.apply("e", [hello, *listed])
    for _ in slices:
        graph.check_integrity()
    assert graph.resident_count("e") == 6000
    blocks = graph.tables.blocks
    resident = blocks.resident(graph.tables.engines["e"])
    expected = {*keys[:5000].tolist(), *fresh.tolist()}
    assert set(blocks.wire_keys(np.flatnonzero(resident).astype(np.int32)).tolist()) == expected
    assert graph.tables.pool_blocks[graph.tables.engines["e"]] == POOL


def test_nobody_is_given_its_column_before_the_last_slice() -> None:
    graph = KVCacheGraph()
    stored = BlocksStored(pack(np.arange(1, 3, dtype=np.uint64)), None, BLOCK_SIZE)
    for number in range(MAX_ENGINES):
        graph.apply(f"e{number}", [stored])
    slices = graph.forgetting("e3")
    next(slices)
    with pytest.raises(GraphError):
        graph.apply("new", [stored])
    assert list(slices) == []
    graph.apply("new", [])
    assert graph.tables.engines["new"] == 3
    assert graph.resident_count("new") == 0


def test_a_pool_that_is_emptied_is_emptied_part_by_part(graph: KVCacheGraph) -> None:
    column = graph.tables.engines["e"]
    counts = counts_of(graph, column, graph.slices("e", [BlocksCleared()]))
    assert len(set(counts)) > 2
    assert counts[-1] == 1000, "copies stay"
    assert graph.resident_count("other") == 64


def test_another_model_lets_go_of_the_old_ones_blocks_part_by_part(graph: KVCacheGraph) -> None:
    column = graph.tables.engines["e"]
    hello = EngineHello("e", "another", BLOCK_SIZE, POOL, "v")
    counts = counts_of(graph, column, graph.slices("e", [hello]))
    assert len(set(counts)) > 2
    assert counts[-1] == 0
    assert graph.tables.models[column] == "another"


def test_what_is_written_while_memory_is_taken_is_kept() -> None:
    values = np.arange(1 << 19, dtype=np.float64)
    taking, parts = taken_in_parts(values, 1 << 20), 0
    while True:
        try:
            next(taking)
        except StopIteration as over:
            room = over.value
            break
        parts += 1
        values[parts] = -1.0
    room = refilled(room, values)
    assert parts >= 7
    assert np.array_equal(room[: 1 << 19], values)
    assert not room[1 << 19 :].any()
