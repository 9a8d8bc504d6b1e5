"""A real vLLM engine of a random Gemma 3, with layers of two kinds, tells what ended a match."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs.reasons import Reason
from kvgraph.graph.wire.events import CacheGroup, EngineHello, GroupKind, RequestStarted

pytestmark = pytest.mark.engine
SCRIPT = "../groups/engine_groups.py"
WINDOW = 128
BLOCK = 32


@pytest.fixture
def gemma(tmp_path: Path) -> str:
    """The directory of a random Gemma 3 of two layers, one of which has a sliding window."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=32, dtype="float32", bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    return str(tmp_path / "gemma")


def test_a_real_engine_with_a_sliding_window_tells_that_it_let_go(
    gemma: str, new_engine: Any, router: Any
) -> None:
    engine = new_engine(
        SCRIPT, {"model": gemma}, AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=router.endpoint
    )
    try:
        deadline = time.monotonic() + 150
        while engine.running and time.monotonic() < deadline:
            router.read(0.05)
    finally:
        run = engine.run()
    stock = new_engine(SCRIPT, {"model": gemma}).run()
    assert run.result["answers"] == stock.result["answers"]
    hello = next(event for event in router.events if isinstance(event, EngineHello))
    full, window = CacheGroup(GroupKind.FULL, 0, BLOCK), CacheGroup(GroupKind.WINDOW, WINDOW, BLOCK)
    assert set(hello.groups) == {full, window}
    starts = [event for event in router.events if isinstance(event, RequestStarted)]
    assert [start.cached_tokens for start in starts] == run.result["cached"]
    assert starts[3].lacking == hello.groups.index(window)
    graph = KVCacheGraph()
    for event in router.events:
        graph.apply("e", [event])
    assert int(graph.tables.history.requests.record(3)["reason"]) == Reason.OTHER_GROUP
