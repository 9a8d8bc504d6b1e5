"""How fast an engine without tiers computes prompts: from when its steps are scheduled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.graph.wire.events import Pressure
from kvgraph.hooks.vllm.meters import PrefillMeter
from kvgraph_bench.paper.paper_engine import Shape


def played(steps: list[tuple[int, float, str]], behind: int = 0) -> float:
    """The rate after steps of so many tokens, each at a time, with these requests."""
    meter = PrefillMeter(behind)
    for tokens, at, running in steps:
        meter.stepped(tokens, dict.fromkeys(running), at)
    return meter.tokens_per_s


def test_what_lies_between_two_steps_is_what_one_took() -> None:
    assert played([(1000, 5.0, "a"), (1, 5.5, "a")]) == 2000


def test_of_steps_that_overlap_the_one_before_is_over() -> None:
    assert played([(500, 5.0, "a"), (1000, 5.001, "a"), (1, 5.251, "a")], behind=1) == 2000


def test_decoding_says_nothing() -> None:
    assert played([(8, 5.0, "a"), (8, 5.5, "a")]) == 0


@pytest.mark.parametrize("behind", [0, 1])
def test_an_engine_that_may_have_been_idle_says_nothing(behind: int) -> None:
    assert played([(1000, 5.0, "a"), (1000, 8.0, "b"), (0, 8.0, "")], behind) == 0


def test_a_pause_is_no_step() -> None:
    assert played([(1000, 5.0, "a"), (1, 65.0, "a")]) == 0


def test_an_engine_tells_it_with_its_load(paper: Callable[..., Any]) -> None:
    now = [10.0]
    engine = paper(Shape(blocks=65, warm=None), clock=lambda: now[0])
    engine.ask(range(100), 20)
    for took in (0.05, 0.01, 0.01):
        engine.step()
        now[0] += took
    told = engine.side.heartbeat(0)[0]
    assert isinstance(told, Pressure)
    assert told.prefill_tokens_per_s == 2000
