"""What callers may cost the graph, and what they may not do to each other."""

from __future__ import annotations

import numpy as np
import pytest
from kvgraph.graph.ingest.chains import ChainLinker
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import EdgeType, SessionState, SourceLayer
from kvgraph.graph.wire.events import (
    AnyEvent,
    BlocksRemoved,
    BlocksStored,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
)

SIZE = 16


def pack(keys: range) -> bytes:
    return np.arange(keys.start, keys.stop, dtype="<u8").tobytes()


def started(
    request: str, keys: range, segments: tuple[Segment, ...] = (), tenant: str | None = None
) -> RequestStarted:
    tokens = SIZE * len(keys)
    return RequestStarted(request, pack(keys), tokens, 0, SIZE, None, tenant, segments)


def test_a_thousand_segments_over_the_whole_prompt_cost_a_bounded_number_of_edges() -> None:
    graph, keys = KVCacheGraph(clock=lambda: 1.0), range(1, 1001)
    before = graph.tables.blocks.nbytes + graph.tables.edges.nbytes
    for request in range(3):
        segments = tuple(
            Segment(4, 0, SIZE * len(keys), None, None, f"{request}:{number}")
            for number in range(1024)
        )
        graph.apply("e", [started(f"r{request}", keys, segments)])
    blocks, edges = graph.tables.blocks, graph.tables.edges
    assert edges.counts[EdgeType.MEMORY_REF] <= 4 * len(keys)
    assert blocks.sums[EdgeType.MEMORY_REF].degree.max() <= 4
    assert blocks.nbytes + edges.nbytes - before < 2_000_000
    assert graph.counters["segments_left_out"] >= 3 * 1000
    graph.check_integrity()


def test_of_too_many_segments_the_most_precious_are_kept() -> None:
    graph, keys = KVCacheGraph(clock=lambda: 1.0), range(1, 101)
    whole = [Segment(9, 0, SIZE * 100)] * 500
    rules = Segment(int(SourceLayer.RULES), 0, SIZE)
    graph.apply("e", [started("r", keys, (*whole, rules))])
    row = graph.tables.blocks.find(np.array([1], dtype=np.uint64))[0]
    assert graph.tables.blocks.layer[row] == SourceLayer.RULES


def test_many_short_segments_side_by_side_are_all_kept() -> None:
    graph, keys = KVCacheGraph(clock=lambda: 1.0), range(1, 101)
    tokens = SIZE * len(keys)
    short = tuple(Segment(4, at, at + 7, None, f"f{at}") for at in range(0, tokens - 7, 7))
    nested = (Segment(7, 0, tokens),)
    graph.apply("e", [started("r", keys, (*short, *nested))])
    assert graph.counters["segments_left_out"] == 0


def test_tenants_beyond_the_limit_of_names_are_still_kept_apart() -> None:
    graph = KVCacheGraph(limits=GraphLimits(max_names=2), clock=lambda: 1.0)
    tenants = [f"tenant-{number}" for number in range(200)]
    for number, tenant in enumerate(tenants):
        keys = pack(range(10 * number + 1, 10 * number + 4))
        graph.apply(
            "e",
            [
                RequestStarted(tenant, keys, 48, 0, SIZE, "chat-1", tenant),
                RequestFinished(tenant, keys, 48, 48, "stop", "chat-1", tenant),
            ],
        )
    sessions = graph.tables.sessions
    assert len(sessions) == len(tenants)
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


def test_a_long_backlog_of_churn_is_applied_in_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is stored and removed within one run must not cost a step for each event."""
    graph, pool, runs = KVCacheGraph(clock=lambda: 1.0), 2000, []
    extend = ChainLinker.extend
    monkeypatch.setattr(ChainLinker, "extend", lambda *args: (runs.append(1), extend(*args))[1])
    churn: list[AnyEvent] = []
    for first in range(1, 20_000, 10):
        churn.append(BlocksStored(pack(range(first, first + 10)), None, SIZE))
        if first > pool:
            churn.append(BlocksRemoved(pack(range(first - pool, first - pool + 10))))
    graph.apply("e", churn)
    assert len(runs) <= 64, "of 2,000 stores"
    assert graph.resident_count("e") == pool
    graph.check_integrity()


def test_nobody_can_aim_at_the_id_of_an_unnamed_tenant() -> None:
    ids = []
    for _ in range(2):
        graph = KVCacheGraph(limits=GraphLimits(max_names=1), clock=lambda: 1.0)
        graph.tables.tenants.intern("first")
        ids.append(graph.tables.tenants.intern("second"))
    assert ids[0] != ids[1]
    assert max(ids) < -1
