"""Who goes first, whom names mean, and what vLLM's other ways of waiting make of holding."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hall import BLOCK_SIZE, Clock, Hall, by_priority, shape, tokens_of
from kvgraph.graph.release_order import Held, HoldingOrder
from kvgraph.hooks.settings import HOLD_MAX_VARIABLE
from kvgraph.hooks.vllm.holding.arrivals import SessionName, SessionNames
from kvgraph_bench.paper.paper_engine import PaperEngine
from paper import fail

pytestmark = pytest.mark.usefixtures("vllm_loaded")


@pytest.fixture(autouse=True)
def two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOLD_MAX_VARIABLE, "120")


@pytest.fixture
def hall(paper: Callable[..., Any]) -> Hall:
    return Hall(paper(shape(), clock=Clock()))


def drain(order: HoldingOrder) -> list[str]:
    names = []
    while (held := order.peek()) is not None:
        order.take(held.request_id)
        names.append(held.request_id)
    return names


def test_one_tenant_is_served_in_its_order() -> None:
    order = HoldingOrder()
    for number in range(50):
        order.add(Held(f"r{number}", float(number), 1 + number % 7))
    assert drain(order) == [f"r{number}" for number in range(50)]


def test_who_opens_a_thousand_sessions_waits_behind_himself() -> None:
    order = HoldingOrder()
    for number in range(1000):
        order.add(Held(f"greedy{number}", 0.0, 10, tenant="greedy"))
    for number in range(10):
        order.add(Held(f"modest{number}", 1.0, 10, tenant="modest"))
    first = drain(order)[:21]
    assert sum(name.startswith("modest") for name in first) == 10
    assert [name for name in first if name.startswith("modest")] == [
        f"modest{n}" for n in range(10)
    ]


def test_tenants_share_by_blocks_not_by_requests() -> None:
    order = HoldingOrder()
    for number in range(40):
        order.add(Held(f"large{number}", 0.0, 30, tenant="large"))
        order.add(Held(f"small{number}", 0.0, 10, tenant="small"))
    first = drain(order)[:40]
    small = sum(name.startswith("small") for name in first)
    assert small == pytest.approx(30, abs=2)


def test_priority_goes_before_everything_and_returning_sessions_before_new_ones() -> None:
    order = HoldingOrder()
    order.add(Held("new", 0.0, 5))
    order.add(Held("returning", 1.0, 5, returning=True))
    order.add(Held("urgent", 2.0, 5, priority=-1))
    assert order.oldest().request_id == "new"
    assert drain(order) == ["urgent", "returning", "new"]


def test_what_is_taken_out_of_turn_is_never_next() -> None:
    rng, order, waiting = random.Random(5), HoldingOrder(), set[str]()
    for number in range(5000):
        if rng.random() < 0.6:
            name = f"r{number % 700}"
            if name not in waiting:
                order.add(Held(name, float(number), rng.randint(1, 9), tenant=str(number % 5)))
                waiting.add(name)
                assert order.entries <= 2 * len(order) + 65
        elif waiting:
            gone = rng.choice([*sorted(waiting), order.peek().request_id])
            assert order.take(gone) is not None
            waiting.discard(gone)
        assert len(order) == len(waiting)
        assert (order.peek() is not None) == bool(waiting)
    assert sorted(drain(order)) == sorted(waiting)


def test_names_that_never_come_back_name_no_sessions() -> None:
    names = SessionNames()
    for number in range(100):
        names.arrived(SessionName(None, f"chat-{number % 20}"))
        names.started(SessionName(None, f"chat-{number % 20}"), None)
    assert names.is_new(SessionName(None, "another"))
    assert not names.is_new(SessionName(None, "chat-3"))
    for number in range(500):
        names.arrived(SessionName(None, f"request-{number}"))
        names.started(SessionName(None, f"request-{number}"), None)
    assert not names.is_new(SessionName(None, "another")), "they say nothing any more"


def test_an_id_for_each_request_holds_no_conversation_back(hall: Hall) -> None:
    hall.say(None)
    for number in range(400):
        hall.abort(hall.ask(1, 1000 + number, session_id=f"early-{number}"))
    hall.saturate()
    hall.ask(4, 1, session_id="request-1")
    hall.engine.settle()
    hall.busy()
    hall.say(0)
    hall.engine.ask(tokens_of(4, 1, range(2 * BLOCK_SIZE)), 1, session_id="request-2")
    assert hall.held == []
    hall.ask(4, 2, session_id="request-3")
    assert len(hall.held) == 1


@pytest.mark.parametrize(("users", "held"), [(2, 0), (9, 1)])
def test_one_id_for_everybody_is_no_session(hall: Hall, users: int, held: int) -> None:
    """Six run at most: the others wait in vLLM's own queue, and count."""
    hall.say(None)
    for seed in range(20, 20 + users):
        hall.engine.ask(tokens_of(1, seed), 300, session_id="default")
    hall.step(8, room=None)
    hall.say(0)
    newest = tokens_of(1, 19 + min(users, 6), range(8 * BLOCK_SIZE))
    hall.engine.ask(newest, 1, session_id="default")
    assert len(hall.held) == held


