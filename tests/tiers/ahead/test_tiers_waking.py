"""An engine that has nothing to do is woken for an order, as often as there is something to do."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from contextlib import closing
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.vllm.tiers.idle import IdleEngine
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from paper import hashes_of, in_pool, park, text
from pool_engine import Engine, keys, parked, prompt
from pool_requests import ranking

pytestmark = pytest.mark.usefixtures("vllm_loaded")


class Loop:
    """What an idle engine looks at: its input queue, and whether it is paused."""

    def __init__(self, ranks: int = 1) -> None:
        parallel = SimpleNamespace(data_parallel_size=ranks)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.paused = False

    def is_scheduler_paused(self) -> bool:
        return self.paused


def order(engine: Engine, wanted: list[int]) -> None:
    """The sidecar's order arrives, a while after the last."""
    engine.now += 1.0
    engine.advise(wanted)
    engine.bridge.idle.ordered(engine.side.client.wanted())


def run(engine: Engine, loop: Loop) -> int:
    """What vLLM's loop does: end the wait, and step while there is work; how many steps."""
    steps = 0
    while not loop.input_queue.empty():
        loop.input_queue.get()
    while engine.busy:
        engine.step()
        engine.worker.finish_all()
        steps += 1
        assert steps < 50, "the engine never rests"
    return steps


@pytest.fixture
def engine() -> Engine:
    return Engine(blocks=33, warm=128)


@pytest.fixture
def loop(engine: Engine) -> Loop:
    loop = Loop()
    engine.bridge.idle.bind(loop)
    return loop


def test_an_order_ends_the_wait_and_brings_copies_without_a_request(
    engine: Engine, loop: Loop
) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    first = parked(engine)
    assert not engine.busy
    order(engine, keys(first))
    assert loop.input_queue.queue[0] == (EngineCoreRequestType.WAKEUP, None)
    assert engine.busy
    assert 1 <= run(engine, loop) <= 6
    assert engine.counts.prefetched == 4
    assert not engine.busy, "it rests again"
    assert engine.serve(prompt(4, 1)).hits == 4
    engine.check_whole()


def test_the_same_order_does_not_wake_again_what_could_not_follow_it(
    engine: Engine, loop: Loop
) -> None:
    first = parked(engine)
    holder = engine.ask(prompt(28, 70))  # no room is left
    engine.finish_loading(holder)
    engine.settle()
    for _ in range(3):
        order(engine, keys(first))
        run(engine, loop)
    woken = 0
    for _ in range(10):
        order(engine, keys(first))
        woken += not loop.input_queue.empty()
        run(engine, loop)
    assert woken == 0
    assert engine.counts.prefetched == 0
    engine.end(holder)
    engine.serve(prompt(1, 71))  # something happened
    order(engine, keys(first))
    run(engine, loop)
    assert engine.counts.prefetched == 4


def test_an_empty_order_wakes_nobody(engine: Engine, loop: Loop) -> None:
    parked(engine)
    order(engine, [])
    assert loop.input_queue.empty()
    assert not engine.busy


def test_wake_ups_are_bounded(engine: Engine, loop: Loop) -> None:
    first = parked(engine)
    began = engine.now
    for number in range(1000):
        engine.now += 0.001
        wanted = np.array([*keys(first), number], dtype=np.uint64)
        engine.bridge.idle.ordered(wanted)
    assert 1 <= loop.input_queue.qsize() <= (engine.now - began) / 0.1 + 1


def test_a_paused_engine_takes_no_step_before_it_goes_on(engine: Engine, loop: Loop) -> None:
    first = parked(engine)
    loop.paused = True
    order(engine, keys(first))
    assert not engine.busy
    assert engine.counts.prefetched == 0
    loop.paused = False
    assert engine.busy
    run(engine, loop)
    assert engine.counts.prefetched == 4


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (None, "it has no process of its own, and steps when its caller does"),
        (Loop(ranks=2), "data-parallel ranks begin their steps together"),
    ],
)
def test_an_engine_that_cannot_be_woken_says_so_once(
    loop: Loop | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(blocks=33, warm=128)
    if loop is not None:
        engine.bridge.idle.bind(loop)
    first = parked(engine)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            order(engine, keys(first))
    assert not engine.busy
    assert [each for each in caplog.messages if "nothing is prefetched" in each] == [
        f"kvgraph: while this engine has nothing to do, nothing is prefetched: {reason}"
    ]
    engine.settle()
    assert engine.counts.prefetched == 4, "the next step takes it all the same"


def test_an_order_that_comes_during_a_step_is_taken_by_this_one_or_the_next() -> None:
    now = 100.0
    idle, loop = IdleEngine(lambda: now), Loop()
    idle.bind(loop)  # type: ignore[arg-type]
    idle.stepped()
    idle.ordered(np.array([1], dtype=np.uint64))
    idle.worked(False)
    assert idle.due
    idle.stepped()
    assert not idle.due


@pytest.mark.parametrize("late", [False, True])
def test_after_an_error_of_ours_an_engine_that_was_woken_rests(
    paper: Callable[..., Any], late: bool
) -> None:
    engine, loop = paper(Shape(blocks=33, warm=64)), Loop()
    engine.connector.bind_loop(loop)
    engine.serve(text(4, 1))
    wanted = engine.side.client.ordered
    if not late:
        wanted(np.array([1], dtype=np.uint64))
        assert engine.scheduler.has_requests()
    engine.connector.disable("step", RuntimeError("an injected fault"))
    if late:
        wanted(np.array([1], dtype=np.uint64))
    assert not engine.scheduler.has_requests()
    assert engine.is_whole()


# Engines that publish KV events ---------------------------------------------------------------


@pytest.mark.parametrize("publishes", [False, True])
def test_where_kv_events_are_published_copies_come_back_for_requests_alone(
    paper_config: Any, publishes: bool
) -> None:
    """No event says that a block was prefetched, and the next ones name it as their parent."""
    from vllm.config import KVEventsConfig

    config = copy(paper_config)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=publishes, publisher="null")
    with closing(PaperEngine(config, Shape(warm=128))) as engine:
        prompt, client = text(4, 1), engine.side.client
        park(engine, prompt)
        wanted = [key_of(each) for each in hashes_of(engine, prompt)]
        client.hold_ranking(ranking())
        client.hold_wanted(np.array(wanted, dtype=np.uint64))
        engine.serve(text(1, 2), output=12)
        assert in_pool(engine, prompt) == (0 if publishes else 4)
        assert (client.ordered is None) is publishes, "nor is it woken"
        engine.serve(prompt)
        assert in_pool(engine, prompt) == 4
        assert engine.side.bridge.ledger.counts.loaded == (4 if publishes else 0)
