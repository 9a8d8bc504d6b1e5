"""One real vLLM engine that brings text back at new positions; prints one line ``RESULT {json}``.

Called as ``python -P engine_recall.py OPTIONS_JSON``. With ``recall`` off the same requests run
without it: the texts to compare with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgraph_bench.recall.recall_stage import BLOCK, Stage
from one_engine import run_program


def words(count: int, seed: int) -> list[int]:
    import numpy as np

    return np.random.default_rng(seed).integers(3, 500, count).tolist()  # type: ignore[no-any-return]


HEAD, DOCUMENT, OTHER, ASK = words(40, 1), words(150, 2), words(90, 3), words(20, 4)


def main(model: str, recall: bool, scratch: str) -> dict[str, Any]:
    """Text that is dropped, moved and asked for again; plain requests beside, before and after."""
    stage = Stage(Path(model), recall, Path(scratch))
    moved = [*DOCUMENT, *OTHER[:50], *ASK]
    return {
        "first": stage.serve([*HEAD, *DOCUMENT, *OTHER], asks=True, tokens=24),
        "dropped head": stage.serve([*DOCUMENT, *OTHER, *ASK], asks=True, tokens=24),
        "plain, same prompt": stage.serve([*DOCUMENT, *OTHER, *ASK], asks=False, tokens=24),
        "two pieces": stage.serve([*OTHER, *DOCUMENT, *ASK], asks=True, tokens=60),
        "plain, of two pieces": stage.serve([*OTHER, *DOCUMENT, *ASK], asks=False, tokens=60),
        "survivors": stage.serve([*HEAD, *OTHER, *ASK], asks=True, tokens=24),
        "plain, survivors": stage.serve([*HEAD, *OTHER, *ASK], asks=False, tokens=24),
        "moved": stage.serve(moved, asks=True, tokens=24),
        "plain, moved": stage.serve(moved, asks=False, tokens=24),
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
    stage.serve([*HEAD, *DOCUMENT, *words(9, 60)], asks=True, tokens=24)
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