def test_a_session_that_ended_is_a_new_one_when_it_comes_again(hall: Hall) -> None:
    hall.say(None)
    request = hall.engine.make("last", tokens_of(4, 1), 1, session_id="a")
    request.kv_transfer_params = {"kvgraph": {"session_ended": True}}
    hall.engine.outputs["last"] = []
    hall.engine.scheduler.add_request(request)
    hall.engine.settle()
    hall.busy()
    hall.say(0)
    hall.ask(6, 2, session_id="a")
    assert len(hall.held) == 1


def test_another_tenants_session_of_the_same_name_is_another(hall: Hall) -> None:
    hall.say(None)
    hall.ask(4, 1, session_id="a", cache_salt="one")
    hall.engine.settle()
    hall.busy()
    hall.say(0)
    hall.ask(6, 2, session_id="a", cache_salt="two")
    assert len(hall.held) == 1


def test_without_names_it_is_the_prompt_that_is_known(hall: Hall) -> None:
    hall.say(None)
    hall.ask(6, 1)
    hall.engine.settle()
    hall.busy()
    hall.say(0)
    hall.engine.ask(tokens_of(6, 1, range(5 * BLOCK_SIZE)), 1)
    assert hall.held == []
    hall.engine.ask(tokens_of(6, 1, range(100, 100 + 9 * BLOCK_SIZE)), 1)
    assert len(hall.held) == 1, "more of it is new than known"


def test_what_a_tier_can_bring_back_is_resident(paper: Callable[..., Any]) -> None:
    from paper import park

    engine = paper(shape(blocks=33, warm=64), clock=Clock())
    hall = Hall(engine)
    hall.say(None)
    park(engine, tokens_of(8, 1), session_id="a")
    hall.busy()
    hall.say(0)
    hall.ask(8, 1, session_id="a")
    assert hall.held == []


def test_a_preempted_request_is_never_held(paper: Callable[..., Any]) -> None:
    hall = Hall(paper(shape(blocks=21), clock=Clock()))
    hall.say(None)
    names = [hall.engine.ask(tokens_of(3, seed), 150).request_id for seed in (1, 2, 3)]
    for _ in range(600):
        hall.step(1, room=0)
        assert hall.held == []
        if not hall.engine.scheduler.requests:
            break
    assert all(len(hall.engine.outputs[name]) == 150 for name in names)
    assert hall.engine.is_whole()


def test_a_long_prompt_that_was_held_is_computed_in_chunks(hall: Hall) -> None:
    busy = hall.busy()
    hall.say(0)
    name = hall.ask(28, 1, output=2)
    hall.step(3, room=0)
    assert hall.held == [name]
    hall.step(1, room=40)
    hall.abort(busy)
    hall.step(8, room=0)
    assert len(hall.engine.outputs[name]) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_vllms_priorities_hold(
    paper_config: Any, request: pytest.FixtureRequest, asynchronous: bool
) -> None:
    engine = PaperEngine(by_priority(paper_config), shape(asynchronous=asynchronous), clock=Clock())
    request.addfinalizer(engine.close)
    hall = Hall(engine)
    hall.busy()
    hall.say(0)
    late, urgent = hall.ask(4, 1, priority=5), hall.ask(4, 2, priority=3)
    assert hall.held == [late, urgent]
    most_urgent = hall.ask(4, 3, priority=-5)
    assert most_urgent not in hall.held, "one of worse priority runs"
    hall.step(1, room=2)
    assert hall.held == [late]
    hall.step(3, room=None)
    assert hall.started[1:] == [most_urgent, urgent, late]


