"""What may come at admission, on vLLM's own schedulers: greedy, endless and nonsensical callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hall import BLOCK_SIZE, Clock, Hall, shape, tokens_of
from kvgraph.hooks.settings import HOLD_MAX_VARIABLE
from kvgraph.hooks.vllm.holding.arrivals import Midpoint, SessionName, SessionNames, midpoint_of

pytestmark = pytest.mark.usefixtures("vllm_loaded")


@pytest.fixture
def hall(paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Hall:
    monkeypatch.setenv(HOLD_MAX_VARIABLE, "120")
    return Hall(paper(shape(), clock=Clock()))


def test_a_tenant_that_opens_sessions_does_not_starve_another(hall: Hall) -> None:
    hall.busy()
    hall.say(0)
    greedy = [hall.ask(3, seed, session_id=f"g{seed}", cache_salt="greedy") for seed in range(80)]
    modest = [
        hall.ask(3, 500 + seed, session_id=f"m{seed}", cache_salt="modest") for seed in range(3)
    ]
    assert hall.held == greedy + modest
    for _ in range(40):
        hall.step(1, room=1)  # for one at a time
        hall.step(2, room=0)
        if all(name in hall.started for name in modest):
            break
    else:
        pytest.fail("the other tenant still waits")
    before = sum(name in greedy for name in hall.started)
    assert before <= len(modest) + 1, "turn and turn about"


def test_a_tenant_that_opens_sessions_does_not_starve_another_where_there_is_no_room(
    hall: Hall,
) -> None:
    hall.busy()
    hall.say(0)
    greedy = [hall.ask(3, seed, session_id=f"g{seed}", cache_salt="greedy") for seed in range(80)]
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
    hall.busy()
    hall.say(0)
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
    hall.busy()
    hall.say(0)
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
    hall.engine.ask(tokens_of(3, 1), 400, session_id="a")
    hall.step(3)
    hall.say(0)
    for seed in range(40):
        hall.engine.ask(tokens_of(3, 1, [100 + seed] * 5 * BLOCK_SIZE), 1, session_id="a")
    assert len(hall.held) == 33, "one runs, and seven more may be of one session"
    hall.step(1, room=None)
    assert hall.held == []
    hall.engine.settle()
    hall.busy()
    hall.say(0)
    last = tokens_of(3, 1, [139] * 5 * BLOCK_SIZE)
    hall.engine.ask([*last, *[7] * 20 * BLOCK_SIZE], 1, session_id="a")
    assert hall.held == [], "the crowd is over: the name is one session's again"


def test_requests_that_went_away_do_not_set_their_tenant_back(hall: Hall) -> None:
    """A large tenant's clients give up, or are refused, and come again; one has waited on."""
    hall.busy()
    hall.say(0)
    many = [hall.ask(3, seed, session_id=f"a{seed}", cache_salt="a") for seed in range(40)]
    for name in many[1:]:
        hall.abort(name)
    other = [hall.ask(3, 500 + seed, session_id=f"b{seed}", cache_salt="b") for seed in range(10)]
    again = hall.ask(3, 600, session_id="a again", cache_salt="a")
    for _ in range(40):
        hall.step(1, room=1)  # for one at a time
        hall.step(2, room=0)
        if again in hall.started:
            break
    assert sum(name in hall.started for name in other) <= 3, "turn and turn about"


def test_salts_without_an_end_leave_nothing_behind(hall: Hall) -> None:
    hall.busy()
    hall.say(0)
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
    hall.busy()
    hall.say(0)
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
    hall.busy()
    hall.say(0)
    honest = [hall.ask(6, 50 + at, session_id=f"h{at}") for at in range(3)]
    greedy = [hall.ask(20, 100 + at, session_id=f"g{at}", cache_salt="greedy") for at in range(8)]
    assert hall.held == honest + greedy


def test_names_that_were_served_next_to_nothing_go_before_nobody(hall: Hall) -> None:
    hall.say(None)
    for at in range(12):
        hall.engine.ask([at + 1] * 3, 1, session_id=f"g{at}", cache_salt="greedy")
        hall.engine.settle()
    hall.busy()
    hall.say(0)
    honest = [hall.ask(3, 50 + at, session_id=f"h{at}", cache_salt="honest") for at in range(3)]
    greedy = [hall.ask(3, 100 + at, session_id=f"g{at}", cache_salt="greedy") for at in range(12)]
    for _ in range(30):
        hall.step(1, room=1)  # for one at a time
        hall.step(2, room=0)
        if all(name in hall.started for name in honest):
            break
    assert sum(name in hall.started for name in greedy) <= 3, "turn and turn about"


def test_a_context_that_was_made_anew_is_a_new_one(hall: Hall) -> None:
    """Compacted, or begun again: nothing of it was ever computed."""
    hall.say(None)
    hall.ask(8, 1, session_id="a")
    hall.engine.settle()
    hall.busy()
    hall.say(0)
    made_anew = hall.ask(6, 2, session_id="a")
    assert hall.held == [made_anew]


@pytest.mark.parametrize("subagents", [0, 3])
def test_a_cold_session_goes_before_new_ones_whoever_else_bore_its_name(
    hall: Hall, subagents: int
) -> None:
    hall.say(None)
    hall.ask(4, 1, session_id="a")
    hall.engine.settle()
    for at in range(subagents):
        hall.ask(3, 20 + at, session_id="a")
        hall.engine.settle()
    assert hall.engine.reset()
    hall.busy()
    hall.say(0)
    new, cold = hall.ask(4, 2, session_id="b"), hall.ask(5, 1, session_id="a")
    assert hall.held == [new, cold]
    hall.step(2, room=1)
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
    hall.busy()
    hall.say(0)
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
