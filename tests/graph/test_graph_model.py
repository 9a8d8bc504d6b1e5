"""Random event sequences against a graph made of plain dicts and sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import EDGE_NAMES, NO_ROW, PROTECTED_LAYERS, BlockFlag, Tier
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import (
    BlocksAttended,
    BlocksCleared,
    BlocksStored,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)
from naive_graph import SIZE, NaiveGraph
from turns import dropped, finished, loaded, removed, resident, spilled, stored
from wire_keys import pack

ENGINES = ("one", "two")
# A tree of prompts: key → parent. Keys 1.. form three branches below a shared stem.
PARENT: dict[int, int | None] = {1: None, 2: 1, 3: 2}
for branch in range(3):
    for step in range(6):
        key = 10 * (branch + 1) + step
        PARENT[key] = 3 if step == 0 else key - 1
PARENT[90] = None
KEYS = sorted(PARENT)


def chain(key: int) -> list[int]:
    """From the start of the prompt to ``key``."""
    path: list[int] = []
    at: int | None = key
    while at is not None:
        path.append(at)
        at = PARENT[at]
    return path[::-1]


keys_of_tree = st.sampled_from(KEYS)
sessions = st.sampled_from(["s", "t", None])
returns = st.sampled_from([None, 1.0, 60.0])
some_keys = st.lists(keys_of_tree, min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def stores(draw: st.DrawFn) -> BlocksStored:
    path = chain(draw(keys_of_tree))
    start = draw(st.integers(0, len(path) - 1))
    behind = path[start - 1] if start else None
    return stored(*path[start:], behind=behind, session=draw(sessions))


@st.composite
def starts(draw: st.DrawFn) -> RequestStarted:
    path = chain(draw(keys_of_tree))
    tokens = len(path) * SIZE
    segments = tuple(draw(st.lists(segment(tokens), max_size=2)))
    name, cached = f"r{draw(st.integers(0, 3))}", draw(st.integers(0, tokens))
    return RequestStarted(
        name, pack(*path), tokens, cached, SIZE, draw(sessions), segments=segments
    )


@st.composite
def segment(draw: st.DrawFn, tokens: int) -> Segment:
    start = draw(st.integers(0, tokens))
    end = draw(st.integers(start, tokens))
    importance = draw(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])))
    memory = draw(st.sampled_from([None, "m1", "m2"]))
    if start == end:
        memory = None
    return Segment(draw(st.integers(0, 9)), start, end, importance, None, memory)


@st.composite
def ends(draw: st.DrawFn) -> RequestFinished:
    path = chain(draw(keys_of_tree))
    name, prompt = f"r{draw(st.integers(0, 3))}", draw(st.integers(0, len(path)))
    return finished(
        name, *path, prompt=prompt, session=draw(sessions), waiting_for_tool=draw(st.booleans()),
        expected_return_s=draw(returns), session_ended=draw(st.booleans()),
    )  # fmt: skip


colder = st.sampled_from([int(each) for each in (Tier.WARM, Tier.COLD, Tier.POOL)])
events = st.one_of(
    stores(),
    stores(),
    starts(),
    ends(),
    some_keys.map(lambda keys: removed(*keys)),
    some_keys.map(lambda keys: removed(*keys)),
    some_keys.map(lambda keys: resident(*keys)),
    some_keys.map(lambda keys: loaded(*keys)),
    some_keys.map(lambda keys: BlocksAttended(pack(*keys), b"\0\0\x80\x3f" * len(keys))),
    st.builds(lambda keys, tier: spilled(*keys, tier=tier), some_keys, colder),
    st.builds(lambda keys, tier: dropped(*keys, tier=tier), some_keys, colder),
    st.just(BlocksCleared()),
    st.builds(
        SessionSignal, st.sampled_from("st"), st.none(), st.booleans(), returns, st.booleans()
    ),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(ENGINES), st.lists(events, min_size=1, max_size=6)),
        # Turns that follow each other are applied as one vector.
        st.tuples(
            st.sampled_from(ENGINES),
            st.lists(st.one_of(starts(), ends()), min_size=2, max_size=8),
        ),
        st.tuples(st.just("forget"), st.sampled_from(ENGINES)),
        st.tuples(st.just("sleep"), st.sampled_from([1.0, 45.0])),
    ),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_columns_and_dicts_agree_on_every_event_sequence(script: list[tuple[str, Any]]) -> None:
    now = [1000.0]
    graph, naive = KVCacheGraph(clock=lambda: now[0]), NaiveGraph()
    for subject, action in script:
        if subject == "forget":
            if action in graph.engines:
                naive.forget(action)
            graph.forget_engine(action)
        elif subject == "sleep":
            now[0] += action
        else:
            graph.apply(subject, action)
            for event in action:
                naive.apply(subject, event, now[0])
                if isinstance(event, BlocksStored | RequestStarted):
                    naive.known_size |= set(np.frombuffer(event.hashes, "<u8").tolist())
            naive.fade(now[0])
        graph.check_integrity()
    compare(graph, naive)
    check_rankings(graph)


def compare(graph: KVCacheGraph, naive: NaiveGraph) -> None:
    assert blocks_of(graph) == {
        key: (
            block.parent, block.layer, pytest.approx(block.importance), block.hits, block.walkers,
            block.session, block.shared, block.superseded,
            {engine: bits for engine, bits in block.tiers.items() if bits},
        )
        for key, block in naive.blocks.items()
    }  # fmt: skip
    assert edges_of(graph) == {
        edge: pytest.approx(weight, rel=1e-4) for edge, weight in naive.edges.items()
    }
    assert sessions_of(graph) == {
        name: (session.state, session.turns, session.running, session.tip)
        for name, session in naive.sessions.items()
    }


def blocks_of(graph: KVCacheGraph) -> dict[int, tuple[Any, ...]]:
    blocks, sessions = graph.tables.blocks, graph.tables.sessions
    found = {}
    for row in blocks.live_rows().tolist():
        parent, session = int(blocks.parent[row]), int(blocks.session[row])
        tiers = {name: int(blocks.tiers[e, row]) for name, e in graph.tables.engines.items()}
        found[int(blocks.keys[row])] = (
            None if parent == NO_ROW else int(blocks.keys[parent]),
            int(blocks.layer[row]), float(blocks.importance[row]),
            int(blocks.hit_count[row]), int(blocks.walkers[row]),
            None if session == NO_ROW else sessions.names[session],
            bool(blocks.flags[row] & BlockFlag.SHARED),
            bool(blocks.flags[row] & BlockFlag.SUPERSEDED),
            {name: bits for name, bits in tiers.items() if bits},
        )  # fmt: skip
    return found


def edges_of(graph: KVCacheGraph) -> dict[tuple[str, Any, Any], float]:
    keys = graph.tables.blocks.keys
    found = {}
    for edge in graph.tables.all_edges.all():
        kind, source, node = EDGE_NAMES[edge.kind], int(keys[edge.source]), edge.target
        target: Any = int(keys[node]) if kind not in ("spill_link", "memory_ref") else node
        if kind == "spill_link":
            target = (int(keys[node >> 1]), 4 if node & 1 else 2)
        if kind == "memory_ref":
            target = graph.tables.memories.name(node)
        if kind == "co_attend":
            source, target = sorted((source, target))
        found[kind, source, target] = edge.weight
    return found


def sessions_of(graph: KVCacheGraph) -> dict[str, tuple[Any, ...]]:
    sessions, keys = graph.tables.sessions, graph.tables.blocks.keys
    return {
        name: (
            int(sessions.state[row]), int(sessions.turns[row]),
            int(sessions.running[row]),
            None if sessions.tip[row] == NO_ROW else int(keys[sessions.tip[row]]),
        )
        for row, name in enumerate(sessions.names)
    }  # fmt: skip


def row_of(graph: KVCacheGraph, key: int) -> int:
    return int(graph.tables.blocks.find(np.array([key], np.uint64))[0])


def is_read(graph: KVCacheGraph, column: int, key: int) -> bool:
    """Whether a running request of the engine reads the block, as far as is known."""
    blocks, sessions, row = graph.tables.blocks, graph.tables.sessions, row_of(graph, key)
    session = int(blocks.session[row])
    if session == NO_ROW or sessions.running[session] == 0 or sessions.engine[session] != column:
        return False
    used = max(blocks.last_attended[row], blocks.last_hit[row])
    return bool(used >= sessions.started[session])


def check_rankings(graph: KVCacheGraph) -> None:
    """Every block that is not read is ranked once, protected ones apart, children first."""
    blocks = graph.tables.blocks
    for engine, column in graph.tables.engines.items():
        ranking = graph.rank(engine, 1000)
        ranked = ranking.order.tolist() + ranking.protected.tolist()
        resident = blocks.keys[: blocks.size][blocks.resident(column)].tolist()
        protected = set(ranking.protected.tolist())
        named = [key for key in resident if key in protected or not is_read(graph, column, key)]
        assert sorted(ranked) == sorted(named)
        place = {key: position for position, key in enumerate(ranked)}
        layers = {key: blocks.layer[row_of(graph, key)] for key in ranked}
        lost = [key for key in ranking.order.tolist() if layers[key] in PROTECTED_LAYERS]
        assert all("session_over" in graph.explain(key)["standing"] for key in lost)
        for key in ranked:
            parent = PARENT[key]
            linked = blocks.parent[row_of(graph, key)] != NO_ROW
            if linked and parent in place:
                assert place[key] < place[parent], f"{key} would be stranded by {parent}"
        check_copies(graph, engine, set(resident), ranking)


def check_copies(graph: KVCacheGraph, engine: str, hot: set[int], ranking: EvictionRanking) -> None:
    """Spills come in the order in which blocks go; demotes name every idle copy."""
    blocks, column = graph.tables.blocks, graph.tables.engines[engine]
    keys, tiers = blocks.keys[: blocks.size], blocks.tiers[column, : blocks.size]
    copied = set(keys[(tiers & (Tier.WARM | Tier.COLD)) != 0].tolist())
    ranked = ranking.order.tolist() + ranking.protected.tolist()
    spilling = ranking.spill_first.tolist()
    assert set(spilling) <= hot
    named = [key for key in spilling if key in set(ranked)]
    assert named == [key for key in ranked if key in set(spilling)]
    assert set(ranking.protected.tolist()) <= set(spilling)
    demoting = ranking.demote_first.tolist()
    assert sorted(demoting) == sorted(set(keys[(tiers & Tier.WARM) != 0].tolist()) - hot)
    place = {key: position for position, key in enumerate(demoting)}
    for key in demoting:
        parent = int(blocks.parent[row_of(graph, key)])
        if parent != NO_ROW and int(keys[parent]) in place:
            assert place[key] < place[int(keys[parent])], "a copy goes after what needs it"
    check_prefetch(graph, engine, hot, copied)


def check_prefetch(graph: KVCacheGraph, engine: str, hot: set[int], copied: set[int]) -> None:
    """What should come back has a copy, is not here, and follows what stands before it."""
    blocks = graph.tables.blocks
    wanted = graph.prefetch_order(engine, 1000).tolist()
    there = set(hot)
    assert set(wanted) <= copied - hot
    assert len(set(wanted)) == len(wanted)
    for key in wanted:
        row = row_of(graph, key)
        parent = int(blocks.parent[row])
        assert (parent == NO_ROW) == (blocks.depth[row] == 0)
        assert parent == NO_ROW or int(blocks.keys[parent]) in there
        there.add(key)
