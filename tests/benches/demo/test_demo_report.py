"""The demo's figures, table, picture and JSON say what its passes measured."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from kvgraph.bench.agents.agents_pass import AgentPass
from kvgraph.bench.closed.closed_arms import ClosedRun
from kvgraph.bench.closed.closed_pass import Clock, ClosedAnswer, ClosedPass
from kvgraph.bench.demo.demo import HAD, ArmResult, DemoResult, price_in, run_found
from kvgraph.bench.demo.demo_report import DemoRun, print_last_words, print_report
from kvgraph.bench.demo.engine_cliff import EngineCliff, print_engine_cliff
from kvgraph.bench.figures import Figure, Figures
from kvgraph.bench.serving.cache_ledger import Tally
from kvgraph.bench.serving.completions import Answer
from kvgraph.bench.serving.passes import PassResult, agreement
from kvgraph.bench.serving.progress import DemoProgress
from kvgraph.bench.serving.vllm_server import HINTS
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
    again = Counter({SourceLayer.RULES: rules_lost // 2})
    price = 0.25 if name.startswith("told") else None
    return ArmResult(name, answered(cached, ttft_s), Tally(evicted=evicted, again=again), price)


def demo_of(tmp_path: Path, told_lost: int) -> DemoResult:
    arms = (
        arm("stock", 400, 0.4, rules_lost=3),
        arm("nothing said", 450, 0.4, rules_lost=2),
        arm("told everything", 550, 0.3, rules_lost=told_lost),
    )
    return DemoResult("found", "vLLM's own scheduler", tmp_path, 2, 180, 0.1, arms)


@pytest.fixture
def result(tmp_path: Path) -> DemoResult:
    return demo_of(tmp_path, 0)


def cliff_run(name: str, turns: int, ttft_s: float) -> ClosedRun:
    clock = Clock(1 / 60, 10.0, 60.0)
    answers = tuple(
        ClosedAnswer(10.0 + 59.0 * at / turns, at < 2, Answer("a", "", ttft_s, ttft_s, 100, 60, 4))
        for at in range(turns)
    )
    return ClosedRun(name, 32, ClosedPass(clock, answers, (), 0), None)


@pytest.fixture
def cliff() -> EngineCliff:
    return EngineCliff(cliff_run("stock", 80, 0.9), cliff_run("kvgraph", 240, 0.03))


def text_of(printing: Callable[[Console], None], width: int = 100) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    printing(console)
    return console.export_text()


def test_figures_compare_the_arms(result: DemoResult) -> None:
    figures = DemoRun(result.out, found=result).figures().as_dict()["figures"]
    assert figures["hit_gain_points"]["value"] == pytest.approx(15)
    assert figures["hit_gain_points_no_hints"]["value"] == pytest.approx(5)
    assert figures["told_over_nothing_said"]["value"] == pytest.approx(10)
    assert figures["protected_lost"]["value"] == 0
    assert figures["stock_protected_lost"]["value"] == 3
    assert figures["protection_price_points"]["value"] == 0.25
    assert figures["ttft_p50_ratio"]["value"] == pytest.approx(0.75)


def test_a_price_that_nobody_said_is_no_figure(result: DemoResult) -> None:
    arms = tuple(replace(arm, price_points=None) for arm in result.arms)
    figures = DemoRun(result.out, found=replace(result, arms=arms)).figures().figures
    assert "protection_price_points" not in figures
    assert " 0.2 " not in text_of(partial(print_report, replace(result, arms=arms)))


@pytest.mark.parametrize(
    ("status", "price"),
    [
        ({"engines": [{"name": "e", "protection_price_points": 0.3}]}, 0.3),
        ({"protection_price_points": 0}, 0.0),
        ({"engines": [{"name": "e", "protection_price_points": None}]}, None),
        ({"engines": []}, None),
        ("gone", None),
    ],
)
def test_the_price_is_read_wherever_a_status_has_it(status: object, price: float | None) -> None:
    assert price_in(status) == price


def test_the_engines_cliff_is_of_returning_turns(cliff: EngineCliff, tmp_path: Path) -> None:
    run = DemoRun(tmp_path, engine=cliff)
    figures = run.figures().figures
    assert figures["engine_turns_ratio"].value == pytest.approx(3)
    assert figures["engine_ttft_p50_ratio"].value == pytest.approx(0.03 / 0.9)
    text = text_of(partial(print_engine_cliff, cliff))
    assert "the switch alone" in text
    saved = json.loads(run.save().read_text())
    assert saved["engine"]["arms"]["stock vLLM"]["turns_per_minute"] == 80
    assert saved["engine"]["arms"]["kvgraph"]["had"] == "the switch alone"


def test_the_end_says_what_was_seen_what_to_do_and_where_the_page_is(
    result: DemoResult, cliff: EngineCliff
) -> None:
    run = DemoRun(result.out, engine=cliff, found=result)
    address = "http://127.0.0.1:1/open?token=secret#edit=secret"
    text = text_of(lambda console: print_last_words(run, address, console), width=1000)
    seen, next_step, page = text.strip().splitlines()
    assert "80 turns a minute" in seen
    assert "55.0% (told everything)" in seen
    assert "AITHER_KVCACHE_GRAPH=1" in next_step
    assert "http://127.0.0.1:1 " in page
    assert "secret" not in page


def test_the_demo_keeps_how_long_it_took(result: DemoResult) -> None:
    run = DemoRun(result.out, found=result)
    run.began_s -= 90.0
    saved = json.loads(run.save().read_text())
    assert saved["figures"]["demo_minutes"]["value"] == pytest.approx(1.5, abs=0.2)
    assert saved["command"].startswith("kvgraph")


def test_different_sequential_texts_are_reported() -> None:
    one, other = (PassResult((Answer("a/0", text, 0.1, 1.0, 9, 0, 2),), 1.0) for text in "xy")
    assert agreement(one, one) == 1.0
    assert agreement(one, other) == 0.0


def test_the_report_says_what_every_arm_had_and_no_text(result: DemoResult) -> None:
    shown = text_of(partial(print_report, result), width=120)
    for expected in ("55.0%", "the switch, signals, layers", " 0.2 ", "400 / 400 ms", "again"):
        assert expected in shown
    saved = DemoRun(result.out, found=result).save().read_text()
    assert "w5" not in shown + saved
    arms = json.loads(saved)["found"]["arms"]
    assert arms["stock"]["evicted"]["rules"] == 3
    assert arms["stock"]["computed_again"]["rules"] == 1


def test_the_report_says_why_rules_were_lost(tmp_path: Path) -> None:
    nothing = text_of(partial(print_report, demo_of(tmp_path, 0)))
    assert "ranked like any other block" not in nothing
    some = text_of(partial(print_report, demo_of(tmp_path, 2)))
    assert "lost 2 (stock: 3), and 1 of these" in some
    assert "ranked like any other" in some


def test_arms_on_paper_are_told_what_they_say_they_are(
    paper_config: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("kvgraph.bench.demo.demo.base_config", lambda model: paper_config)
    monkeypatch.delenv(HINTS, raising=False)
    result = run_found(tmp_path, DemoProgress(0, shown=False), requests=50)
    assert [arm.arm for arm in result.arms] == list(HAD)
    stock, silent, told = result.arms
    assert stock.price_points is silent.price_points is None
    assert told.price_points is not None
    assert {len(arm.passed.result.answers) for arm in result.arms} == {50}
    assert stock.tally.protected_lost > 0
    assert told.tally.protected_again <= told.tally.protected_lost
    assert HINTS not in os.environ


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
