"""A real engine whose cache our kernels read; prints one line ``RESULT {json}``."""

from __future__ import annotations

from typing import Any

from one_engine import BLOCK, generate, new_llm, run_program

PROMPT = [3, *range(20, 20 + 5 * BLOCK)]


def main(model: str, dtype: str) -> dict[str, Any]:
    """Move a prompt's keys in the cache of an engine that computes in ``dtype``."""
    from kvgraph.kernels import layout_engines as engines

    llm = new_llm(model, 40, dtype=dtype)
    views = _cache_views(llm)
    _, _, tokens, cell = views[0].shape
    cache = engines.from_views(views, isa=engines.cpu_isa(views[0].dtype, tokens, cell // 2))
    return {"error": _splice_error(llm, cache)}


def _splice_error(llm: Any, cache: Any) -> float:
    """Layer 0's keys of the prompt, moved by 7, against those that the engine computes there."""
    import torch
    from kvgraph.kernels import layout as lay
    from kvgraph.kernels import ops
    from kvgraph.kernels.backends import reference
    from kvgraph.kernels.layout import SlotMap
    from kvgraph.kernels.rope import rope_from_config

    shift, span = 7, 64
    old = _slots_of(llm, PROMPT)[1 : 1 + span]
    shifted = [*range(200, 200 + shift), *PROMPT]
    new = _slots_of(llm, shifted)[1 + shift : 1 + shift + span]
    moved = lay.new_memory(cache.layout)
    rope = rope_from_config(llm.llm_engine.model_config.hf_config)
    ops.splice(cache, moved, SlotMap(old, new, torch.full_like(old, shift)), rope)
    want = reference.read_plane(cache, cache.layout.key, 0, new)
    got = reference.read_plane(moved, cache.layout.key, 0, new)
    return float((want - got).norm() / want.norm())


def _slots_of(llm: Any, prompt: list[int]) -> Any:
    """Slots of a prompt's full blocks, read from the prefix cache after serving it."""
    import torch

    generate(llm, prompt, 16)
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    pool = manager.block_pool
    ends = len(prompt) // BLOCK
    recent = [block for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash]
    # A finished request's blocks are freed tail first, so its chain stands last, reversed.
    chain = [block.block_id for block in reversed(recent[-(ends + _generated_blocks(prompt)) :])]
    chosen = torch.tensor(chain[:ends])
    return (chosen[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)


def _generated_blocks(prompt: list[int]) -> int:
    """Full blocks that the 16 generated tokens complete beyond the prompt's own."""
    return (len(prompt) + 15) // BLOCK - len(prompt) // BLOCK


def _cache_views(llm: Any) -> list[Any]:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    return sorted(runner.kv_caches, key=lambda view: view.storage_offset())


if __name__ == "__main__":
    run_program(lambda options: main(**options))
