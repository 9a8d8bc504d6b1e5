"""Who goes first, whom names mean, and what vLLM's other ways of waiting make of holding."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hall import BLOCK_SIZE, Clock, Hall, by_priority, shape, tokens_of
from kvgraph.graph.release_order import Held, HoldingOrder
from kvgraph.hooks.settings import HOLD_MAX_VARIABLE
from kvgraph.hooks.vllm.holding.arrivals import Midpoint, SessionName, SessionNames, midpoint_of
from kvgraph_bench.paper.paper_engine import PaperEngine
from paper import fail, park

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


def test_an_id_for_each_request_holds_no_conversation_back(hall: Hall) -> None:
    hall.say(None)
    for number in range(400):
        hall.abort(hall.ask(1, 1000 + number, session_id=f"early-{number}"))
    hall.saturate()
    hall.ask(4, 1, session_id="request-1")
    hall.engine.settle()
    hall.shut()
    hall.engine.ask(tokens_of(4, 1, range(2 * BLOCK_SIZE)), 1, session_id="request-2")
    assert hall.held == []
    hall.ask(4, 2, session_id="request-3")
    assert len(hall.held) == 1


@pytest.mark.parametrize(("users", "held"), [(2, 0), (9, 1)])
def test_one_id_for_everybody_is_no_session(hall: Hall, users: int, held: int) -> None:
    """Six run at most: the others wait in vLLM's own queue, and count."""
    hall.say(None)
    for seed in range(20, 20 + users):
        hall.engine.ask(tokens_of(4, seed), 300, session_id="default")
    hall.step(8, room=None)
    hall.say(0)
    newest = tokens_of(4, 19 + min(users, 6), range(5 * BLOCK_SIZE))
    hall.engine.ask(newest, 1, session_id="default")
    assert len(hall.held) == held


def add(hall: Hall, name: str, tokens: list[int], **fields: Any) -> None:
    """A request of this id, or more input for it."""
    hall.engine.outputs.setdefault(name, [])
    hall.engine.scheduler.add_request(hall.engine.make(name, tokens, 1, **fields))


def test_a_session_that_ended_is_a_new_one_when_it_comes_again(hall: Hall) -> None:
    hall.say(None)
    over = {"kvgraph": {"session_ended": True}}
    add(hall, "last", tokens_of(4, 1), session_id="a", kv_transfer_params=over)
    hall.engine.settle()
    hall.shut()
    hall.ask(6, 2, session_id="a")
    assert len(hall.held) == 1


def test_without_names_it_is_the_prompt_that_is_known(hall: Hall) -> None:
    hall.serve(6, 1)
    hall.shut()
    hall.engine.ask(tokens_of(6, 1, range(5 * BLOCK_SIZE)), 1)
    assert hall.held == []
    hall.engine.ask(tokens_of(6, 1, range(100, 100 + 9 * BLOCK_SIZE)), 1)
    assert len(hall.held) == 1, "more of it is new than known"


def test_what_a_tier_can_bring_back_is_resident(paper: Callable[..., Any]) -> None:
    hall = Hall(paper(shape(blocks=33, warm=64), clock=Clock()))
    hall.say(None)
    park(hall.engine, tokens_of(8, 1), session_id="a")
    hall.shut()
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
    busy = hall.shut()
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
    hall.shut()
    late, urgent = hall.ask(4, 1, priority=5), hall.ask(4, 2, priority=3)
    assert hall.held == [late, urgent]
    most_urgent = hall.ask(4, 3, priority=-5)
    assert most_urgent not in hall.held, "one of worse priority runs"
    hall.step(1, room=7)
    assert hall.held == [late]
    hall.step(3, room=None)
    assert hall.started[1:] == [most_urgent, urgent, late]


def test_where_vllm_knows_no_priorities_nobody_claims_one(hall: Hall) -> None:
    """vLLM takes the field from any client, and its default policy does not look at it."""
    hall.shut()
    names = [hall.ask(4, number, priority=-number) for number in range(1, 4)]
    assert hall.held == names
    hall.step(1, room=4)
    assert hall.held == names[1:]


def test_streamed_input_of_a_held_request_waits_with_it(hall: Hall) -> None:
    hall.shut()
    add(hall, "stream", tokens_of(3, 1), resumable=True)
    assert hall.held == ["stream"]
    add(hall, "stream", tokens_of(2, 2), resumable=True)
    assert hall.held == ["stream"]
    hall.step(6, room=None)
    assert len(hall.engine.outputs["stream"]) == 2, "one answer for each part"
    hall.say(0)
    add(hall, "stream", tokens_of(2, 3), resumable=True)
    assert hall.held == [], "the scheduler knows it"
    hall.step(4, room=0)
    assert len(hall.engine.outputs["stream"]) == 3


@pytest.mark.parametrize(
    "where", ["step", "arrived", "removed", "update_state_after_alloc", "request_finished"]
)
def test_an_error_of_ours_lets_everybody_go(hall: Hall, where: str) -> None:
    hall.shut()
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
        name = hall.engine.ask(tokens, output, session_id=session).request_id
        asked.append((name, tokens, output))
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


