"""One real vLLM engine in a process of its own, as servers have it, which falls idle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from one_engine import BLOCK, generate, new_llm, run_program, wait_for

CONTEXT = 7 * BLOCK  # tokens of each prompt, and one more
OTHERS = 6  # prompts that push the first one out of the pool
FALLS_IDLE_S, WATCHED_S = 1.5, 3.0


def prompt(seed: int) -> list[int]:
    return [3 + seed, *range(10, 10 + CONTEXT)]


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Serve a prompt and others; idle alone, while orders come, and alone; serve it again."""
    llm = new_llm(options["model"], blocks=24)

    def serve(seed: int) -> Any:
        return generate(llm, prompt(seed), 4)

    first = serve(0)
    for seed in range(1, 1 + OTHERS):
        serve(seed)
    time.sleep(FALLS_IDLE_S)
    before = cpu_s(WATCHED_S)
    Path(options["alone"]).touch()
    wait_for(options["back"])
    time.sleep(FALLS_IDLE_S)
    after = cpu_s(WATCHED_S)
    again = serve(0)
    return {
        "cpu_s": [before, after],
        "cached": again.num_cached_tokens,
        "same": again.outputs[0].token_ids == first.outputs[0].token_ids,
    }


def cpu_s(seconds: float) -> float:
    """What the engine's process takes of a core's time meanwhile."""
    import psutil

    children = psutil.Process().children(recursive=True)
    (core,) = [each for each in children if "EngineCore" in " ".join(each.cmdline())]
    before = core.cpu_times()
    time.sleep(seconds)
    now = core.cpu_times()
    return now.user + now.system - before.user - before.system


if __name__ == "__main__":
    run_program(main)
