"""One stock vLLM engine in a process of its own: how much of each prompt its prefix cache held."""

from __future__ import annotations

from typing import Any

from one_engine import new_llm, run_program

ANSWER = 4  # tokens; prompts end so that they and the answer share their last, partial block


def main(options: dict[str, Any]) -> list[int]:
    """Serve ``options["prompts"]`` (token ids), one after the other."""
    from vllm import SamplingParams, TokensPrompt

    llm = new_llm(options["model"], blocks=options["blocks"])
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    cached = []
    for prompt in options["prompts"]:
        [output] = llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
        cached.append(output.num_cached_tokens or 0)
    return cached


if __name__ == "__main__":
    run_program(main)
