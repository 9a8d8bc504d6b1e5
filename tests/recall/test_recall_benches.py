"""The benches of recall that need no engine: texts, landings, rivals, made-up compactions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from kvgraph.kernels.rope import rope_from_config
from kvgraph_bench.confkv.small_models import load, shipped
from kvgraph_bench.recall.compactions import play_compactions
from kvgraph_bench.recall.needle_texts import (
    ARMS,
    BEYOND,
    BUDGET,
    BUDGETS,
    LENGTH,
    Asked,
    Case,
    cases,
    distances,
    draw,
)
from kvgraph_bench.recall.recalling_rivals import RECALLING, ArkVale, Recalling, RecallingModel
from kvgraph_bench.recorded.agents_requests import SESSIONS
from kvgraph_bench.teaching.recall_language import ASK, FACT


def test_spans_recover_a_part_of_what_compactions_lose() -> None:
    done = play_compactions(SESSIONS, 1000, 1, sessions=6)
    assert 0 < done.recovered < done.lost
    assert done.lost + done.exact <= done.prompt
    assert done.compactions > 0


def test_figures_alone_are_on_stdout_whatever_vllm_logs() -> None:
    command = [sys.executable, "-m", "kvgraph", "bench", "recall", "--part", "mixed", "--quick"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)["figures"]
    assert figures["cross_hits"]["value"] == 0
    assert "INFO" in done.stderr


@pytest.fixture(scope="module")
def texts() -> list[Asked]:
    return draw(30, seed=3)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_arm_reads_more_than_its_budget(arm: str, budget: int, texts: list[Asked]) -> None:
    for asked in texts:
        context = asked.context(arm, budget)
        assert len(context) <= budget
        kept = [asked.body[at] for span in asked.spans(arm, budget) for at in range(*span)]
        assert context[len(context) - len(kept) :] == kept


@pytest.fixture(scope="module")
def made() -> dict[str, list[Case]]:
    return cases(20, seed=4)


def test_the_last_telling_in_a_prompt_is_right(made: dict[str, list[Case]]) -> None:
    for each in made.values():
        for case in each:
            asks, key = case.prompt[-2:]
            assert asks == ASK
            told = [at for at in range(len(case.prompt)) if case.prompt[at : at + 2] == [FACT, key]]
            assert case.prompt[told[-1] + 2 : told[-1] + 5] == case.answer


def test_all_that_a_prompt_says_before_its_question_was_read(made: dict[str, list[Case]]) -> None:
    for each in made.values():
        for case in each:
            read = {tuple(words[at : at + 16]) for words in case.read for at in range(len(words))}
            windows = [tuple(case.prompt[at : at + 16]) for at in range(len(case.prompt) - 18)]
            found = sum(window in read for window in windows)
            assert found > len(windows) * 0.4  # but for those across two sections


def test_places_are_as_far_from_the_question_as_they_are_named() -> None:
    for asked in draw(20, seed=4):
        by = {where: list(distances(asked, where)) for where in
              ("front", "tail", "original", "edge", "beyond")}  # fmt: skip
        for where in ("front", "tail"):
            (first, last), begins = by[where][-1]
            assert begins == last - first  # nothing between it and the question
            assert by[where][0][1] <= BUDGET
        assert all(begins == len(asked.body) - first for (first, _), begins in by["original"])
        assert by["edge"][0][1] == LENGTH
        assert by["beyond"][0][1] == BEYOND


@pytest.fixture(scope="module")
def rival_texts() -> list[Asked]:
    return draw(4, seed=5)


@pytest.fixture(scope="module")
def reader() -> RecallingModel:
    model = load(*shipped("recall")).model
    return RecallingModel(model, rope_from_config(model.config, LENGTH))


def test_with_room_for_all_it_says_what_the_model_says(
    reader: RecallingModel, rival_texts: list[Asked]
) -> None:
    model = load(*shipped("recall")).model
    for asked in rival_texts:
        behind = [*asked.question, *asked.answer]
        with torch.inference_mode():
            logits = model(torch.tensor([[*asked.body, *behind]])).logits[0]
        wanted = logits[-len(behind) :].argmax(-1).tolist()
        said = reader.follow(reader.read(asked.body), behind, ArkVale(), len(asked.body))
        assert said == wanted


@pytest.mark.parametrize("arm", RECALLING, ids=lambda arm: arm.name)
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_head_reads_more_than_the_budget(
    arm: Recalling, budget: int, reader: RecallingModel, rival_texts: list[Asked]
) -> None:
    rope = rope_from_config(load(*shipped("recall")).model.config, LENGTH)
    for asked in rival_texts:
        for text in reader.read(asked.body):
            chosen = arm.choose(text.keys[:, -1], text, 1, budget, rope)
            read = chosen.mask.sum(1)
            assert bool((read <= budget).all())
            assert bool((read > budget - 16).all())
            assert bool(chosen.mask[:, 0].all())
            assert bool(chosen.mask[:, -1].all())
            assert int(chosen.distance[-1]) == 1
