"""The arms of the needle experiment: the same budget for each, and only text that was there."""

from __future__ import annotations

from itertools import pairwise

import pytest
from kvgraph.bench.recall.needle_texts import ARMS, BUDGETS, Asked, draw
from kvgraph.bench.teaching.recall_language import ASK, FACT


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


def test_sections_cover_the_text_and_cut_no_fact(texts: list[Asked]) -> None:
    for asked in texts:
        sections = asked.sections
        assert [sections[0][0], sections[-1][1]] == [0, len(asked.body)]
        assert all(end == first for (_, end), (first, _) in pairwise(sections))
        assert all(asked.body[first] == FACT for first, _ in sections[1:])


def test_recall_brings_what_is_asked_for_and_the_others_may_not(texts: list[Asked]) -> None:
    def told(asked: Asked, arm: str) -> bool:
        fact = [FACT, asked.question[1], *asked.answer]
        context = asked.context(arm, BUDGETS[1])
        return any(context[at : at + len(fact)] == fact for at in range(len(context)))

    assert all(asked.question[0] == ASK for asked in texts)
    assert all(told(asked, "restored") for asked in texts)
    for arm in ARMS[:-1]:
        assert not all(told(asked, arm) for asked in texts)


def test_breadcrumbs_name_facts_and_tell_none(texts: list[Asked]) -> None:
    asked = texts[0]
    kept = sum(end - first for first, end in asked.spans("breadcrumb", BUDGETS[1]))
    crumbs = asked.context("breadcrumb", BUDGETS[1])[:-kept]
    keys = {asked.body[at + 1] for at, token in enumerate(asked.body) if token == FACT}
    assert crumbs
    assert set(crumbs) <= keys
