"""The closed loop's scripts, figures and counts; and the metrics that it reads."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from budgets import small_or_large
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.dashboards.metrics import engine_metrics
from kvgraph.dashboards.source import EngineStatus
from kvgraph.graph.wire.events import HOLD_ENDS, AdmissionReport
from kvgraph_bench.closed.closed import ClosedResult, ClosedScale
from kvgraph_bench.closed.closed_paper import play_on_paper
from kvgraph_bench.closed.closed_pass import (
    Clock,
    ClosedAnswer,
    ClosedPass,
    ClosedRun,
    HoldCounts,
    parse_holds,
    scripts,
)
from kvgraph_bench.closed.open_paper import OTHERS, Sessions, answers_per_s, play_open
from kvgraph_bench.closed.paper_loop import (
    PAPER_ARMS,
    PAPER_HOLD,
    PAPER_STOCK,
    PAPER_TOLD,
    PaperArm,
    PaperLoop,
)
from kvgraph_bench.recorded.agents_requests import SESSIONS, AgentRequest, recorded_requests
from kvgraph_bench.serving.completions import Answer
from kvgraph_bench.serving.vllm_server import HINTS
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

CLOCK = Clock(pace=0.1, warm_up_s=10.0, measured_s=60.0)
REPORT = AdmissionReport(3, 70, 12.5, 9, (4, 1, 0, 1, 0, 0, 2), 80.0, 31.0, 91)


def answered(sent_s: float, ttft_s: float, first: bool = False) -> ClosedAnswer:
    return ClosedAnswer(sent_s, first, Answer("a", "", ttft_s, ttft_s, 100, 60, 4))


def run(arm: str, agents: int, turns: int, ttft_s: float, **fields: Any) -> ClosedRun:
    inside = [answered(20.0, ttft_s) for _ in range(turns)]
    first = [answered(15.0, 30.0, first=True)]
    outside = [answered(1.0, 0.1), answered(69.0, 5.0)]
    passed = ClosedPass(
        CLOCK, (*inside, *first, *outside), fields.pop("waiting", ()), fields.pop("failed", 0)
    )
    return ClosedRun(arm, agents, passed, fields.pop("held", None))


def test_figures_are_of_what_was_answered_while_it_was_measured() -> None:
    held = HoldCounts(5, 95, 31.0, 80.0, {"room": 5})
    runs = [
        run("stock", 12, 59, 0.2),
        run("hold", 12, 59, 0.2, held=HoldCounts(1, 99, 2.0, 2.0, {})),
        run("stock", 32, 19, 8.0),
        run("lpm", 32, 39, 0.3),
        run("hold", 32, 59, 0.1, held=held, waiting=((True, 61.0), (False, 80.0)), failed=2),
        run("host_lru", 64, 19, 8.0),
        run("host_hold", 64, 31, 0.1, held=HoldCounts(1, 99, 2.0, 2.0, {})),
    ]
    scale = ClosedScale(clock=CLOCK, best=20, over=(1.6,), pairs=2)
    assert scale.agents(20, hosted=False) == [12, 16, 20, 12, 16, 20, 32]
    assert scale.agents(20, hosted=True) == [64]
    figures = ClosedResult(Path(), 20, scale, runs).figures().figures
    assert figures["turns_ratio_over_at_32"].value == pytest.approx(3.0)
    assert figures["ttft_p50_ratio_over_at_32"].value == pytest.approx(0.1 / 8.0)
    assert figures["starved_at_32"].value == 1
    assert 30 < figures["first_turn_wait_p95_s_at_32"].value <= 61
    assert figures["turns_ratio_lpm_at_32"].value == pytest.approx(1.5)
    assert figures["turns_ratio_host_at_64"].value == pytest.approx(1.6)
    assert figures["turns_ratio_under_at_12"].value == pytest.approx(1.0)
    assert figures["held_share_under_at_12"].value == pytest.approx(0.01)
    assert figures["longest_hold_s"].value == 31.0
    assert figures["failed"].value == 2
    assert runs[0].passed.cached_share == pytest.approx(0.6)


class Page(Collector):
    def collect(self) -> Any:
        graph = MagicMock(admission=REPORT, layers={}, kept=0, over_share=0, kept_share=0.0)
        graph.applied = graph.budget = None
        return engine_metrics(
            [EngineStatus("engine:1", "", "", "", "hook", "synced", None, 0, 0, graph=graph)]
        )


def test_what_metrics_say_is_what_the_bench_reads() -> None:
    registry = CollectorRegistry()
    registry.register(Page())
    counts = parse_holds(generate_latest(registry).decode())
    assert counts == HoldCounts(
        9, 91, 31.0, 80.0, dict(zip(HOLD_ENDS, REPORT.released, strict=True))
    )
    assert counts.share == pytest.approx(0.09)
    assert parse_holds("") == HoldCounts(0, 0, 0.0, 0.0, {})


@pytest.mark.parametrize("arm", PAPER_ARMS, ids=lambda arm: arm.name)
def test_the_loop_on_paper_serves_every_arm(paper_config: Any, arm: PaperArm) -> None:
    clock = Clock(pace=1.0, warm_up_s=30.0, measured_s=300.0)
    users = scripts(read_sessions(SESSIONS), 5, 1, clock.end_s, 2048)
    done = play_on_paper(paper_config, arm, 200, users, clock)
    assert done.passed.turns_per_minute > 3
    assert 0.1 < done.passed.cached_share < 1
    assert all(each.answer.ttft_s <= each.answer.latency_s for each in done.passed.answers)
    assert (done.held is not None) is arm.hold
    if done.held is not None:
        assert done.held.not_held > 0
        assert done.held.longest_s <= 120.0


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
        loop.engine.now += 1.0
        loop.sidecar.turn()
        (engine,) = loop.sidecar.graph.stats().engines.values()
    finally:
        loop.engine.close()
    assert (engine.layers["rules"] > 0) is layered
    assert HINTS not in os.environ


@pytest.mark.parametrize("answer", small_or_large(4, 30))
def test_texts_that_grow_and_never_fit_are_answered_as_fast_as_by_stock(
    paper_config: Any, answer: int
) -> None:
    """They look like sessions that go on, and all of them are computed again whoever waits."""
    (growing,) = (replace(each, answer=answer) for each in OTHERS if each.name == "growing")
    held, stock = (answers_per_s(paper_config, arm, growing) for arm in (PAPER_HOLD, PAPER_STOCK))
    assert held > stock
