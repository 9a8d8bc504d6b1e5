"""Real schedulers with a fault of ours: nobody hangs, nobody else pays, the engine falls idle."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from kvgraph.bench.paper.paper_engine import Shape, request_maker
from kvgraph.graph.messages.advice import EvictionRanking
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.tiers.jobs import Spill
from paper import begin_load, fail, park, text

SCHEDULERS = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
PARKED = text(6, 1)
BROKEN = ("step_ended", "bridge.step_ended", "_catch_up", "bridge.answered")


@SCHEDULERS
def test_a_load_that_was_not_ordered_costs_nobody_else(
    paper: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runs on the head of a parked prompt when B asks for all of it and our side breaks."""
    engine = paper(Shape(asynchronous=asynchronous))
    park(engine, PARKED)
    running = engine.ask(PARKED[: 3 * 16 + 1], output=60)
    while len(engine.outputs[running.request_id]) < 5:
        engine.step()
        engine.finish_copies()
    other = engine.ask(PARKED, output=4)
    monkeypatch.setattr(engine.side.observer, "request_scheduled", fail)
    computed = running.num_computed_tokens
    for _ in range(6):
        engine.step()
        assert running.num_computed_tokens >= computed, "a request was rolled back for ours"
    assert engine.side is None
    engine.settle()
    assert len(engine.outputs[running.request_id]) == 60
    assert len(engine.outputs[other.request_id]) == 4
    assert engine.is_whole()


@SCHEDULERS
@pytest.mark.parametrize(
    "broken", ["step_ended", "bridge.step_ended", "_catch_up", "bridge.answered"]
)
def test_what_was_answered_is_heard_whatever_fails_beside_it(
    paper: Any, asynchronous: bool, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = paper(Shape(asynchronous=asynchronous))
    park(engine, PARKED)
    request = begin_load(engine, PARKED, output=4)
    owner, name = (engine.side, broken) if "." not in broken else (engine.side.bridge, broken[7:])
    real = getattr(owner, name)

    def after_it(*args: Any) -> None:
        if name == "answered":
            real(*args)
        fail()

    monkeypatch.setattr(owner, name, after_it)
    engine.finish_copies()
    for _ in range(3):
        engine.step()
    monkeypatch.undo()
    assert engine.side is None
    engine.settle()  # it would step for ever for an answer that was lost
    assert len(engine.outputs[request.request_id]) == 4
    assert engine.is_whole()
    assert "cache_full_blocks" not in vars(engine.pool)


@SCHEDULERS
@pytest.mark.parametrize("warm", [4, 8, 16])
def test_an_engine_with_little_memory_for_copies_falls_idle(
    paper: Any, asynchronous: bool, warm: int
) -> None:
    engine = paper(Shape(asynchronous=asynchronous, warm=warm))
    for seed in range(20):
        engine.serve(text(6, seed), output=4)  # raises if the engine never falls idle
    assert engine.side.bridge.ledger.counts.spilled


def test_an_engine_whose_copies_all_fail_falls_idle(paper: Any) -> None:
    engine = paper(Shape())
    for worker in engine.workers:
        worker.failing = lambda job: range(len(job.copies)) if isinstance(job, Spill) else ()
    for seed in range(20):
        engine.serve(text(6, seed), output=4)
    assert engine.side.bridge.ledger.counts.spill_failed
    assert engine.is_whole()


def test_advice_that_contradicts_itself_lets_an_engine_fall_idle(paper: Any) -> None:
    """What is to be copied first is also what is to make room."""
    engine = paper(Shape(warm=24))
    for seed in range(8):
        advise(engine, [key for old in range(seed) for key in keys(text(6, old))])
        engine.serve(text(6, seed), output=4)  # raises if the engine never falls idle
    assert engine.side.bridge.ledger.counts.spilled


def keys(prompt: list[int]) -> list[int]:
    make = request_maker()
    return [key_of(block_hash) for block_hash in make("probe", prompt, 1).block_hashes]


def advise(engine: Any, every: list[int]) -> None:
    named, none = np.array(every, dtype=np.uint64), np.empty(0, dtype=np.uint64)
    ranking = EvictionRanking(1, time.monotonic() + 1e6, none, none, named, named)
    engine.side.client.hold_ranking(ranking)
