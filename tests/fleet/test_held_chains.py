"""How much of a session's last chain its engine holds."""

from __future__ import annotations

import numpy as np
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.messages.events import (
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    RequestFinished,
    RequestStarted,
)
from kvgraph.graph.queries.held_chains import held_chains
from kvgraph.graph.types import NO_ROW, Tier

SIZE = 16
CHAIN = list(range(1, 9))


def pack(*keys: int) -> bytes:
    return np.array(keys, dtype="<u8").tobytes()


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
        started = RequestStarted("r", pack(*CHAIN), 8 * SIZE, 0, SIZE, "s")
        stored = BlocksStored(pack(*CHAIN), None, SIZE)
        graph.apply(engine, [started, stored])
        finished = RequestFinished("r", pack(*CHAIN), 8 * SIZE, 8 * SIZE, "stop")
        graph.apply(engine, [finished])
    return graph


def test_what_is_left_of_a_chain_is_counted_from_its_start() -> None:
    graph = served("e")
    assert held(graph, "s") == (8, 8, 8)
    graph.apply("e", [BlocksSpilled(pack(*CHAIN[:6]), int(Tier.WARM), 100)])
    graph.apply("e", [BlocksRemoved(pack(*CHAIN[4:]))])
    assert held(graph, "s") == (8, 4, 6)
    graph.apply("e", [BlocksRemoved(pack(*CHAIN))])
    assert held(graph, "s")[1] == 0


def test_another_engines_blocks_do_not_count() -> None:
    graph = served("other", "e")
    graph.apply("e", [BlocksRemoved(pack(*CHAIN))])
    assert held(graph, "s") == (8, 0, 0)


def test_a_chain_that_nobody_knows_has_no_length() -> None:
    graph = served("e")
    unknown = np.array([NO_ROW], dtype=np.int32)
    found = held_chains(graph.tables, unknown, np.array([0], dtype=np.int8))
    assert [column.tolist() for column in found] == [[0], [0], [0]]
