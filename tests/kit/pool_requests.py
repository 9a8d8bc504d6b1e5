"""Requests as vLLM's scheduler would have them, in a pool that a connector of ours follows."""

from __future__ import annotations

from typing import Any

from kvgraph_bench.hotpath import BLOCK_SIZE


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
