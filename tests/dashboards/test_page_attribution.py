"""The page judged by a model of raw logs, and what engines on paper tell of their evictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import Reason
from kvgraph.graph.wire.events import BlocksRemoved, BlocksStored
from kvgraph.hooks.keys import key_of, unpack
from kvgraph_bench.paper.paper_engine import Shape
from page_attribution import PLANS, FleetPlan, play
from paper import text


def test_what_a_step_evicts_and_computes_anew_is_told_as_evicted(paper: Callable[..., Any]) -> None:
    engine, graph = paper(Shape(blocks=15, warm=None)), KVCacheGraph()
    outbox = engine.side.client.outbox
    outbox.open(1 << 16)
    engine.serve(text(4, 1))
    engine.serve(text(4, 2))
    engine.ask(text(6, 3))  # takes what is blank, and the first prompt's last block
    again = engine.ask(text(4, 1))
    engine.step()
    lost = key_of(again.block_hashes[3])
    events = [engine.side.hello(), *outbox.take_all()]
    told = [event for event in events if isinstance(event, BlocksStored | BlocksRemoved)]
    kinds = [type(event) for event in told if lost in unpack(event.hashes)]
    assert kinds == [BlocksStored, BlocksStored, BlocksRemoved, BlocksStored]
    graph.apply("e", events)
    record = graph.tables.history.requests.record(3)
    assert (int(record["index"]), Reason(int(record["reason"]))) == (3, Reason.EVICTED)
    held = graph.tables.blocks.resident(0).sum()
    assert held == len(engine.pool.cached_block_hash_to_block)
    engine.settle()


def test_what_layers_with_a_window_lost_is_not_put_on_lost_news(paper: Callable[..., Any]) -> None:
    """We follow the group with full attention, which has the block; vLLM needs those of all."""
    engine, graph = paper(Shape(blocks=40, warm=None, windows=(None, 32))), KVCacheGraph()
    outbox = engine.side.client.outbox
    outbox.open(1 << 16)
    for length, prompt in ((12, 1), (10, 2), (6, 1)):
        engine.serve(text(length, prompt))
    graph.apply("e", [engine.side.hello(), *outbox.take_all()])
    miss = request_view(graph.tables.history, 2, float).miss
    assert (miss.index, miss.reason) == (0, "other_group")
    assert "cache group 1 (a sliding window of 32 tokens) had let go" in miss.sentence
    engine.settle()


@pytest.mark.parametrize(
    ("plan", "seconds"),  # longer where mishaps befall a fleet
    list(zip(PLANS, (300.0, 600.0, 600.0), strict=True)),
    ids=["alone", "two", "tiers"],
)
def test_the_page_is_right_about_a_recorded_fleet(
    paper_config: Any, plan: FleetPlan, seconds: float
) -> None:
    found = play(paper_config, plan, seconds)
    wrong = [(said.reason, said.view.miss, verdict) for said, verdict in found.wrong]
    assert len(found.pairs) > 100
    assert found.share >= 0.99, wrong[:5]
