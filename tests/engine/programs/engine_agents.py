"""One real vLLM engine that is made to give recorded answers, for the engine tests."""

from __future__ import annotations

from typing import Any

from kvgraph_bench.recorded.agents_forcing import ANSWER, OPTIONS
from one_engine import new_llm, run_program


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Serve prompts in one batch, each with its answer or None; then each with its answer."""

    llm = new_llm(options["model"], blocks=64, max_num_seqs=2, logits_processors=[OPTIONS[1]])
    first = _serve(llm, options["prompts"], options["answers"], options["end"])
    longer = [p + said["tokens"] + [9] for p, said in zip(options["prompts"], first, strict=True)]
    return {
        "first": first,
        "second": _serve(llm, longer, [[11, options["end"]]] * len(longer), options["end"]),
        "refused": _refused(llm, options["prompts"][0]),
    }


def _serve(llm: Any, prompts: list[list[int]], answers: list[Any], end: int) -> list[Any]:
    from vllm import TokensPrompt

    params = [_sampling(answer, end) for answer in answers]
    texts = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [
        {
            "tokens": list(answer.outputs[0].token_ids),
            "finish": answer.outputs[0].finish_reason,
            "cached": answer.num_cached_tokens,
        }
        for answer in llm.generate(texts, params, use_tqdm=False)
    ]


def _sampling(answer: Any, end: int) -> Any:
    from vllm import SamplingParams

    extra = None if answer is None else {ANSWER: answer}
    return SamplingParams(
        max_tokens=64, temperature=0, ignore_eos=True, stop_token_ids=[end], extra_args=extra
    )


def _refused(llm: Any, prompt: list[int]) -> str:
    from vllm.exceptions import VLLMValidationError

    try:
        _serve(llm, [prompt], [["seven"]], 2)
    except VLLMValidationError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    run_program(main)
