"""One real vLLM engine whose decode steps are sampled: a few sessions that say the same things.

Called as ``python -P engine_sampled.py OPTIONS_JSON``; prints one line ``RESULT {json}``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

BLOCK = 32
LINKED_S = 3.0  # until what happens is heard


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts with a common head and equal passages elsewhere.

    Options: model, compiled, blocks, and how long: seconds, or until a file is there.
    """
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        options["model"], dtype="float32", block_size=BLOCK, gpu_memory_utilization=0.3,
        max_model_len=1024, num_gpu_blocks_override=options.get("blocks", 80), max_num_seqs=4,
        enforce_eager=not options.get("compiled"),
    )  # fmt: skip
    time.sleep(LINKED_S)
    rng = random.Random(7)
    head, passage = ([rng.randrange(3, 90) for _ in range(n * BLOCK)] for n in (2, 3))
    texts: list[list[int]] = []
    began = time.monotonic()
    while time.monotonic() - began < options.get("seconds", 8.0):
        own = [[rng.randrange(3, 90) for _ in range((1 + n) * BLOCK)] for n in range(4)]
        prompts = [head + each + passage + each[:7] for each in own]
        said = [_said(number, len(prompts[number])) for number in range(4)]
        sampling = [
            SamplingParams(
                max_tokens=64, temperature=0, ignore_eos=True,
                extra_args={"kv_transfer_params": {"kvgraph": each}},
            )
            for each in said
        ]  # fmt: skip
        inputs = [TokensPrompt(prompt_token_ids=each) for each in prompts]
        for answer in llm.generate(inputs, sampling, use_tqdm=False):
            texts.append(list(answer.outputs[0].token_ids))
        if Path(options.get("until", "")).is_file():
            break
    wall = time.monotonic() - began
    time.sleep(LINKED_S)
    return {"texts": texts, "wall_s": wall, "cpu_s": time.process_time(), "pid": os.getpid()}


def _said(number: int, tokens: int) -> dict[str, Any]:
    memory = {"layer": "memories", "start": 0, "end": 2 * BLOCK, "memory_id": "likes-tea"}
    return {"session": f"chat-{number}", "segments": [memory] if tokens else []}


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
