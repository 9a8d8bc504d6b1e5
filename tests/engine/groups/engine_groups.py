"""One real vLLM engine whose layers are of two kinds: full attention, and a sliding window."""

from __future__ import annotations

import random
import time
from typing import Any

from one_engine import generate, new_llm, run_program

LINKED_S = 3.0  # until what happens is heard


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Serve a long prompt, others, and one that leaves the first in its middle; options: model."""
    llm = new_llm(
        options["model"], 48, 1024, max_num_seqs=2, max_num_batched_tokens=128,
        skip_tokenizer_init=True,
    )  # fmt: skip
    time.sleep(LINKED_S)

    def serve(tokens: list[int]) -> tuple[list[int], int]:
        said = generate(llm, tokens, 4, detokenize=False)
        return list(said.outputs[0].token_ids), said.num_cached_tokens or 0

    rng = random.Random(1)
    first, *others = ([rng.randrange(10, 250) for _ in range(length)] for length in (500, 300, 300))
    served = [serve(tokens) for tokens in (first, *others, first[:250] + others[0][:60], first)]
    time.sleep(LINKED_S)
    return {"answers": [said for said, _ in served], "cached": [found for _, found in served]}


if __name__ == "__main__":
    run_program(main)
