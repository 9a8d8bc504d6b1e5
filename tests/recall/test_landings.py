"""Cases of text that comes back elsewhere: nothing is said that was not read, or is not right."""

from __future__ import annotations

import pytest
from kvgraph_bench.recall.landings import BEYOND, BUDGET, Case, cases, distances
from kvgraph_bench.recall.needle_texts import LENGTH, draw
from kvgraph_bench.teaching.recall_language import ASK, FACT


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
