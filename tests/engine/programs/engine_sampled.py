"""One real vLLM engine whose decode steps are sampled: a few sessions that say the same things."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from one_engine import BLOCK, new_llm, run_program, sampling

LINKED_S = 3.0  # until what happens is heard


def main(options: dict[str, Any]) -> None:
    """Answer prompts with a common head and equal passages elsewhere."""
    from vllm import TokensPrompt

    llm = new_llm(options["model"], 80, 1024)
    time.sleep(LINKED_S)
    rng = random.Random(7)
    head, passage = ([rng.randrange(3, 90) for _ in range(n * BLOCK)] for n in (2, 3))
    began = time.monotonic()
    while time.monotonic() - began < options["seconds"]:
        own = [[rng.randrange(3, 90) for _ in range((1 + n) * BLOCK)] for n in range(4)]
        prompts = [head + each + passage + each[:7] for each in own]
        said = [sampling(64, _said(number)) for number in range(4)]
        inputs = [TokensPrompt(prompt_token_ids=each) for each in prompts]
        llm.generate(inputs, said, use_tqdm=False)
        if Path(options["until"]).is_file():
            break
    time.sleep(LINKED_S)


def _said(number: int) -> dict[str, Any]:
    memory = {"layer": "memories", "start": 0, "end": 2 * BLOCK, "memory_id": "likes-tea"}
    return {"session": f"chat-{number}", "segments": [memory]}


class Late:
    """An event of a GPU that has got there when it is asked a second time."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 1


def sampled_as_on_a_gpu(options: dict[str, Any]) -> dict[str, Any]:
    """Answer prompts without being sampled, and then again until enough steps were.

    The runner's dispatcher is asked for a step without a full graph, what was measured arrives with
    a later step, and samples cost what the next steps are late.
    """
    from vllm import TokensPrompt

    llm = new_llm(options["model"], 80, 1024)
    rng = random.Random(7)
    prompts = [
        TokensPrompt(prompt_token_ids=[rng.randrange(3, 90) for _ in range(5 * BLOCK + n)])
        for n in range(4)
    ]

    def texts() -> list[list[int]]:
        answers = llm.generate(prompts, sampling(96), use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    plain = texts()
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    seen = _Sampled(executor.driver_worker.worker.model_runner)
    began, sampled = time.monotonic(), []
    while time.monotonic() - began < options["seconds"] and len(seen.samples) < 60:
        sampled += texts()
    masses = [sum(memoryview(each.mass).cast("f")) for each in seen.samples if each.mass]
    return {
        "same": all(text == plain[at % 4] for at, text in enumerate(sampled)),
        "samples": len(seen.samples),
        "masses": masses,
        "dispatched": seen.dispatched,
        "late": seen.late,
        "steps": seen.budget.steps,
        "left": sorted(set(vars(seen.runner)) & {"execute_model"}),
        "shadowed": "dispatch" in vars(seen.runner.cudagraph_dispatcher),
    }


class _Sampled:
    """Samples a runner, and counts what comes of it."""

    def __init__(self, runner: Any) -> None:
        from kvgraph.hooks.vllm.sampled import measuring as read_back
        from kvgraph.hooks.vllm.sampled.measuring import StepMeasurer
        from kvgraph.hooks.vllm.sampled.runners import RunnerV1
        from kvgraph.hooks.vllm.sampled.sampler import (
            SampledLayer,
            SamplingBudget,
            StepSampler,
            StepTimes,
        )
        from kvgraph.hooks.vllm.tiers.worker import described, rope_of
        from kvgraph.kernels.gpu.streams import Fence

        read_back.mark = lambda device: Fence(Late())
        self.runner, self.samples, self.dispatched, self.late = runner, [], 0, 0
        config, counted = runner.vllm_config, self

        class Counting(RunnerV1):
            def without_full_graph(self, dispatch: Any, *args: Any, **kwargs: Any) -> Any:
                counted.dispatched += 1
                return super().without_full_graph(dispatch, *args, **kwargs)

            def hand(self, samples: Any) -> None:
                counted.samples += samples
                counted.late += runner.execute_model_state is not None
                super().hand(samples)

        (group,) = runner.kv_cache_config.kv_cache_groups
        layers = config.compilation_config.static_forward_context
        views = {name: layers[name].kv_cache for name in group.layer_names}
        able = [SampledLayer(at, layers[name].impl) for at, name in enumerate(group.layer_names)]
        times = StepTimes(time.monotonic, ())
        self.budget = SamplingBudget(time.monotonic, times.busy, 0.5, strict=True)
        measuring = StepMeasurer(described(views, config), rope_of(config))
        sampler = StepSampler(
            Counting(runner), measuring, able, self.budget, time.process_time, times
        )
        sampler.attach()


if __name__ == "__main__":
    run_program(lambda asked: (sampled_as_on_a_gpu if asked.get("as_on_a_gpu") else main)(asked))
