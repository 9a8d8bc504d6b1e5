"""Requests by the clock on paper: who is sent when, and what is left behind."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvgraph.bench.cli import app
from kvgraph.bench.closed.closed_sidecar import HoldCounts
from kvgraph.bench.closed.on_paper.closed_paper_arms import (
    PAPER_HOLD,
    PAPER_STOCK,
    PAPER_TOLD,
    PaperArm,
)
from kvgraph.bench.closed.on_paper.open_paper import OpenRun, Sessions, alone_s, play_open
from kvgraph.bench.closed.on_paper.open_paper_run import OpenResult, Setting
from kvgraph.bench.closed.on_paper.paper_loop import PaperLoop
from kvgraph.bench.recorded.agents_fleet import SESSIONS, recorded_requests
from kvgraph.bench.recorded.agents_requests import AgentRequest
from kvgraph.bench.serving.vllm_server import HINTS
from typer.testing import CliRunner

BLOCKS = 300


@pytest.fixture(scope="module")
def asked() -> tuple[AgentRequest, ...]:
    return recorded_requests(SESSIONS, 8, 1, 60, 2048)


@pytest.mark.parametrize("arm", [PAPER_STOCK, PAPER_HOLD], ids=lambda arm: arm.name)
def test_every_request_is_answered_when_its_turn_comes(
    paper_config: Any, asked: tuple[AgentRequest, ...], arm: PaperArm
) -> None:
    pace = 2.0
    done = play_open(paper_config, arm, BLOCKS, asked, pace, running=4)
    assert sorted(each.answer.name for each in done.answers) == sorted(r.name for r in asked)
    ends: dict[str, float] = {}
    by_name = {each.answer.name: each for each in done.answers}
    for request in asked:
        answer = by_name[request.name]
        due = pace * (request.at - asked[0].at)
        assert answer.sent_s == pytest.approx(max(due, ends.get(request.session, 0.0)))
        assert answer.first is (request.session not in ends)
        ends[request.session] = answer.ended_s
    assert 0 <= done.wall_s - max(ends.values()) <= 0.1, "a step that schedules nothing"
    again = play_open(paper_config, arm, BLOCKS, asked, pace, running=4)
    assert again == done


def test_one_after_the_other_takes_as_long_as_all_of_them(
    paper_config: Any, asked: tuple[AgentRequest, ...]
) -> None:
    wall_s = alone_s(paper_config, BLOCKS, asked)
    slow = play_open(paper_config, PAPER_STOCK, BLOCKS, asked, 1e6, running=1)
    taken = sum(each.answer.latency_s for each in slow.answers)
    assert wall_s == pytest.approx(taken, rel=0.25)  # another order finds a little more or less


def test_what_is_left_behind_names_setting_and_arm(
    paper_config: Any, asked: tuple[AgentRequest, ...], tmp_path: Path
) -> None:
    setting = Setting(4, 0.5)
    stock = play_open(paper_config, PAPER_STOCK, BLOCKS, asked, 2.0, running=4)
    ours = OpenRun("hold", stock.answers, stock.wall_s, HoldCounts(1, 59, 2.0, 2.0, {}))
    result = OpenResult(
        tmp_path,
        BLOCKS,
        [(setting, stock), (setting, ours)],
        {"short": {"stock": 9.0, "off": 10.0, "hold": 9.5}},
    )
    saved = json.loads(result.save().read_text())
    figures = result.figures().figures
    assert figures["gain_points_hold_at_4_0.5"].value == 0
    assert figures["ttft_p95_ratio_hold_at_4_0.5"].value == 1
    assert figures["held_share_hold_at_4_0.5"].value == pytest.approx(1 / 60)
    assert figures["short_answers_hold"].value == 9.5
    assert figures["short_ratio"].value == 0.95
    assert [(run["arm"], run["running"], run["load"]) for run in saved["runs"]] == [
        ("stock", 4, 0.5),
        ("hold", 4, 0.5),
    ]


@pytest.mark.parametrize("layered", [True, False])
def test_callers_on_paper_are_believed_who_say_where_rules_stand(
    paper_config: Any, asked: tuple[AgentRequest, ...], monkeypatch: Any, layered: bool
) -> None:
    monkeypatch.delenv(HINTS, raising=False)
    arm = replace(PAPER_TOLD, layered=layered)
    crowd = Sessions([asked[:3]], 2.0)
    loop = PaperLoop(paper_config, arm, BLOCKS, crowd, pace=2.0)
    try:
        loop.run()
        assert loop.sidecar is not None
        loop.now += 1.0
        loop.sidecar.turn()
        (engine,) = loop.sidecar.graph.stats().engines.values()
    finally:
        loop.engine.close()
    assert (engine.layers["rules"] > 0) is layered
    assert HINTS not in os.environ


def test_callers_on_paper_expect_to_be_back_at_their_pace(
    paper_config: Any, asked: tuple[AgentRequest, ...]
) -> None:
    waiting = next(each for each in asked if each.waiting and each.returns_s)
    loop = PaperLoop(paper_config, PAPER_TOLD, BLOCKS, Sessions([[waiting]], 3.0), pace=3.0)
    try:
        request = loop.request("one", waiting)
    finally:
        loop.engine.close()
    said = request.kv_transfer_params["kvgraph"]
    assert said["expected_return_s"] == pytest.approx(3.0 * waiting.returns_s, abs=0.01)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--paper"], "--paper"),
        (["--open", "--closed"], "--open"),
        (["--open", "--pace", "1"], "--open"),
        (["--open", "--stock", ".5,.6"], "--stock"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], name: str) -> None:
    done = CliRunner().invoke(app, ["agents", *options])
    assert done.exit_code == 2
    assert name in done.output
