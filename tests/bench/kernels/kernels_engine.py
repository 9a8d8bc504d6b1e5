"""The part of ``kvgraph bench kernels`` that needs a real engine, run in a process of its own.

``python -P -m kvgraph_bench.kernels.kernels_engine MODEL`` prints a line
``RESULT {"prefill": …}``: seconds to compute 640 tokens' KV by prefilling
them, and to splice them from the arena into that engine's cache.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import torch
from kvgraph.kernels import ops
from kvgraph.kernels.layout import PagedKv, SlotMap, new_memory
from kvgraph.kernels.layout_engines import cpu_isa, from_views
from kvgraph.kernels.rope import Rope, rope_from_config

from ..serving.child import tell

TOKENS: Final = 640
BLOCK: Final = 32
ROUNDS: Final = 7
SHIFT: Final = 100


def main(model: str) -> dict[str, list[float]]:
    """Take turns, so that both meet the machine in the same state."""
    from vllm import LLM

    llm = LLM(
        model, dtype="bfloat16", block_size=BLOCK, gpu_memory_utilization=0.3, max_model_len=1024,
        num_gpu_blocks_override=64, enforce_eager=True, max_num_seqs=1,
        max_num_batched_tokens=1024, enable_prefix_caching=False,
    )  # fmt: skip
    cache = engine_cache(llm)
    rope = rope_from_config(llm.llm_engine.model_config.hf_config)
    arena = new_memory(cache.layout.record(TOKENS // BLOCK))
    arena.memory.normal_()
    samples: dict[str, list[float]] = {"prefill": [], "splice": []}
    for number in range(ROUNDS + 2):
        prefill, splice = _prefill(llm, number), _splice(arena, cache, rope)
        if number >= 2:  # the first ones warm up
            samples["prefill"].append(prefill)
            samples["splice"].append(splice)
    return samples


def engine_cache(llm: Any) -> PagedKv:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    views = sorted(runner.kv_caches, key=lambda view: int(view.storage_offset()))
    _, _, tokens, cell = views[0].shape
    return from_views(views, isa=cpu_isa(views[0].dtype, tokens, cell // 2))


def _prefill(llm: Any, number: int) -> float:
    from vllm import SamplingParams, TokensPrompt

    prompt = [3 + (number * 7919 + i * 31) % 2000 for i in range(TOKENS)]
    sampling = SamplingParams(max_tokens=1, temperature=0)
    started = time.perf_counter()
    llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
    return time.perf_counter() - started


def _splice(arena: PagedKv, cache: PagedKv, rope: Rope) -> float:
    """To an offset within the blocks that is not where they were, from scattered records."""
    blocks = torch.randperm(cache.layout.blocks)[: TOKENS // BLOCK + 1]
    new = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).reshape(-1)[5 : 5 + TOKENS]
    started = time.perf_counter()
    old = torch.arange(TOKENS)
    ops.splice(arena, cache, SlotMap(old, new, torch.full((TOKENS,), SHIFT)), rope)
    return time.perf_counter() - started


if __name__ == "__main__":
    tell(main(sys.argv[1]))
