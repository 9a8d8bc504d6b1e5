"""Room that is reserved for sessions with several turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvgraph.graph.ranking.formulas import LruPolicy
from kvgraph.graph.ranking.policy import Rules
from kvgraph.graph.wire.events import RequestFinished, RequestStarted
from small_world import SIZE, World, pack


@pytest.fixture
def world() -> World:
    """Two sessions with two turns each, and then six with one."""
    world = World()
    world.graph.policy = LruPolicy()
    for session, first in (("old", 10), ("young", 20)):
        world.serve(first, first + 1, session=session)
        world.serve(first, first + 1, first + 2, found=2, session=session)
    for number in range(6):
        world.serve(100 + 2 * number, 101 + 2 * number, session=f"once {number}")
    return world


def order(world: World, reserved: float) -> list[int]:
    world.graph.configure(replace(Rules(), reserved=reserved))
    return world.graph.rank("a", 100).order.tolist()


def test_without_a_reservation_the_engine_keeps_its_own_order(world: World) -> None:
    assert order(world, 0.0) == []


def test_sessions_that_came_back_go_last(world: World) -> None:
    ranked = order(world, 6)
    assert ranked[-6:] == [12, 11, 10, 22, 21, 20]
    assert ranked[:4] == [101, 100, 103, 102]
    assert world.graph.explain(10)["standing"] == ["reserved"]


def test_the_room_is_bounded_and_the_last_heard_of_have_it_first(world: World) -> None:
    ranked = order(world, 5)
    assert ranked[:3] == [12, 11, 10]
    assert ranked[-3:] == [22, 21, 20]


def test_below_one_it_is_a_share_of_the_pool(world: World) -> None:
    assert order(world, 0.031)[-3:] == [22, 21, 20]  # of 100 blocks
    assert order(world, 0.029)[:3] == [12, 11, 10]


def test_the_room_is_of_each_engine(world: World) -> None:
    world.serve(10, 11, 12, 13, session="old", engine="b")
    ranked = order(world, 100)
    assert ranked[-3:] == [22, 21, 20]


def test_it_is_released_when_a_session_ends(world: World) -> None:
    name = world.start(20, 21, 22, found=3, session="young")
    end = RequestFinished(name, pack(20, 21, 22), 53, 53, "stop", "young", session_ended=True)
    world.tell(end)
    ranked = order(world, 100)
    assert ranked[:3] == [22, 21, 20]
    assert ranked[-3:] == [12, 11, 10]


def test_it_is_released_for_a_branch_that_was_left_behind(world: World) -> None:
    world.tell(RequestStarted("edited", pack(20, 31), 2 * SIZE, SIZE, SIZE, "young"))
    world.tell(RequestFinished("edited", pack(20, 31), 2 * SIZE, 2 * SIZE, "stop", "young"))
    ranked = order(world, 100)
    assert ranked[:2] == [22, 21]
    assert ranked[-1] == 20


def test_it_is_released_when_a_return_is_no_longer_likely(world: World) -> None:
    assert order(world, 100)[-3:] == [22, 21, 20]
    world.now += 3600
    assert order(world, 100)[:3] == [12, 11, 10]
