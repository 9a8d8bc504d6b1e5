"""What marking a chat's layers costs the API process, and sampling decode steps a CPU engine."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from kvgraph.hooks.settings import LAYERS_VARIABLE
from kvgraph.hooks.vllm.api.chats import mark_chats
from kvgraph.hooks.vllm.patching import restored

from ..figures import Figures
from ..serving.child import result_of, tell
from ..serving.model import TINY, ensure_model
from .families import FAMILIES
from .family_chats import FamilyChats, MadeChat

_ROUNDS: Final = 9
_QUICK_ROUNDS: Final = 3
_LONGEST: Final = 4_000_000  # tokens: the toy models' tokens are short
_WORDS: Final = "The tests of the second module fail since the change of yesterday. "


def add_layers_cost(figures: Figures, quick: bool, say: Callable[[str], None]) -> None:
    """Render two large chats with vLLM's own renderer, with and without us in turns."""
    family = next(each for each in FAMILIES if each.mode == "hf" and each.template is not None)
    with (
        tempfile.TemporaryDirectory(prefix="kvgraph-meaning-") as scratch,
        contextlib.closing(FamilyChats(family, Path(scratch, family.name))) as chats,
    ):
        assert chats.table is not None
        chats.config.model_config.max_model_len = _LONGEST
        with patch.dict(os.environ, {LAYERS_VARIABLE: chats.table.text()}):
            for name, messages in (
                ("2000_messages", _chat(2000, 1)),
                ("1m_chars", _chat(20, 50_000 // len(_WORDS) + 1)),
            ):
                spent = _in_turns(chats, messages, _QUICK_ROUNDS if quick else _ROUNDS)
                ours = [1000 * (with_us - stock) for stock, with_us in spent]
                say(f"{family.name}, {name}: {[round(1000 * each) for each, _ in spent]} ms, stock")
                figures.add(f"layers_cost_ms_{name}", ours, "ms of the API process", "reported")
                ratios = [with_us / stock for stock, with_us in spent]
                figures.add(
                    f"layers_cost_ratio_{name}", ratios, "× vLLM's own rendering", "reported"
                )


def _chat(messages: int, sentences: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    turns = [
        {"role": roles[at % 2], "content": f"{at}: {_WORDS * sentences}"}
        for at in range(messages - 1)
    ]
    return [{"role": "system", "content": _WORDS * sentences}, *turns]


def _in_turns(
    chats: FamilyChats, messages: list[dict[str, Any]], rounds: int
) -> list[tuple[float, float]]:
    """CPU seconds of one rendering, stock and with us; the first round is not counted."""

    def spent() -> float:
        chat, began = MadeChat(messages, None, []), time.process_time()
        chats.rendered(chat)
        return time.process_time() - began

    found = []
    for _ in range(rounds + 1):
        stock = spent()
        with restored():
            mark_chats()
            found.append((stock, spent()))
    return found[1:]


_SECONDS: Final = 30.0  # of decoding; chosen
_QUICK_SECONDS: Final = 8.0
_BLOCK: Final = 32
_PROMPTS: Final = 4
_TOKENS: Final = 256  # of an answer


def add_sampling_cost(figures: Figures, quick: bool, say: Callable[[str], None]) -> None:
    """Decode at the default share, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kvg-", dir="/tmp") as scratch:
        model = ensure_model(TINY, Path(scratch, "model"))
        seconds = str(_QUICK_SECONDS if quick else _SECONDS)
        found: dict[str, float] = result_of(
            __name__, str(model), seconds, AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SAMPLING="1",
            VLLM_PLUGINS="kvgraph", VLLM_CPU_KVCACHE_SPACE="1",
        )  # fmt: skip
    say(f"sampling: {found}")
    share = 100 * found["sampling_s"] / found["cpu_s"]
    figures.add("sampling_cost", share, "% of the engine's CPU time per token", "≤ 0.2")
    pace = found["steps"] / found["wall_s"]
    figures.add("sampled_steps_per_second", pace, "while decoding", "≥ 1")
    figures.add("sampled_layers_share", found["with_layers"], "of sampled steps", "")


def _decode(model: str, seconds: float) -> dict[str, float]:
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model, dtype="float32", block_size=_BLOCK, gpu_memory_utilization=0.3, max_num_seqs=4,
        max_model_len=1024, num_gpu_blocks_override=160, enforce_eager=True,
    )  # fmt: skip
    budget = _budget_of(llm)
    sampling = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
    prompts = [
        TokensPrompt(prompt_token_ids=[3 + (n + at) % 90 for at in range(8 * _BLOCK)])
        for n in range(_PROMPTS)
    ]
    llm.generate(prompts, sampling, use_tqdm=False)  # what is warmed up is no cost of a token
    spent, steps, layered = budget.spent_s, budget.steps, budget.with_layers
    began, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        llm.generate(prompts, sampling, use_tqdm=False)
    return {
        "sampling_s": budget.spent_s - spent,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.monotonic() - began,
        "steps": budget.steps - steps,
        "with_layers": (budget.with_layers - layered) / max(1, budget.steps - steps),
    }


def _budget_of(llm: Any) -> Any:
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.model_runner.execute_model.__self__.budget


if __name__ == "__main__":
    tell(_decode(sys.argv[1], float(sys.argv[2])))
