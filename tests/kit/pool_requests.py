"""Requests as vLLM's scheduler would have them, in a pool that a connector of ours follows, and
what a sidecar says of that pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_in_pool
from kvgraph_bench.hotpath import BLOCK_SIZE


def ranking(
    order: Iterable[int] = (), protected: Iterable[int] = (), epoch: int = 1, ts: float = math.inf,
    known_of: float = math.inf,
) -> EvictionRanking:  # fmt: skip
    """Keys that go first, in their order, and keys that go last."""
    named = [np.array(list(keys), dtype=np.uint64) for keys in (order, protected, (), ())]
    return EvictionRanking(epoch, ts, *named, known_of=known_of)


def leave_behind(pool: Any, request: Any) -> list[Any]:
    """It was computed, and is over: its full blocks, free by now, the last one the next to go."""
    full = len(request.block_hashes)
    blocks: list[Any] = pool.get_new_blocks(full)
    pool.cache_full_blocks(request, blocks, 0, full, BLOCK_SIZE, 0)
    pool.free_blocks(reversed(blocks))
    return blocks


def start(connector: Any, pool: Any, request: Any, hits: int = 0) -> list[Any]:
    """It comes, finds its first ``hits`` blocks and computes the others; its blocks."""
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, hits * BLOCK_SIZE) == (0, False)
    full = request.num_prompt_tokens // BLOCK_SIZE
    cached = [pool.get_cached_block(h, [0])[0] for h in request.block_hashes[:hits]]
    pool.touch(cached)
    blocks = cached + pool.get_new_blocks(full - hits)
    pool.cache_full_blocks(request, blocks, hits, full, BLOCK_SIZE, 0)
    connector.update_state_after_alloc(request, None, 0)
    request.num_computed_tokens = request.num_prompt_tokens
    return blocks


def finish(connector: Any, pool: Any, request: Any, blocks: list[Any]) -> None:
    """It has its answer, and its blocks become free, the last one first."""
    from vllm.v1.request import RequestStatus

    request.status = RequestStatus.FINISHED_STOPPED
    ids = [block.block_id for block in blocks]
    assert connector.request_finished_all_groups(request, (ids,)) == (False, None)
    pool.free_blocks(reversed(blocks))


def needless(engine: Any, precious: set[int]) -> list[int]:
    """Counts, at vLLM's own allocations, protected blocks that go while others are free."""
    found: list[int] = []
    take = engine.pool.get_new_blocks

    def get_new_blocks(count: int) -> Any:
        free = engine.pool.free_block_queue.get_all_free_blocks()
        marks = [b.block_hash is not None and key_in_pool(b.block_hash) in precious for b in free]
        found.append(min(sum(marks[:count]), marks[count:].count(False)))
        return take(count)

    engine.pool.get_new_blocks = get_new_blocks
    return found
