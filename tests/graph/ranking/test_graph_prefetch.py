"""Which copies come back before anyone asks: whose, when, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.wire.events import (
    BlocksAttended,
    BlocksLoaded,
    BlocksRemoved,
    BlocksSpilled,
    CopiesDropped,
    SessionSignal,
)
from turns import started, turn_events
from wire_keys import pack

WARM, COLD = 2, 4


class Cache:
    """A graph, one engine that it hears of, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.graph = KVCacheGraph(clock=lambda: self.now)

    def start(self, session: str, *keys: int, engine: str = "e") -> None:
        self.graph.apply(engine, turn_events(session, *keys)[:-1])

    def turn(self, session: str, *keys: int, **signals: Any) -> None:
        self.graph.apply("e", turn_events(session, *keys, **signals))

    def lose(self, *keys: int, engine: str = "e", tier: int = WARM) -> None:
        """The blocks are copied, and then evicted."""
        self.graph.apply(engine, [BlocksSpilled(pack(*keys), tier, 4096)])
        self.graph.apply(engine, [BlocksRemoved(pack(*keys))])

    def order(self, limit: int = 100, engine: str = "e") -> list[int]:
        return self.graph.prefetch_order(engine, limit).tolist()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.mark.parametrize("tier", [WARM, COLD])
def test_a_session_that_said_when_it_returns_is_brought_back_just_before(
    cache: Cache, tier: int
) -> None:
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True, expected_return_s=30.0)
    cache.lose(2, 3, tier=tier)
    cache.now += 26
    assert cache.order() == []
    cache.now += 1.5
    assert cache.order() == [2, 3], "head first"
    assert cache.order(limit=1) == [2]


def test_one_that_never_came_is_given_up(cache: Cache) -> None:
    cache.turn("agent", 1, waiting_for_tool=True, expected_return_s=5.0)
    cache.lose(1)
    cache.now += 9
    assert cache.order() == [1], "a while past its time it is still awaited"
    cache.now += 2
    assert cache.order() == []


def test_however_long_the_wait_was_to_be_the_slack_is_bounded(cache: Cache) -> None:
    cache.turn("agent", 1, waiting_for_tool=True, expected_return_s=600.0)
    cache.lose(1)
    cache.now += 629
    assert cache.order() == [1]
    cache.now += 2
    assert cache.order() == []


def test_a_return_that_nobody_stated_is_predicted_from_the_sessions_own_pauses(
    cache: Cache,
) -> None:
    for _ in range(3):
        cache.turn("agent", 1, 2, waiting_for_tool=True)
        cache.now += 20
    cache.turn("agent", 1, 2, waiting_for_tool=True)
    cache.lose(1, 2)
    cache.now += 16
    assert cache.order() == []
    cache.now += 2
    assert cache.order() == [1, 2]


def test_a_first_pause_is_predicted_from_those_of_the_others(cache: Cache) -> None:
    cache.turn("first", 1, waiting_for_tool=True)
    cache.lose(1)
    cache.now += 8
    assert cache.order() == [], "nobody has any idea yet"
    cache.turn("first", 1)
    cache.turn("other", 5, waiting_for_tool=True)
    cache.lose(5)
    cache.now += 4
    assert cache.order() == []
    cache.now += 2
    assert cache.order() == [5]


def test_who_is_due_first_comes_first_and_as_a_whole(cache: Cache) -> None:
    cache.turn("late", 1, 2, waiting_for_tool=True, expected_return_s=9.0)
    cache.turn("soon", 11, 12, waiting_for_tool=True, expected_return_s=8.0)
    cache.lose(1, 2, 11, 12)
    cache.now += 7
    assert cache.order() == [11, 12, 1, 2]


def test_what_stands_before_a_due_block_comes_with_it_whoever_walked_it_last(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True, expected_return_s=5.0)
    cache.turn("chat", 1, 2, 9, session_ended=True)
    cache.lose(1, 2, 3, 9)
    cache.now += 4
    assert cache.order() == [1, 2, 3]


