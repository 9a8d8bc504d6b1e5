"""Why a request waited and missed, and what would have made it faster: in words and seconds."""

from __future__ import annotations

import pytest
from kvgraph.advisor.page.misses import RequestQuery, requests_of
from kvgraph.advisor.page.page import Page
from kvgraph.advisor.words.words import Departure, miss_sentence
from kvgraph.graph.logs.reasons import DepartureRule, Reason
from kvgraph.graph.wire.events import Pressure, RequestFinished, RequestStarted
from small_world import SIZE, World, pack, page_of


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def page(world: World) -> Page:
    return page_of(world)


def test_a_wait_is_told_to_its_last_second(world: World, page: Page) -> None:
    """One request was under way, then another prompt was computed, and the rest went to answers."""
    world.tell(Pressure(1, 1, 1, 1, 1, 10.0))
    world.tell(RequestStarted("first", pack(1, 2), 40, 0, SIZE, "first"))
    world.now += 5
    world.tell(RequestFinished("first", pack(1, 2), 40, 41, "stop", "first"))
    world.tell(RequestStarted("second", pack(3, 4), 40, 0, SIZE, "second"))
    world.now += 10
    world.tell(RequestFinished("second", pack(3, 4), 40, 41, "stop", "second"))
    world.tell(RequestStarted("late", pack(9), 20, 0, SIZE, "s", waited_s=16.0))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert request.wait is not None
    assert request.wait.sentence == (
        "When it came, first's request was under way, for another 3.0 s. While it waited, the "
        "engine began one other prompt, second's, and computed 40 tokens of it. That takes about "
        "4.0 s; 9.0 s more went to answers."
    )
    world.now += 4
    world.tell(RequestFinished("late", pack(9), 20, 21, "stop", "s"))
    (ended,) = requests_of(page, RequestQuery(1)).requests
    assert ended.prompt_s == 2.0
    assert [(each.of, each.saves_s) for each in ended.remedies] == [("wait", 16.0)]


def test_of_many_requests_that_were_under_way_the_first_end_is_told(
    world: World, page: Page
) -> None:
    for name in ("a", "b", "c"):
        world.tell(RequestStarted(name, pack(ord(name)), 20, 0, SIZE, name))
    world.now += 5
    world.tell(RequestFinished("b", pack(ord("b")), 20, 21, "stop", "b"))
    world.now += 5
    world.tell(RequestStarted("late", pack(9), 20, 0, SIZE, "s", waited_s=8.0))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert request.wait is not None
    assert request.wait.sentence.startswith(
        "When it came, 3 requests were under way; the first of them ended after "
    )


def test_what_left_while_the_request_waited_for_its_turn_says_so(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.now += 10
    world.evict(3, 2)
    world.now += 4
    world.tell(RequestStarted("late", pack(1, 2, 3), 53, SIZE, SIZE, "s", waited_s=6.0))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert request.miss is not None
    assert "left the pool while the request waited for its turn: 1.0 s after it came, 5.0 s" in (
        request.miss.sentence
    )
    said = {each.of: each.text for each in request.remedies}
    assert said["prompt"].startswith("Its turn sooner: the block was there when it came. Or a pool")
    world.tell(RequestFinished("late", pack(1), 53, 54, "abort", "s"))
    world.tell(RequestStarted("later", pack(1, 2, 3), 53, SIZE, SIZE, "s", waited_s=1.0))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert request.miss is not None
    assert "s before the request came" in request.miss.sentence


def test_what_saves_most_is_told_first_and_what_saves_nothing_only_alone(
    world: World, page: Page
) -> None:
    world.tell(Pressure(1, 1, 1, 1, 1, 10.0))
    world.serve(1, 2, 3)
    world.evict(3, 2)
    world.now += 10
    late = RequestStarted("late", pack(1, 2, 3), 53, SIZE, SIZE, "s", waited_s=1.0)
    world.tell(late)
    world.now += 9
    world.tell(RequestFinished("late", pack(1, 2, 3), 53, 54, "stop", "s"))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert [each.of for each in request.remedies] == ["answer", "prompt", "wait"]
    assert request.remedies[1].saves_s == pytest.approx(3.2)
    world.tell(RequestStarted("new", pack(7), 21, 0, SIZE, "n", waited_s=9.0))
    world.now += 2
    world.tell(RequestFinished("new", pack(7), 21, 22, "stop", "n"))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert [each.of for each in request.remedies] == ["wait"], "no cache helps with a new prompt"
    world.tell(RequestStarted("calm", pack(8), 21, 0, SIZE, "c"))
    (request,) = requests_of(page, RequestQuery(1)).requests
    assert [(each.of, each.saves_s) for each in request.remedies] == [("prompt", 0.0)]


def test_a_miss_says_what_the_score_of_its_block_was_made_of() -> None:
    gone = Departure(15.0, 0.0, "it was expected to be asked for again in about 3 min")
    said = miss_sentence(Reason.EVICTED, DepartureRule.POLICY, (2, 9), gone, None, None)
    assert said == (
        "Block 3 of 9 left the pool 15 s before. Why: the policy ranked it among the first to go, "
        "as it was expected to be asked for again in about 3 min."
    )
    assert "expected" not in miss_sentence(
        Reason.EVICTED, DepartureRule.LRU, (2, 9), gone, None, None
    )
