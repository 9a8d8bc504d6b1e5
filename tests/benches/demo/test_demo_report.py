"""The demo's figures, table, picture and JSON say what its passes measured."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from kvgraph.graph.types import SourceLayer
from kvgraph_bench.agents.agents_pass import AgentPass
from kvgraph_bench.closed.closed_arms import ClosedRun
from kvgraph_bench.closed.closed_pass import Clock, ClosedAnswer, ClosedPass
from kvgraph_bench.demo.demo import HAD, ArmResult, DemoResult, run_found
from kvgraph_bench.demo.demo_report import DemoRun, print_last_words, print_report
from kvgraph_bench.demo.engine_cliff import EngineCliff
from kvgraph_bench.serving.cache_ledger import Tally
from kvgraph_bench.serving.completions import Answer
from kvgraph_bench.serving.passes import PassResult
from kvgraph_bench.serving.progress import DemoProgress
from kvgraph_bench.serving.vllm_server import HINTS
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


def test_the_report_says_what_every_arm_had_and_no_text(result: DemoResult) -> None:
    shown = text_of(partial(print_report, result), width=120)
    for expected in ("55.0%", "the switch, signals, layers", " 0.2 ", "400 / 400 ms", "again"):
        assert expected in shown
    saved = DemoRun(result.out, found=result).save().read_text()
    assert "w5" not in shown + saved
    arms = json.loads(saved)["found"]["arms"]
    assert arms["stock"]["evicted"]["rules"] == 3
    assert arms["stock"]["computed_again"]["rules"] == 1


def test_arms_on_paper_are_told_what_they_say_they_are(
    paper_config: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr("kvgraph_bench.demo.demo.base_config", lambda model: paper_config)
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
