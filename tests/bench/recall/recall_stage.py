"""A real vLLM engine in a process of its own, with recall or stock; what it served, as JSON. Called
as ``python -m kvgraph_bench.recall.recall_stage OPTIONS``; prints a line ``RESULT {json}``.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvgraph.hooks.recall.cover import SpliceLimits

from ..serving.child import result_of, tell
from ..serving.model import ModelShape, ensure_model, vocabulary_size
from .needle_texts import ARMS, BUDGETS, Asked, draw

BLOCK: Final = 32
LENGTHS: Final = (20, 40, 160, 640, 1280)
SPEED_MODELS: Final = {
    "speed": ModelShape(
        hidden=768, layers=12, heads=12, kv_heads=12, intermediate=2048, vocab=8192
    ),  # 97 M parameters, each head with keys of its own
    "speed_grouped": ModelShape(
        hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536, vocab=8192
    ),  # 116 M parameters: the layers of SmolLM2-135M, in which three heads share keys
}
RECALLS: Final = Path(__file__).parent.parent / "weights" / "recall"  # a model that remembers
_TAIL: Final = 4  # tokens behind what is spliced: what is always computed
_WARM_GIB: Final = dict.fromkeys(SPEED_MODELS, 0.5)  # full after the rounds that do not count
_WARM_UPS: Final = 3  # rounds: memory that was never touched is many times slower
_REST_S: Final = 0.001  # of ``EngineCoreProc._process_engine_step``


def start(part: str, recall: bool, scratch: Path, **options: Any) -> Any:
    given = json.dumps({"part": part, "recall": recall, "scratch": str(scratch), **options})
    environment = {"VLLM_PLUGINS": "kvgraph", "VLLM_CPU_KVCACHE_SPACE": "2"}
    if recall:
        environment |= {
            "AITHER_KVCACHE_GRAPH": "1", "AITHER_KVCACHE_WARM_GIB": str(_WARM_GIB.get(part, 2)),
            "AITHER_KVCACHE_SIDECAR": f"ipc://{scratch}/nobody",
            "AITHER_KVCACHE_CALIBRATIONS": str(scratch), "AITHER_KVCACHE_RECALL_SHARED": "1",
        }  # fmt: skip
    return result_of(f"{__package__}.recall_stage", given, **environment)


class Stage:
    def __init__(
        self, model: Path, recall: bool, scratch: Path, limits: SpliceLimits | None = None
    ) -> None:
        from vllm import LLM

        from .approximate import keep_calibration

        if recall:
            from vllm.config import ModelConfig

            limits = limits or SpliceLimits(least_tokens=16, margin=0)
            keep_calibration(ModelConfig(str(model), max_model_len=2048), scratch, limits)
        self.recall, self.vocabulary = recall, vocabulary_size(str(model))
        self._llm = LLM(
            str(model), dtype="float32", block_size=BLOCK, gpu_memory_utilization=0.3,
            max_model_len=2048, num_gpu_blocks_override=256, enforce_eager=True, max_num_seqs=8,
        )  # fmt: skip
        core = self._llm.llm_engine.engine_core.engine_core
        core.step_fn = _yielding(core)
        self.scheduler = core.scheduler
        self.costs: Any = None
        if recall:
            self.costs = self.scheduler.connector.side.bridge.ledger.costs
            self.costs.splices_always = True  # what it costs is what is measured

    def serve(self, prompt: list[int], asks: bool, tokens: int) -> dict[str, Any]:
        """Serve a prompt alone: what it answered, what was found of it, and the seconds."""
        from vllm import SamplingParams, TokensPrompt

        tag = {"kv_transfer_params": {"kvgraph": {"recall": True}}}
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True,
            extra_args=tag if asks and self.recall else None,
        )  # fmt: skip
        given = TokensPrompt(prompt_token_ids=prompt)
        began = time.perf_counter()
        (out,) = self._llm.generate(given, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        while self.scheduler.has_requests():  # copies of what this one left; a server steps on
            self._llm.llm_engine.step()
        told = (out.kv_transfer_params or {}).get("kvgraph", {})
        return {
            "tokens": list(out.outputs[0].token_ids),
            "cached": out.num_cached_tokens,
            "seconds": took,
            **told.get("recall", {}),
        }

    def words(self, rng: random.Random, count: int) -> list[int]:
        """Text that no other prompt has."""
        return [rng.randrange(3, self.vocabulary) for _ in range(count)]


def _yielding(core: Any) -> Callable[[], Any]:
    """Steps of an engine that rests as vLLM's server does while a request waits for a load."""
    step = core.step_fn

    def step_fn() -> Any:
        outputs, computed = step()
        if not computed and core.scheduler.has_requests():
            time.sleep(_REST_S)
        return outputs, computed

    return step_fn


