"""An error of ours while vLLM schedules, with older requests held: it goes on as stock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hall import BLOCK_SIZE, Clock, Hall, by_priority, shape, tokens_of
from kvgraph.hooks.settings import HOLD_MAX_VARIABLE
from kvgraph_bench.paper.paper_engine import PaperEngine
from paper import fail

pytestmark = pytest.mark.usefixtures("vllm_loaded")

KINDS = [
    pytest.param((order, asynchronous), id=f"{order}-{'async' if asynchronous else 'sync'}")
    for order in ("fcfs", "priority")
    for asynchronous in (False, True)
]


@pytest.fixture(params=KINDS)
def hall(
    request: pytest.FixtureRequest, paper_config: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hall]:
    monkeypatch.setenv(HOLD_MAX_VARIABLE, "120")
    order, asynchronous = request.param
    config = by_priority(paper_config) if order == "priority" else paper_config
    engine = PaperEngine(config, shape(asynchronous=asynchronous), clock=Clock())
    yield Hall(engine)
    engine.close()


def break_at(hall: Hall, where: str) -> None:
    if where == "lookup":
        hall.side.observer.request_looked_up = fail
    elif where == "allocation":
        hall.side.observer.request_scheduled = fail
    else:
        hall.holding.update_state_after_alloc = fail
        hall.engine.rewire()


@pytest.mark.parametrize("where", ["lookup", "allocation", "admission"])
def test_an_error_while_one_is_scheduled_puts_no_older_one_in_its_place(
    hall: Hall, where: str
) -> None:
    """vLLM has looked at the head and not taken it out yet: what was held stood before it."""
    engine = hall.engine
    hall.say(None)
    hall.ask(4, 1, session_id="a")
    engine.settle()
    hall.busy()
    hall.say(0)
    held = [hall.ask(6, 2), hall.ask(3, 3)]
    again = engine.ask(tokens_of(4, 1, range(5 * BLOCK_SIZE)), 3, session_id="a").request_id
    assert hall.held == held, "older than the one that may start"
    break_at(hall, where)
    hall.step(1, room=0)
    assert engine.side is None, "ours is out of the way"
    assert again in {each.request_id for each in engine.scheduler.running}
    engine.settle()
    assert [len(engine.outputs[name]) for name in (*held, again)] == [1, 1, 3]
    assert type(engine.scheduler.waiting).__name__ != "HoldingQueue"
    assert engine.is_whole()


@pytest.mark.parametrize("all_at_once", [False, True])
def test_nobody_is_lost_where_telling_of_the_held_fails(hall: Hall, all_at_once: bool) -> None:
    engine = hall.engine
    hall.busy()
    hall.say(0)
    held = [hall.ask(6, 2), hall.ask(3, 3)]
    assert hall.held == held
    engine.scheduler.waiting.queued = [fail]
    hall.step(1, room=None if all_at_once else 99)
    engine.settle()
    assert [len(engine.outputs[name]) for name in held] == [1, 1]
    assert engine.is_whole()


def test_who_was_held_can_go_away_between_an_error_and_vllms_next_look(hall: Hall) -> None:
    hall.busy()
    hall.say(0)
    first, second = hall.ask(4, 1), hall.ask(4, 2)
    hall.holding.end()
    late = hall.ask(2, 3)
    assert hall.engine.scheduler.get_request_counts() == (1, 3)
    hall.abort(first)
    hall.engine.settle()
    assert [len(hall.engine.outputs[name]) for name in (first, second, late)] == [0, 1, 1]
    assert not hall.engine.scheduler.deferred_waiting
    assert hall.engine.is_whole()
