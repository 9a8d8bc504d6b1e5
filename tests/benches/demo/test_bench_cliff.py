"""The demo's first half: what its windows, table, picture and file say of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from kvgraph.bench.closed.closed_arms import ClosedRun
from kvgraph.bench.closed.closed_pass import ClosedAnswer, ClosedPass
from kvgraph.bench.demo.cliff import AGENTS, CLOCK, WINDOW_S, CliffResult, windows
from kvgraph.bench.demo.cliff_report import CLIFF_FILE, CLIFF_PICTURE, print_cliff, save_cliff
from kvgraph.bench.figures import Figures
from kvgraph.bench.serving.completions import Answer
from rich.console import Console


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


def test_windows_cover_the_run_and_count_every_turn_once(result: CliffResult) -> None:
    found = windows(result.ours)
    assert [each.ends_s for each in found] == [
        WINDOW_S * number for number in range(1, int(CLOCK.end_s / WINDOW_S) + 1)
    ]
    turns = sum(each.turns_per_hour * WINDOW_S / 3600 for each in found)
    assert turns == pytest.approx(len(result.ours.passed.answers))
    assert found[1].turns_per_hour == pytest.approx(360)
    assert found[1].ttft_s == pytest.approx(2.0)
    assert found[0].agents < found[5].agents < found[-1].agents == AGENTS


def test_a_window_without_an_answer_has_no_time_to_first_token() -> None:
    empty = ClosedRun("stock", AGENTS, ClosedPass(CLOCK, (), (), 0), None)
    assert {each.ttft_s for each in windows(empty)} == {None}


def test_figures_compare_the_time_when_all_are_there(result: CliffResult) -> None:
    figures = Figures("demo")
    result.add_to(figures)
    assert figures.figures["cliff_turns_ratio"].value == pytest.approx(3, rel=0.05)
    assert figures.figures["cliff_ttft_p50_stock"].value == pytest.approx(20)
    assert figures.figures["cliff_ttft_p50_ours"].value == pytest.approx(2)


def test_what_is_left_behind_says_what_made_it(result: CliffResult) -> None:
    assert save_cliff(result) == result.out / CLIFF_PICTURE
    saved = json.loads((result.out / CLIFF_FILE).read_text())
    assert "scheduler" in saved["made by"]
    assert saved["command"].startswith("kvgraph")
    assert saved["date"]
    assert set(saved["windows"]) == {"stock vLLM", "kvgraph with admission"}
    console = Console(record=True, width=120, file=io.StringIO())
    print_cliff(result, console)
    text = console.export_text()
    assert "no model has run" in text
    assert CLIFF_PICTURE in text