def start_in_turn(hall: Hall, wanted: list[str]) -> None:
    """There is room for one of three blocks at a time, until all of these have started."""
    for _ in range(40):
        hall.step(1, room=3)
        hall.step(2, room=0)
        if all(name in hall.started for name in wanted):
            return
    pytest.fail("somebody still waits")


def new_sessions(hall: Hall, count: int, salt: str, seed: int) -> list[str]:
    """As many requests of three blocks, each of a new session of this tenant."""
    return [
        hall.ask(3, seed + at, session_id=f"{salt}{at}", cache_salt=salt) for at in range(count)
    ]


def test_a_tenant_that_opens_sessions_does_not_starve_another(hall: Hall) -> None:
    hall.shut()
    greedy, modest = new_sessions(hall, 80, "greedy", 0), new_sessions(hall, 3, "modest", 500)
    assert hall.held == greedy + modest
    start_in_turn(hall, modest)
    before = sum(name in greedy for name in hall.started)
    assert before <= len(modest) + 1, "turn and turn about"


def test_a_tenant_that_opens_sessions_does_not_starve_another_where_there_is_no_room(
    hall: Hall,
) -> None:
    hall.shut()
    greedy = new_sessions(hall, 80, "greedy", 0)
    modest = hall.ask(9, 500, session_id="m", cache_salt="modest")
    hall.clock.now += 11.0
    hall.step(20, room=0)
    before = hall.started[: hall.started.index(modest)]
    assert sum(name in greedy for name in before) <= 6, "the others wait behind themselves"


def test_sessions_that_never_end_keep_nobody_out_for_longer_than_the_bound(hall: Hall) -> None:
    """Two that are live and resident ask without an end; there never is room."""
    hall.say(None)
    texts = {name: tokens_of(6, at) for at, name in enumerate("ab")}
    for name in texts:
        hall.engine.ask(texts[name], 1, session_id=name)
        hall.engine.settle()
    hall.shut()
    new = [hall.ask(3, 100 + at, session_id=f"new-{at}") for at in range(5)]
    asked: list[str] = []
    for _ in range(80):
        for name in texts:
            asked.append(hall.engine.ask(texts[name], 1, session_id=name).request_id)
        assert not set(asked) & set(hall.held), "who is live and resident is never held"
        hall.clock.now += 1.5
        hall.step(3, room=0)
    assert hall.held == []
    assert set(new) <= set(hall.started)
    assert set(asked) <= set(hall.started)
    assert hall.holding.report().longest_s <= 120


@pytest.mark.parametrize("name", ["", " ", "x" * 20_000, "\ud800", "a\nb\0c", "🦆" * 300])
def test_a_nonsensical_session_id_is_held_like_any_other(hall: Hall, name: str) -> None:
    hall.shut()
    held = hall.ask(4, 1, session_id=name)
    assert hall.held == [held]
    hall.step(3, room=None)
    assert held in hall.started
    again = hall.engine.ask(tokens_of(4, 1, range(5 * BLOCK_SIZE)), 1, session_id=name).request_id
    hall.step(3, room=0)
    assert again in hall.started or hall.held == [again]
    hall.step(3, room=None)
    assert len(hall.engine.outputs[held]) == len(hall.engine.outputs[again]) == 1
    assert hall.side is hall.engine.side, "nothing of ours failed"


def test_the_name_of_a_running_session_lets_a_few_in_and_not_a_crowd(hall: Hall) -> None:
    """Few requests may run at once here: those that wait for that count, too."""
    hall.say(None)
    hall.engine.ask(tokens_of(4, 1), 400, session_id="a")
    hall.step(3)
    hall.say(0)
    for seed in range(40):
        hall.engine.ask(tokens_of(4, 1, [100 + seed] * 6 * BLOCK_SIZE), 1, session_id="a")
    assert len(hall.held) == 33, "one runs, and seven more may be of one session"
    hall.step(1, room=None)
    assert hall.held == []
    hall.engine.settle()
    hall.shut()
    last = tokens_of(4, 1, [139] * 6 * BLOCK_SIZE)
    hall.engine.ask([*last, *[7] * 11 * BLOCK_SIZE], 1, session_id="a")
    assert hall.held == [], "the crowd is over: the name is one session's again"


def test_requests_that_went_away_do_not_set_their_tenant_back(hall: Hall) -> None:
    """A large tenant's clients give up, or are refused, and come again; one has waited on."""
    hall.shut()
    for name in new_sessions(hall, 40, "a", 0)[1:]:
        hall.abort(name)
    other = new_sessions(hall, 10, "b", 500)
    again = hall.ask(3, 600, session_id="a again", cache_salt="a")
    start_in_turn(hall, [again])
    assert sum(name in hall.started for name in other) <= 3, "turn and turn about"


