"""An engine that idles hears advice, and allocates by it when the next request comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_of
from kvgraph_bench.paper.paper_engine import Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def hashes_of(engine: Any, prompt: list[int]) -> list[bytes]:
    """Block hashes of the prompt's full blocks."""
    return list(engine.make("probe", prompt, 1).block_hashes)


def in_pool(engine: Any, prompt: list[int]) -> int:
    """How many of the prompt's blocks the pool holds."""
    held = engine.pool.cached_block_hash_to_block
    return sum(
        held.get_one_block(each + bytes(4)) is not None for each in hashes_of(engine, prompt)
    )


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("warm", [None, 64])
def test_advice_that_came_while_the_engine_idled_decides_the_next_allocation(
    paper: Callable[..., Any], asynchronous: bool, warm: int | None
) -> None:
    engine = paper(Shape(blocks=33, asynchronous=asynchronous, warm=warm))
    kept, given = text(15, 1), text(15, 2)
    engine.serve(kept)
    engine.serve(given)
    keys = np.array([key_of(each) for each in hashes_of(engine, given)], dtype=np.uint64)
    none = keys[:0]
    engine.side.client.hold_ranking(EvictionRanking(1, 1e12, keys[::-1], none, none, none))
    engine.serve(text(13, 3))
    assert in_pool(engine, kept) == 15, "the oldest would have gone, by the queue's own order"
    assert in_pool(engine, given) < 15
    assert engine.is_whole()
