"""How much of a session's last chain its engine holds."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.stats import held_chains, shared_chains
from kvgraph.graph.types import NO_ROW, Tier
from kvgraph.graph.wire.events import BlocksRemoved, BlocksSpilled, EngineHello
from turns import turn_events
from wire_keys import pack

SIZE = 16
CHAIN = list(range(1, 9))


def held(graph: KVCacheGraph, session: str) -> tuple[int, int, int]:
    with graph.lock:
        sessions = graph.tables.sessions
        row = np.array([sessions.find(session, NO_ROW)])
        found = held_chains(graph.tables, sessions.tip[row], sessions.engine[row])
    return found.length[0], found.pool[0], found.copied[0]


def served(*engines: str) -> KVCacheGraph:
    """A session's only turn, at the last of these engines, all of whose blocks are in its pool."""
    graph = KVCacheGraph()
    for engine in engines:
        graph.apply(engine, [EngineHello(engine, "m", SIZE, 100, "")])
        graph.apply(engine, turn_events("s", *CHAIN, request="r"))
    return graph


def test_what_is_left_of_a_chain_is_counted_from_its_start() -> None:
    graph = served("e")
    assert held(graph, "s") == (8, 8, 8)
    graph.apply("e", [BlocksSpilled(pack(*CHAIN[:6]), int(Tier.WARM), 100)])
    graph.apply("e", [BlocksRemoved(pack(*CHAIN[4:]))])
    assert held(graph, "s") == (8, 4, 6)
    graph.apply("e", [BlocksRemoved(pack(*CHAIN))])
    assert held(graph, "s")[1] == 0


def test_what_a_store_has_counts_whoever_put_it_there() -> None:
    graph = served("other", "e")
    tips = graph.tables.sessions.tip[[graph.tables.sessions.find("s", NO_ROW)]]
    assert shared_chains(graph.tables, tips).tolist() == [0]
    graph.apply("other", [BlocksSpilled(pack(*CHAIN[:5]), int(Tier.POOL), 100)])
    assert shared_chains(graph.tables, tips).tolist() == [5]
    assert shared_chains(graph.tables, np.array([NO_ROW], dtype=np.int32)).tolist() == [0]


def test_another_engines_blocks_do_not_count() -> None:
    graph = served("other", "e")
    graph.apply("e", [BlocksRemoved(pack(*CHAIN))])
    assert held(graph, "s") == (8, 0, 0)


ENGINES, WINDOW, WINDOWS = 3, 64, 256


def grown(order: list[int], rng: random.Random, longest: int) -> tuple[Any, list[int]]:
    """Chains over rows in this order, some of which branch off another; and their last rows."""
    parent = np.full(len(order) + 1, NO_ROW, dtype=np.int32)  # the last one stands for NO_ROW
    depth = np.zeros(len(order) + 1, dtype=np.int32)
    tips, done = list[int](), list[int]()
    while len(done) < len(order):
        last = rng.choice(done) if done and rng.random() < 0.4 else NO_ROW
        for row in order[len(done) : len(done) + rng.randrange(1, longest)]:
            parent[row], depth[row] = last, 0 if last == NO_ROW else depth[last] + 1
            last = row
            done.append(row)
        tips.append(last)
    tiers = np.zeros((ENGINES, len(order) + 1), dtype=np.uint8)
    return SimpleNamespace(blocks=SimpleNamespace(parent=parent, depth=depth, tiers=tiers)), tips


def walked(tables: Any, tip: int, engine: int) -> tuple[tuple[int, int, int], int]:
    """What is held, row by row; and how many rows that took."""
    if tip == NO_ROW or engine < 0:
        return (0, 0, 0), 0
    blocks, found, steps = tables.blocks, [int(tables.blocks.depth[tip]) + 1], 0
    for tiers in (int(Tier.HOT), int(Tier.HOT | Tier.WARM | Tier.COLD)):
        row = tip
        while row != NO_ROW and not blocks.tiers[engine, row] & tiers:
            row, steps = int(blocks.parent[row]), steps + 1
        found.append(0 if row == NO_ROW else int(blocks.depth[row]) + 1)
    return (found[0], found[1], found[2]), steps


def ordered(count: int, rng: random.Random) -> list[int]:
    """Rows as they come, backwards, in stretches, or anyhow."""
    rows = list(range(count))
    kind = rng.randrange(4)
    if kind == 1:
        rows.reverse()
    elif kind == 2:
        parts = [rows[at : at + 37] for at in range(0, count, 37)]
        rng.shuffle(parts)
        rows = [row for part in parts for row in part]
    elif kind == 3:
        rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("round_", range(40))
def test_windows_find_what_a_walk_row_by_row_finds(round_: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng = random.Random(seed)
    tables, tips = grown(ordered(rng.choice([1, 64, 65, 2000]), rng), rng, 300)
    share = rng.choice([0.0, 0.002, 0.05, 0.5, 1.0])
    for engine in range(ENGINES):
        for row in range(tables.blocks.tiers.shape[1]):  # also what stands for no row
            tables.blocks.tiers[engine, row] = rng.randrange(1, 8) if rng.random() < share else 0
    tips = [*tips, NO_ROW]
    engines = [rng.randrange(-1, ENGINES) for _ in tips]
    found = held_chains(tables, np.array(tips, dtype=np.int32), np.array(engines, dtype=np.int8))
    for *numbers, tip, engine in zip(*found, tips, engines, strict=True):
        wanted, steps = walked(tables, tip, engine)
        if steps < WINDOWS or numbers[0]:  # of one that lost more, nothing may be said
            assert tuple(numbers) == wanted


@pytest.mark.parametrize(("step", "longest"), [(1, WINDOW * WINDOWS), (2, WINDOWS)])
def test_a_chain_is_followed_so_far_and_no_further(step: int, longest: int) -> None:
    """In consecutive rows, and where each row stands apart: the bound is on windows."""
    for length, known in ((longest, True), (longest + 1, False)):
        rows = np.arange(length) * step
        tables, _ = grown(list(range(int(rows[-1]) + 1)), random.Random(1), 2)
        tables.blocks.parent[:] = NO_ROW
        tables.blocks.parent[rows[1:]] = rows[:-1]
        tables.blocks.depth[rows] = np.arange(length)
        for held in (NO_ROW, int(rows[0])):  # nothing is left of it, or its first block
            tables.blocks.tiers[0] = 0
            if held != NO_ROW:
                tables.blocks.tiers[0, held] = int(Tier.HOT)
            tip = np.array([rows[-1]], dtype=np.int32)
            found = held_chains(tables, tip, np.array([0], dtype=np.int8))
            left = int(held != NO_ROW)
            wanted = (length, left, left) if known else (0, 0, 0)
            assert tuple(int(column[0]) for column in found) == wanted
