"""What vLLM's scheduler evicts in the very step in which another request wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import Reason
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.events import BlocksRemoved, RequestStarted
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_a_block_of_an_answer_that_another_prompt_takes_just_then_was_evicted(
    paper: Callable[..., Any],
) -> None:
    engine, now = paper(Shape(blocks=17, warm=None), clock=lambda: 1.0), iter(range(1, 100))
    outbox = engine.side.client.outbox
    outbox.open()
    graph = KVCacheGraph(clock=lambda: float(next(now)))
    graph.apply("e", [engine.side.hello()])
    asked = text(1, 1)
    answer = engine.serve(asked, 4 * BLOCK_SIZE, session_id="chat")
    graph.apply("e", outbox.take_all())
    engine.serve(text(7, 77), 1)
    graph.apply("e", outbox.take_all())

    engine.ask(text(4, 5), 1)  # one step schedules both; this one takes the answer's last block
    engine.ask([*asked, *answer, *text(2, 9)], 1, session_id="chat")
    engine.settle()
    events = outbox.take_all()
    graph.apply("e", events)

    start = [event for event in events if isinstance(event, RequestStarted)][-1]
    gone = b"".join(event.hashes for event in events if isinstance(event, BlocksRemoved))
    missing = start.cached_tokens // BLOCK_SIZE
    assert missing > len(asked) // BLOCK_SIZE
    assert as_keys(start.hashes)[missing] in as_keys(gone)
    log = graph.tables.history.requests
    assert Reason(int(log.record(log.next - 1)["reason"])) is Reason.EVICTED
    assert "left the pool" in request_view(graph.tables.history, log.next - 1, float).miss.sentence
