"""One stock vLLM engine in a process of its own: how much of each prompt its prefix cache held."""

from __future__ import annotations

from typing import Any

from one_engine import generate, new_llm, run_program

ANSWER = 4  # tokens; prompts end so that they and the answer share their last, partial block


def main(options: dict[str, Any]) -> list[int]:
    """Serve ``options["prompts"]`` (token ids), one after the other."""
    llm = new_llm(options["model"], blocks=options["blocks"])
    answers = (generate(llm, prompt, ANSWER) for prompt in options["prompts"])
    return [answer.num_cached_tokens or 0 for answer in answers]


if __name__ == "__main__":
    run_program(main)
