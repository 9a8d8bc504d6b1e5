"""What a session's name is worth at admission: nothing without the context that was served."""

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
