"""One real vLLM engine whose cache our kernels read and write; prints one line ``RESULT {json}``.
Called as ``python -P engine_kernels.py OPTIONS_JSON``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from one_engine import BLOCK, new_llm, run_program

PROMPT = [3, *range(20, 20 + 5 * BLOCK)]


def main(model: str, dtype: str) -> dict[str, Any]:
    """Serve one prompt from a cache that is intact, spoiled, and warmed from the arena."""
    import torch
    from kvgraph.kernels import layout as lay
    from kvgraph.kernels import layout_engines as engines
    from kvgraph.kernels import ops
    from kvgraph.kernels.layout import Blocks

    llm = new_llm(model, 40, dtype=dtype)
    views = _cache_views(llm)
    blocks, _, tokens, cell = views[0].shape
    cache = engines.from_views(views, isa=engines.cpu_isa(views[0].dtype, tokens, cell // 2))
    here = Blocks(cache, torch.arange(blocks))
    there = Blocks(lay.new_memory(cache.layout.record(blocks)), here.numbers)

    def spill() -> None:
        ops.spill(here, there)

    def load() -> None:
        ops.load(there, here)

    return {
        **_served(llm, cache, spill, load),
        "changed_bytes": _changed_bytes(cache, spill, load),
        "spliced_equals_recomputed": _splice_error(llm, cache),
    }


def _served(
    llm: Any, cache: Any, spill: Callable[[], None], load: Callable[[], None]
) -> dict[str, Any]:
    """What the engine answers from its own cache, from noise, and from what came back."""
    _generate(llm, PROMPT)

    def spoil() -> None:
        spill()
        cache.memory.normal_()

    texts, cached = {}, {}
    before = {"first again": lambda: None, "spoiled": spoil, "warmed": load}
    for name, prepare in before.items():
        prepare()
        texts[name], cached[name] = _generate(llm, PROMPT)
    return {"texts": texts, "cached": cached}


def _changed_bytes(cache: Any, spill: Callable[[], None], load: Callable[[], None]) -> int:
    """Bytes of the cache that are not what they were after a way to the arena and back."""
    spill()
    before = cache.memory.clone()
    cache.memory.zero_()
    load()
    return int((cache.memory != before).sum())


def _generate(llm: Any, prompt: list[int]) -> tuple[list[int], int]:
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    out = llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)[0]
    return list(out.outputs[0].token_ids), out.num_cached_tokens or 0


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

    _generate(llm, prompt)
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
