"""The demo's first half: what its windows, table, picture and file say of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvgraph_bench.closed.closed_arms import ClosedRun
from kvgraph_bench.closed.closed_pass import ClosedAnswer, ClosedPass
from kvgraph_bench.demo.cliff import AGENTS, CLOCK, CliffResult
from kvgraph_bench.figures import Figures
from kvgraph_bench.serving.completions import Answer


def run(name: str, every_s: float, ttft_s: float) -> ClosedRun:
    """Turns at a pace, until the last minute."""
    count = int((CLOCK.end_s - 60.0) / every_s)
    answers = tuple(
        ClosedAnswer(number * every_s, False, Answer("a", "", ttft_s, ttft_s, 100, 60, 4))
        for number in range(count)
    )
    return ClosedRun(name, AGENTS, ClosedPass(CLOCK, answers, (), 0), None)


@pytest.fixture
def result(tmp_path: Path) -> CliffResult:
    return CliffResult(tmp_path, run("stock", 30.0, 20.0), run("hold", 10.0, 2.0))


def test_figures_compare_the_time_when_all_are_there(result: CliffResult) -> None:
    figures = Figures("demo")
    result.add_to(figures)
    assert figures.figures["cliff_turns_ratio"].value == pytest.approx(3, rel=0.05)
    assert figures.figures["cliff_ttft_p50_stock"].value == pytest.approx(20)
    assert figures.figures["cliff_ttft_p50_ours"].value == pytest.approx(2)