def test_salts_without_an_end_leave_nothing_behind(hall: Hall) -> None:
    hall.shut()
    stays = hall.ask(3, 1)
    for seed in range(300):
        hall.abort(hall.ask(3, 100 + seed, cache_salt=f"salt {seed}"))
    order = hall.holding._rule._order
    assert hall.held == [stays]
    assert not order.tenants
    assert order.entries <= 67


def test_who_waits_for_its_user_takes_nobodys_patience_away(hall: Hall) -> None:
    hall.say(None)
    hall.engine.ask(tokens_of(2, 1), 1, resumable=True)
    hall.step(6, room=None)
    assert hall.engine.scheduler.num_waiting_for_streaming_input == 1
    hall.shut()
    held = hall.ask(3, 50)
    hall.clock.now += 9.0
    hall.step(2, room=0)
    assert hall.held == [held]
    hall.clock.now += 1.5
    hall.step(2, room=0)
    assert held in hall.started


def test_one_small_context_under_many_names_lets_no_large_ones_in(hall: Hall) -> None:
    hall.say(None)
    for at in range(8):
        hall.ask(1, 7, session_id=f"g{at}", cache_salt="greedy")
        hall.engine.settle()
    hall.shut()
    honest = [hall.ask(6, 50 + at, session_id=f"h{at}") for at in range(3)]
    greedy = [hall.ask(20, 100 + at, session_id=f"g{at}", cache_salt="greedy") for at in range(8)]
    assert hall.held == honest + greedy


def test_names_that_were_served_next_to_nothing_go_before_nobody(hall: Hall) -> None:
    hall.say(None)
    for at in range(12):
        hall.engine.ask([at + 1] * 3, 1, session_id=f"greedy{at}", cache_salt="greedy")
        hall.engine.settle()
    hall.shut()
    honest, greedy = new_sessions(hall, 3, "honest", 50), new_sessions(hall, 12, "greedy", 100)
    start_in_turn(hall, honest)
    assert sum(name in hall.started for name in greedy) <= 3, "turn and turn about"


@pytest.mark.parametrize("salt", ["one", "two"], ids=["made anew", "another tenant's"])
def test_another_context_under_a_name_is_a_new_one(hall: Hall, salt: str) -> None:
    """Compacted, or begun again, or of somebody else: nothing of it was ever computed."""
    hall.serve(8, 1, session_id="a", cache_salt="one")
    hall.shut()
    another = hall.ask(6, 2, session_id="a", cache_salt=salt)
    assert hall.held == [another]


@pytest.mark.parametrize("subagents", [0, 3])
def test_a_cold_session_goes_before_new_ones_whoever_else_bore_its_name(
    hall: Hall, subagents: int
) -> None:
    hall.serve(4, 1, session_id="a")
    for at in range(subagents):
        hall.ask(3, 20 + at, session_id="a")
        hall.engine.settle()
    assert hall.engine.reset()
    hall.shut()
    new, cold = hall.ask(4, 2, session_id="b"), hall.ask(5, 1, session_id="a")
    assert hall.held == [new, cold]
    hall.step(2, room=5)
    assert hall.held == [new]


@pytest.mark.parametrize("name", [None, "a"])
def test_a_prompt_whose_first_block_is_gone_is_not_resident(hall: Hall, name: str | None) -> None:
    """Blocks go tail first, unless a ranking breaks that: then nothing behind it is found."""
    hall.say(None)
    request = hall.engine.ask(tokens_of(8, 1), 1, session_id=name)
    hall.engine.settle()
    first = hall.engine.pool.cached_block_hash_to_block.get_one_block(
        request.block_hashes[0] + bytes(4)
    )
    hall.engine.pool.evict_blocks({first.block_id})
    hall.shut()
    again = hall.engine.ask(tokens_of(8, 1, range(BLOCK_SIZE)), 1, session_id=name).request_id
    assert hall.held == [again]


def test_what_a_name_remembers_is_bounded_and_a_context_that_grows_is_one() -> None:
    names, name = SessionNames(), SessionName(None, "a")
    own = [b"own %d" % at for at in range(40)]
    names.started(name, None)
    names.finished(name, [b"another"], ended=False)
    for length in range(2, 40):
        names.started(name, midpoint_of(own[:length]))
        assert names.is_running(name, own[:length])
        names.finished(name, own[:length], ended=False)
    assert not names.is_running(name, own), "it ended"
    assert names.context(name, own) == Midpoint(19, b"own 19")
    assert names.context(name, own[:19]) is None, "less than half of it"
    assert names.context(name, [b"another"]), "one that grows takes no other's place"
    others = [[b"other %d" % number] for number in range(10)]
    for other in others:
        names.started(name, None)
        names.finished(name, other, ended=False)
    assert [bool(names.context(name, each)) for each in others] == 6 * [False] + 4 * [True]
    assert names.context(name, own) is None
    names.finished(name, [], ended=False)
    assert names.context(name, []) is None
