"""One stock vLLM engine in a process of its own: how much of each prompt its prefix cache held.

Called as ``python -P engine_replay.py OPTIONS_JSON``; prints one line ``RESULT [cached tokens]``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

BLOCK = 32
ANSWER = 4  # tokens; prompts end so that they and the answer share their last, partial block


def main(options: dict[str, Any]) -> list[int]:
    """Serve ``options["prompts"]`` (token ids), one after the other."""
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        options["model"], dtype="float32", block_size=BLOCK, gpu_memory_utilization=0.3,
        max_model_len=512, num_gpu_blocks_override=options["blocks"], enforce_eager=True,
        max_num_seqs=4,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    cached = []
    for prompt in options["prompts"]:
        [output] = llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
        cached.append(output.num_cached_tokens or 0)
    return cached


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    sys.stdout.write(f"\nRESULT {json.dumps(result)}\n")
