"""Which copies come back before anyone asks: whose, when, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.wire.events import (
    BlocksAttended,
    SessionSignal,
)
from turns import Told, dropped, loaded, removed, spilled, started, turn_events
from wire_keys import pack

WARM, COLD = 2, 4
Due = tuple[float, list[int]]  # seconds after the turn, and what comes back then


class Cache(Told):
    """One engine, whose blocks are copied."""

    def start(self, session: str, *keys: int, engine: str = "e") -> None:
        self.tell(*turn_events(session, *keys)[:-1], engine=engine)

    def evict(self, *keys: int) -> None:
        self.tell(removed(*keys))

    def lose(self, *keys: int, tier: int = WARM) -> None:
        """The blocks are copied, and then evicted."""
        self.tell(spilled(*keys, tier=tier))
        self.evict(*keys)

    def returning(self, engine: str = "e", limit: int = 100) -> list[int]:
        return self.graph.prefetch_order(engine, limit).tolist()


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.mark.parametrize("tier", [WARM, COLD])
@pytest.mark.parametrize(
    ("stated_s", "first_s", "then_s"),
    [(30.0, (26.0, []), (27.5, [2, 3])), (5.0, (9.0, [2, 3]), (11.0, [])),
     (600.0, (629.0, [2, 3]), (631.0, []))],
    ids=["just before it returns", "given up a while past its time", "with a bounded slack"],
)  # fmt: skip
def test_a_session_that_said_when_it_returns_is_brought_back_around_then(
    cache: Cache, tier: int, stated_s: float, first_s: Due, then_s: Due
) -> None:
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True, expected_return_s=stated_s)
    cache.lose(2, 3, tier=tier)
    began = cache.now
    for after_s, expected in (first_s, then_s):
        cache.now = began + after_s
        assert cache.returning() == expected


def test_a_return_that_nobody_stated_is_predicted_from_its_sessions_pauses(cache: Cache) -> None:
    for _ in range(3):
        cache.turn("agent", 1, 2, waiting_for_tool=True)
        cache.now += 20
    cache.turn("agent", 1, 2, waiting_for_tool=True)
    cache.lose(1, 2)
    cache.now += 16
    assert cache.returning() == []
    cache.now += 2
    assert cache.returning() == [1, 2]


def test_a_first_pause_is_predicted_from_those_of_the_others(cache: Cache) -> None:
    cache.turn("first", 1, waiting_for_tool=True)
    cache.lose(1)
    cache.now += 8
    assert cache.returning() == [], "nobody has any idea yet"
    cache.turn("first", 1)
    cache.turn("other", 5, waiting_for_tool=True)
    cache.lose(5)
    cache.now += 4
    assert cache.returning() == []
    cache.now += 2
    assert cache.returning() == [5]


def test_who_is_due_first_comes_first_and_as_a_whole(cache: Cache) -> None:
    cache.turn("late", 1, 2, waiting_for_tool=True, expected_return_s=9.0)
    cache.turn("soon", 11, 12, waiting_for_tool=True, expected_return_s=8.0)
    cache.lose(1, 2, 11, 12)
    cache.now += 7
    assert cache.returning() == [11, 12, 1, 2]
    assert cache.returning(limit=1) == [11]


def test_what_stands_before_a_due_block_comes_with_it_whoever_walked_it_last(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True, expected_return_s=5.0)
    cache.turn("chat", 1, 2, 9, session_ended=True)
    cache.lose(1, 2, 3, 9)
    cache.now += 4
    assert cache.returning() == [1, 2, 3]


def test_what_follows_a_hole_is_left_alone(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3, 4, waiting_for_tool=True, expected_return_s=5.0)
    cache.lose(2, 4)
    cache.evict(3)
    cache.now += 4
    assert cache.returning() == [2], "4 could never be matched without 3"
    cache.evict(1)
    assert cache.returning() == []


def test_what_follows_a_block_that_was_forgotten_is_left_alone() -> None:
    """Whatever stood before a chain's rest, nothing matches without it."""
    cache = Cache(limits=GraphLimits(max_ghosts=4, ghost_share=0.0))
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True, expected_return_s=30.0)
    cache.lose(2, 3)
    cache.evict(1)
    for first in range(100, 200, 10):
        others = range(first, first + 10)
        cache.turn(f"s{first}", *others)
        cache.evict(*others)
    blocks = cache.graph.tables.blocks
    known = blocks.keys[: blocks.size].tolist()
    assert 1 not in known
    assert blocks.parent[known.index(2)] == -1
    cache.now += 28
    assert cache.returning() == []


def test_only_this_engines_copies_and_only_what_it_does_not_hold(cache: Cache) -> None:
    cache.turn("agent", 1, 2, waiting_for_tool=True, expected_return_s=5.0)
    cache.start("elsewhere", 50, engine="other")
    cache.lose(1, 2)
    cache.now += 4
    assert cache.returning("other") == []
    assert cache.returning("stranger") == []
    cache.tell(loaded(1))
    assert cache.returning() == [2]
    cache.tell(dropped(2))
    assert cache.returning() == []


def test_a_session_that_ended_or_left_a_branch_is_not_waited_for(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3)
    cache.turn("agent", 1, 4, waiting_for_tool=True, expected_return_s=2.0)
    cache.lose(1, 2, 3, 4)
    assert cache.returning() == [1, 4]
    cache.tell(SessionSignal("agent", ended=True))
    assert cache.returning() == []


def test_a_session_that_runs_has_its_own_request_to_load_for(cache: Cache) -> None:
    cache.turn("agent", 1, 2, waiting_for_tool=True, expected_return_s=2.0)
    cache.lose(1, 2)
    assert cache.returning() == [1, 2]
    cache.tell(started("agent", 1, 2, session="agent"))
    assert cache.returning() == []


def test_what_usually_follows_the_blocks_in_use_comes_back_too(cache: Cache) -> None:
    for session in ("a", "b", "c"):
        cache.turn(session, 1, 2, 3, 4)
    cache.turn("d", 1, 9)
    cache.lose(3, 4, 9)
    cache.now += 60
    assert cache.returning() == [], "nothing of it is in use"
    cache.start("new", 1, 2)
    assert cache.returning() == [3, 4], "three of four went that way"


def test_what_is_attended_with_the_blocks_in_use_comes_back_too(cache: Cache) -> None:
    cache.turn("a", 1)
    cache.turn("a", 1, 2)
    cache.turn("b", 20, waiting_for_tool=True, expected_return_s=600.0)
    ones = np.ones(3, dtype="<f4").tobytes()
    cache.turn("manual", 30)
    cache.turn("reader", 30)
    for _ in range(4):
        cache.tell(BlocksAttended(pack(1, 20, 30), ones))
    cache.lose(20, 30)
    cache.now += 60
    assert cache.returning() == []
    cache.start("now", 1)
    assert cache.returning() == [30], "20 is awaited later: its session said so"
