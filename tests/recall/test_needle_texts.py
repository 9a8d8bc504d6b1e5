"""The arms of the needle experiment: the same budget for each, and only text that was there."""

from __future__ import annotations

import pytest
from kvgraph_bench.recall.needle_texts import ARMS, BUDGETS, Asked, draw


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