def speed(stage: Stage, rounds: int) -> list[dict[str, float]]:
    """Time requests with text at another position, at its own in the pool, and with new text."""
    rng, rows = random.Random(5), list[dict[str, float]]()
    for round_ in range(_WARM_UPS + rounds):
        for length in LENGTHS:
            document, head = stage.words(rng, length), stage.words(rng, BLOCK)
            tail = stage.words(rng, _TAIL)
            saved = [*head, *document, *stage.words(rng, BLOCK)]
            stage.serve(saved, True, 1)
            recalled = stage.serve([*document, *tail], True, 1)
            resident = stage.serve([*saved[:length], *tail], False, 1)
            computed = stage.serve([*stage.words(rng, length), *tail], False, 1)
            if round_ >= _WARM_UPS:
                rows.append({
                    "tokens": length, "spliced": recalled.get("spliced", 0),
                    "recalled_s": recalled["seconds"], "computed_s": computed["seconds"],
                    "resident_s": resident["seconds"],
                })  # fmt: skip
    return rows


def mixed(stage: Stage, requests: int) -> list[dict[str, Any]]:
    """Plain requests and ones with recall in turn, over the same documents."""
    rng, rows, prompt = random.Random(9), list[dict[str, Any]](), list[int]()
    documents = [stage.words(rng, rng.randrange(60, 200)) for _ in range(8)]
    for at in range(requests):
        asks = at % 2 == 0
        if asks or rng.random() < 0.5:
            first, second = rng.choice(documents), rng.choice(documents)
            prompt = [*first[rng.randrange(30) :], *second, *stage.words(rng, 6)]
        rows.append({**stage.serve(prompt, asks, 8), "asks": asks, "prompt": len(prompt)})
    return rows


def needles(stage: Stage, texts: int, seed: int) -> dict[str, Any]:
    """Ask for facts that fell out of a budget: which answers are right, by arm.

    The first request reads the whole text, and leaves its copies; ``restored`` asks for them, and
    ``computed`` computes the same prompt.
    """
    right, spliced, prompt = dict[str, list[bool]](), 0, 0
    for asked in draw(texts, seed):

        def ask(name: str, context: list[int], asks: bool, asked: Asked = asked) -> dict[str, Any]:
            told = stage.serve([*context, *asked.question], asks, len(asked.answer))
            right.setdefault(name, []).append(told["tokens"] == asked.answer)
            return told

        ask("full", asked.body, True)
        for budget in BUDGETS:
            for arm in ARMS:
                told = ask(f"{arm}_{budget}", asked.context(arm, budget), arm == "restored")
                spliced += told.get("spliced", 0)
                prompt += told.get("spliced", 0) + told.get("computed", 0)
            ask(f"computed_{budget}", asked.context("restored", budget), False)
    return {"right": right, "spliced": spliced, "prompt": prompt}


def main(part: str, recall: bool, scratch: str, count: int, seed: int = 1) -> Any:
    if part == "needle":
        limits = SpliceLimits(least_tokens=16)  # beside the margin of all engines
        return needles(Stage(RECALLS, recall, Path(scratch), limits), count, seed)
    stage = Stage(ensure_model(SPEED_MODELS.get(part)), recall, Path(scratch))
    return speed(stage, count) if part in SPEED_MODELS else mixed(stage, count)


if __name__ == "__main__":
    tell(main(**json.loads(sys.argv[1])))