def test_what_follows_a_hole_is_left_alone(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3, 4, waiting_for_tool=True, expected_return_s=5.0)
    cache.lose(2, 4)
    cache.graph.apply("e", [BlocksRemoved(pack(3))])
    cache.now += 4
    assert cache.order() == [2], "4 could never be matched without 3"
    cache.graph.apply("e", [BlocksRemoved(pack(1))])
    assert cache.order() == []


def test_what_follows_a_block_that_was_forgotten_is_left_alone(cache: Cache) -> None:
    """Whatever stood before a chain's rest, nothing matches without it."""
    cache.graph = KVCacheGraph(
        limits=GraphLimits(max_ghosts=4, ghost_share=0.0), clock=lambda: cache.now
    )
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True, expected_return_s=30.0)
    cache.lose(2, 3)
    cache.graph.apply("e", [BlocksRemoved(pack(1))])
    for first in range(100, 200, 10):
        others = range(first, first + 10)
        cache.turn(f"s{first}", *others)
        cache.graph.apply("e", [BlocksRemoved(pack(*others))])
    blocks = cache.graph.tables.blocks
    known = blocks.keys[: blocks.size].tolist()
    assert 1 not in known
    assert blocks.parent[known.index(2)] == -1
    cache.now += 28
    assert cache.order() == []


def test_only_this_engines_copies_and_only_what_it_does_not_hold(cache: Cache) -> None:
    cache.turn("agent", 1, 2, waiting_for_tool=True, expected_return_s=5.0)
    cache.start("elsewhere", 50, engine="other")
    cache.lose(1, 2)
    cache.now += 4
    assert cache.order(engine="other") == []
    assert cache.order(engine="stranger") == []
    cache.graph.apply("e", [BlocksLoaded(pack(1))])
    assert cache.order() == [2]
    cache.graph.apply("e", [CopiesDropped(pack(2), WARM)])
    assert cache.order() == []


def test_a_session_that_ended_or_left_a_branch_is_not_waited_for(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3)
    cache.turn("agent", 1, 4, waiting_for_tool=True, expected_return_s=2.0)
    cache.lose(1, 2, 3, 4)
    assert cache.order() == [1, 4]
    cache.graph.apply("e", [SessionSignal("agent", ended=True)])
    assert cache.order() == []


def test_a_session_that_runs_has_its_own_request_to_load_for(cache: Cache) -> None:
    cache.turn("agent", 1, 2, waiting_for_tool=True, expected_return_s=2.0)
    cache.lose(1, 2)
    assert cache.order() == [1, 2]
    cache.graph.apply("e", [started("agent", 1, 2, session="agent")])
    assert cache.order() == []


def test_what_usually_follows_the_blocks_in_use_comes_back_too(cache: Cache) -> None:
    for session in ("a", "b", "c"):
        cache.turn(session, 1, 2, 3, 4)
    cache.turn("d", 1, 9)
    cache.lose(3, 4, 9)
    cache.now += 60
    assert cache.order() == [], "nothing of it is in use"
    cache.start("new", 1, 2)
    assert cache.order() == [3, 4], "three of four went that way"


def test_what_is_attended_with_the_blocks_in_use_comes_back_too(cache: Cache) -> None:
    cache.turn("a", 1)
    cache.turn("a", 1, 2)
    cache.turn("b", 20, waiting_for_tool=True, expected_return_s=600.0)
    ones = np.ones(3, dtype="<f4").tobytes()
    cache.turn("manual", 30)
    cache.turn("reader", 30)
    for _ in range(4):
        cache.graph.apply("e", [BlocksAttended(pack(1, 20, 30), ones)])
    cache.lose(20, 30)
    cache.now += 60
    assert cache.order() == []
    cache.start("now", 1)
    assert cache.order() == [30], "20 is awaited later: its session said so"