def test_where_vllm_knows_no_priorities_nobody_claims_one(hall: Hall) -> None:
    """vLLM takes the field from any client, and its default policy does not look at it."""
    hall.busy()
    hall.say(0)
    names = [hall.ask(4, number, priority=-number) for number in range(1, 4)]
    assert hall.held == names
    hall.step(1, room=4)
    assert hall.held == names[1:]


def test_streamed_input_of_a_held_request_waits_with_it(hall: Hall) -> None:
    hall.busy()
    hall.say(0)
    first = hall.engine.make("stream", tokens_of(3, 1), 1, resumable=True)
    hall.engine.outputs["stream"] = []
    hall.engine.scheduler.add_request(first)
    assert hall.held == ["stream"]
    more = hall.engine.make("stream", tokens_of(2, 2), 1, resumable=True)
    hall.engine.scheduler.add_request(more)
    assert hall.held == ["stream"]
    hall.step(6, room=None)
    assert len(hall.engine.outputs["stream"]) == 2, "one answer for each part"
    hall.say(0)
    third = hall.engine.make("stream", tokens_of(2, 3), 1, resumable=True)
    hall.engine.scheduler.add_request(third)
    assert hall.held == [], "the scheduler knows it"
    hall.step(4, room=0)
    assert len(hall.engine.outputs["stream"]) == 3


@pytest.mark.parametrize(
    "where", ["step", "arrived", "removed", "update_state_after_alloc", "request_finished"]
)
def test_an_error_of_ours_lets_everybody_go(hall: Hall, where: str) -> None:
    hall.busy()
    hall.say(0)
    names = [hall.ask(2, seed) for seed in range(1, 5)]
    assert hall.held == names
    setattr(hall.holding, where, fail)
    hall.engine.rewire()
    if where == "removed":
        hall.abort(names.pop(2))
    if where == "request_finished":
        hall.abort("r0")
    else:
        names.append(hall.ask(2, 9))
        if where == "update_state_after_alloc":
            hall.holding.queue.release(names[0])
    hall.step(3, room=0)
    assert hall.side is not hall.engine.side, "ours is out of the way"
    assert type(hall.engine.scheduler.waiting).__name__ == "FCFSRequestQueue"
    hall.step(12)
    assert all(len(hall.engine.outputs[name]) == 1 for name in names)


def test_a_thousand_prompts_at_once_are_all_served_in_order(paper: Callable[..., Any]) -> None:
    hall = Hall(paper(shape(blocks=65), clock=Clock()))
    hall.say(0)
    names = [hall.ask(3, 10 + seed) for seed in range(1000)]
    assert len(hall.held) >= 999
    longest = 0
    for _ in range(3000):
        hall.step(1, room=6 * (3 - min(3, len(hall.engine.scheduler.running))))
        hall.engine.finish_copies()
        longest = max(longest, len(hall.engine.scheduler.running))
        if not hall.engine.scheduler.requests:
            break
    assert hall.started == names
    assert all(len(hall.engine.outputs[name]) == 1 for name in names)
    assert hall.engine.is_whole()
    assert hall.holding.report().longest_s < 120


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_traffic_gets_stocks_answers(
    paper: Callable[..., Any], asynchronous: bool, seed: int
) -> None:
    rng = random.Random(seed)
    hall = Hall(paper(shape(asynchronous=asynchronous, blocks=49), clock=Clock()))
    stock = paper(shape(asynchronous=asynchronous, blocks=49))
    asked: list[tuple[str, list[int], int]] = []
    for _ in range(120):
        tokens = tokens_of(rng.randint(1, 12), rng.randint(1, 15), range(rng.randint(0, 40)))
        output = rng.randint(1, 9)
        session = f"s{rng.randint(1, 8)}" if rng.random() < 0.7 else None
        asked.append(
            (hall.engine.ask(tokens, output, session_id=session).request_id, tokens, output)
        )
        hall.step(rng.randint(0, 3), room=rng.choice([0, 0, 5, 40, None]))
        if rng.random() < 0.1 and hall.held:
            gone = rng.choice(hall.held)
            hall.abort(gone)
            asked = [each for each in asked if each[0] != gone]
        if rng.random() < 0.05:
            hall.clock.now += rng.choice([0.6, 3.0, 130.0])
    hall.say(None)
    hall.clock.now += 5
    hall.engine.settle()
    assert hall.engine.is_whole()
    assert hall.holding.report().waiting == 0
    for name, tokens, output in asked:
        assert hall.engine.outputs[name] == stock.serve(tokens, output), name
