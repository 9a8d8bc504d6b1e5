"""Rivals that read back a part of a text: within the budget, and as the model itself says."""

from __future__ import annotations

import pytest
import torch
from kvgraph.kernels.rope import rope_from_config
from kvgraph_bench.confkv.small_models import load, shipped
from kvgraph_bench.recall.needle_texts import BUDGETS, LENGTH, Asked, draw
from kvgraph_bench.recall.recalling_rivals import RECALLING, ArkVale, Recalling, RecallingModel


@pytest.fixture(scope="module")
def texts() -> list[Asked]:
    return draw(4, seed=5)


@pytest.fixture(scope="module")
def reader() -> RecallingModel:
    model = load(*shipped("recall")).model
    return RecallingModel(model, rope_from_config(model.config, LENGTH))


def test_with_room_for_all_it_says_what_the_model_says(
    reader: RecallingModel, texts: list[Asked]
) -> None:
    model = load(*shipped("recall")).model
    for asked in texts:
        behind = [*asked.question, *asked.answer]
        with torch.inference_mode():
            logits = model(torch.tensor([[*asked.body, *behind]])).logits[0]
        wanted = logits[-len(behind) :].argmax(-1).tolist()
        said = reader.follow(reader.read(asked.body), behind, ArkVale(), len(asked.body))
        assert said == wanted


@pytest.mark.parametrize("arm", RECALLING, ids=lambda arm: arm.name)
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_head_reads_more_than_the_budget(
    arm: Recalling, budget: int, reader: RecallingModel, texts: list[Asked]
) -> None:
    rope = rope_from_config(load(*shipped("recall")).model.config, LENGTH)
    for asked in texts:
        for text in reader.read(asked.body):
            chosen = arm.choose(text.keys[:, -1], text, 1, budget, rope)
            read = chosen.mask.sum(1)
            assert bool((read <= budget).all())
            assert bool((read > budget - 16).all())
            assert bool(chosen.mask[:, 0].all())
            assert bool(chosen.mask[:, -1].all())
            assert int(chosen.distance[-1]) == 1
