"""One real vLLM engine that brings text back at new positions; prints one line ``RESULT {json}``.

Called as ``python -P engine_recall.py OPTIONS_JSON``. With ``recall`` off the same requests run
without it: the texts to compare with.
"""

from __future__ import annotations

from typing import Any

from one_engine import BLOCK, new_llm, run_program


def words(count: int, seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(3, 500, count).tolist()  # type: ignore[no-any-return]


HEAD, DOCUMENT, OTHER, ASK = words(40, 1), words(150, 2), words(90, 3), words(20, 4)


class Stage:
    """An engine, and what became of its requests."""

    def __init__(self, model: str, recall: bool) -> None:

        self.recall = recall
        self.llm = new_llm(model, 96, 1024)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.pool = core.scheduler.kv_cache_manager.block_pool
        if recall:
            ledger = self.scheduler.connector.side.bridge.ledger
            ledger.costs.splices_always = True  # this model computes faster than all
            ledger.costs.worth_loading = lambda *_: True

    def serve(self, prompt: list[int], asks: bool, tokens: int = 24) -> dict[str, Any]:
        """Serve one prompt alone: its answer, what was cached, and what is said of its recall."""
        from vllm import SamplingParams, TokensPrompt

        tag = {"kvgraph": {"recall": True}} if asks and self.recall else {}
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, ignore_eos=True,
            extra_args={"kv_transfer_params": tag} if tag else None,
        )  # fmt: skip
        (out,) = self.llm.generate(TokensPrompt(prompt_token_ids=prompt), sampling, use_tqdm=False)
        while self.scheduler.has_requests():  # copies of what this one left; a server steps on
            self.llm.llm_engine.step()
        told = (out.kv_transfer_params or {}).get("kvgraph", {})
        return {
            "text": list(out.outputs[0].token_ids),
            "cached": out.num_cached_tokens,
            **told.get("recall", {}),
        }


def main(model: str, recall: bool) -> dict[str, Any]:
    """Text that is dropped, moved and asked for again; plain requests beside, before and after."""
    stage = Stage(model, recall)
    moved = [*DOCUMENT, *OTHER[:50], *ASK]
    return {
        "first": stage.serve([*HEAD, *DOCUMENT, *OTHER], asks=True),
        "dropped head": stage.serve([*DOCUMENT, *OTHER, *ASK], asks=True),
        "plain, same prompt": stage.serve([*DOCUMENT, *OTHER, *ASK], asks=False),
        "two pieces": stage.serve([*OTHER, *DOCUMENT, *ASK], asks=True, tokens=60),
        "plain, of two pieces": stage.serve([*OTHER, *DOCUMENT, *ASK], asks=False, tokens=60),
        "survivors": stage.serve([*HEAD, *OTHER, *ASK], asks=True),
        "plain, survivors": stage.serve([*HEAD, *OTHER, *ASK], asks=False),
        "moved": stage.serve(moved, asks=True),
        "plain, moved": stage.serve(moved, asks=False),
        "keys": keys_of_first_layer(stage) if recall else None,
    }


def keys_of_first_layer(stage: Stage) -> dict[str, float]:
    """The first layer's keys, which follow from token and position alone, spliced or not."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    mover = get_kv_transfer_group().worker.mover
    layout, memory = mover.cache.layout, mover.cache.memory
    held: list[list[int]] = []
    manager = stage.scheduler.kv_cache_manager
    free = manager.free

    def noted_free(request: Any) -> None:
        held.append(list(manager.get_block_ids(request.request_id)[0]))
        free(request)

    manager.free = noted_free
    stage.serve([*HEAD, *DOCUMENT, *words(9, 60)], asks=True)
    prompt = [*DOCUMENT[5:], *words(33, 51)]
    found = []
    spliced = 0
    for asks in (True, False):
        told = stage.serve(prompt, asks=asks, tokens=1)
        spliced = max(spliced, told.get("spliced", 0))
        places = torch.arange(spliced)
        slots = torch.tensor(held[-1])[places // BLOCK] * BLOCK + places % BLOCK
        heads, dims = torch.arange(layout.heads), torch.arange(layout.key.dims)
        at = layout.address(
            layout.key, 0, slots[:, None, None], heads[None, :, None], dims[None, None, :]
        )
        found.append(memory[at].float())
    error = float((found[0] - found[1]).norm() / found[1].norm())
    return {"spliced": spliced, "error": error}


if __name__ == "__main__":
    run_program(lambda options: main(**options))
