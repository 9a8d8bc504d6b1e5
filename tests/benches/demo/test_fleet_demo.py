"""The demo of a fleet: rivals pick as they say, failures are counted, and the report tells."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from kvgraph_bench.agents.agents_arms import AgentPass, Sender
from kvgraph_bench.fleet.fleet_demo import FleetDemo, round_robin
from kvgraph_bench.fleet.fleet_stage import TOLD, Killed
from kvgraph_bench.fleet.stand_in_engine import StandInEngine
from kvgraph_bench.recorded.agents_requests import AgentRequest
from kvgraph_bench.serving.completions import Answer, PassResult


def sse(tokens: int) -> list[str]:
    """A streamed answer of so many tokens, a quarter of whose prompt was cached."""
    usage = {
        "prompt_tokens": 40, "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": 10},
    }  # fmt: skip
    chunks = [{"choices": [{"text": "w"}]}, {"choices": [], "usage": usage}]
    return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]


def request(session: str, number: int) -> AgentRequest:
    prompt = tuple(range(40))
    return AgentRequest(
        f"{session}/{number}", float(number), session, prompt, (7, 8), False, None, None, ()
    )


def played(engines: Sequence[StandInEngine], requests: list[AgentRequest]) -> AgentPass:
    async def run() -> AgentPass:
        for engine in engines:
            await engine.start()
        try:
            urls = [engine.url for engine in engines]
            sender = Sender(
                urls, requests, TOLD, lambda _: None, pick=round_robin(), arm="arm", tolerant=True
            )
            return await sender.play()
        finally:
            for engine in engines:
                engine.kill()

    return asyncio.run(run())


@pytest.fixture
def engines() -> list[StandInEngine]:
    found = [StandInEngine(), StandInEngine()]
    for engine in found:
        engine.pieces = sse(2)
    return found


def test_turns_go_out_in_order_and_no_pass_continues_sessions_of_another(
    engines: list[StandInEngine],
) -> None:
    passed = played(engines[:1], [request("a", n) for n in range(4)])
    assert [answer.name for answer in passed.result.answers] == [f"a/{n}" for n in range(4)]
    assert {body["session_id"] for body in engines[0].got} == {"arm-a"}
    assert passed.share == 0.25
    assert passed.failed == ()


def arm(name: str, cached: int, ttft_s: float, failed: int = 0) -> AgentPass:
    answers = tuple(Answer(f"a/{n}", "", ttft_s, ttft_s, 100, cached, 2) for n in range(20))
    lost = tuple(f"f/{n}" for n in range(failed))
    return AgentPass(PassResult(answers, 9.0), (), lost, name)


@pytest.fixture
def result(tmp_path: Path) -> FleetDemo:
    status = {"requests": {"broken": 1, "retried": 4}, "decisions": {"home": 3}}
    killed = Killed(arm("killed", 50, 1.0, failed=3), 5, 1, 17, status)
    arms = (arm("kvgraph route", 60, 0.5), arm("round robin", 20, 2.0), arm("hash", 50, 1.0))
    shared = arm("kvgraph route, a store", 70, 0.4)
    return FleetDemo(tmp_path, 20, 70, 0.01, arms, {"home": 15, "new": 5}, shared, 12, 34, killed)


def test_figures_compare_with_the_best_rival(result: FleetDemo) -> None:
    figures = result.figures().figures
    assert figures["cached_over_best_rival"].value == pytest.approx(1.2)
    assert figures["ttft_p95_over_best_rival"].value == pytest.approx(0.5)
    assert figures["failed_after_kill"].value == 2
    assert figures["cut_by_kill"].value == 1
