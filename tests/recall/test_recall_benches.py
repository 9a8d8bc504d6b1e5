"""The benches of recall that need no engine: texts, landings, rivals, made-up compactions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kvgraph_bench.recall.needle_texts import (
    ARMS,
    BUDGETS,
    Asked,
    Case,
    cases,
    draw,
)
from kvgraph_bench.recall.recall_language import ASK, FACT


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
