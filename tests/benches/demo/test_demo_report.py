"""The demo's figures, table, picture and JSON say what its passes measured."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from kvgraph.bench.agents.agents_pass import AgentPass
from kvgraph.bench.demo.demo import ArmResult, DemoResult
from kvgraph.bench.demo.demo_report import print_report, save_figures
from kvgraph.bench.figures import Figure, Figures
from kvgraph.bench.serving.cache_ledger import Tally
from kvgraph.bench.serving.completions import Answer
from kvgraph.bench.serving.passes import PassResult, agreement
from kvgraph.graph.types import SourceLayer
from rich.console import Console


def answered(cached: int, ttft_s: float) -> AgentPass:
    answers = (
        Answer("a/0", "w5 w6", ttft_s, 1.0, 1000, cached, 10),
        Answer("a/1", "w7", ttft_s, 1.0, 1000, cached, 10),
    )
    return AgentPass(PassResult(answers, wall_s=2.0), (0.0, 1.0))


def arm(name: str, cached: int, ttft_s: float, rules_lost: int) -> ArmResult:
    evicted = Counter({SourceLayer.RULES: rules_lost, SourceLayer.TOOL_RESULT: 40})
    return ArmResult(name, answered(cached, ttft_s), Tally(evicted=evicted))


@pytest.fixture
def result(tmp_path: Path) -> DemoResult:
    arms = (
        arm("stock", 400, 0.4, rules_lost=3),
        arm("no hints", 450, 0.4, rules_lost=2),
        arm("hints", 550, 0.3, rules_lost=0),
    )
    return DemoResult("model", tmp_path, 2, 180, 0.1, arms)


def test_figures_compare_the_arms(result: DemoResult) -> None:
    figures = result.figures().as_dict()["figures"]
    assert figures["hit_gain_points"]["value"] == pytest.approx(15)
    assert figures["hit_gain_points_no_hints"]["value"] == pytest.approx(5)
    assert figures["protected_lost"]["value"] == 0
    assert figures["stock_protected_lost"]["value"] == 3
    assert figures["ttft_p50_ratio"]["value"] == pytest.approx(0.75)


def test_different_sequential_texts_are_reported() -> None:
    one, other = (PassResult((Answer("a/0", text, 0.1, 1.0, 9, 0, 2),), 1.0) for text in "xy")
    assert agreement(one, one) == 1.0
    assert agreement(one, other) == 0.0


def test_the_report_names_every_number_and_no_text(result: DemoResult) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    print_report(result, console)
    shown = console.export_text()
    for expected in ("55.0%", "rules (protected)", "p50 / p95", "400 / 400 ms", "10 × as fast"):
        assert expected in shown
    saved = save_figures(result).read_text()
    assert "w5" not in shown + saved
    assert json.loads(saved)["arms"]["stock"]["evicted"]["rules"] == 3


def test_the_picture_is_drawn_without_a_display(
    result: DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from kvgraph.bench.demo.picture import draw

    monkeypatch.delenv("DISPLAY", raising=False)
    assert draw(result).read_bytes().startswith(b"\x89PNG")


def test_a_figure_is_the_median_with_its_spread() -> None:
    figure = Figure.of([3.0, 1.0, 2.0], "ms")
    assert (figure.value, figure.spread, figure.n) == (2.0, (1.0, 3.0), 3)
    wide = Figure.of([float(i) for i in range(101)], "ms")
    assert wide.spread == (10.0, 90.0)


def test_a_figure_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Figure.of([], "ms")


def test_figures_are_one_line_of_json() -> None:
    figures = Figures("graph")
    figures.add("rank_20k_ms", [1.2, 1.3, 1.5], "ms")
    expected = {"rank_20k_ms": {"value": 1.3, "unit": "ms", "spread": [1.2, 1.5], "n": 3}}
    assert json.loads(figures.to_json()) == {"bench": "graph", "figures": expected}
    assert "\n" not in figures.to_json()
