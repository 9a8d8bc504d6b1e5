"""The benches of recall that need no engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from kvgraph_bench.recall.needle_texts import ARMS, BUDGETS, Asked, draw


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
