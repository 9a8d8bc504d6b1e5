"""Requests by the clock on paper: who is sent when, and what is left behind."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
from kvgraph_bench.closed.on_paper.closed_paper_arms import (
    PAPER_HOLD,
    PAPER_STOCK,
    PAPER_TOLD,
    PaperArm,
)
from kvgraph_bench.closed.on_paper.open_paper import Sessions, play_open
from kvgraph_bench.closed.on_paper.paper_loop import PaperLoop
from kvgraph_bench.recorded.agents_fleet import SESSIONS, recorded_requests
from kvgraph_bench.recorded.agents_requests import AgentRequest
from kvgraph_bench.serving.vllm_server import HINTS

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
