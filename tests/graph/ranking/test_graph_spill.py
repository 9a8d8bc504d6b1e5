"""Copies: which blocks are worth one, which go first, and what is known of them."""

from __future__ import annotations

from typing import Any

import pytest
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import LruPolicy
from kvgraph.graph.tables.tables import GraphLimits
from kvgraph.graph.types import SessionState, SourceLayer
from kvgraph.graph.wire.events import (
    BlocksCleared,
    Pressure,
    Segment,
    TierReport,
)
from turns import SIZE, Told, dropped, removed, resident, spilled, stored, turn_events

WARM, COLD = 2, 4
REPORT = TierReport(4096, *[0] * 13, 0.0, *[0] * 5, 0.0, 0.0, 0.0)


class Cache(Told):
    """One engine with tiers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(REPORT, **options)

    def copied(self, *keys: int, tier: int = WARM) -> None:
        self.tell(spilled(*keys, tier=tier))

    def evicted(self, *keys: int) -> None:
        self.tell(removed(*keys))

    @property
    def spilling(self) -> list[int]:
        return self.graph.rank("e", 1000).spill_first.tolist()

    @property
    def demoting(self) -> list[int]:
        return self.graph.rank("e", 100).demote_first.tolist()


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_an_engine_that_has_no_tiers_is_told_of_no_spill() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [stored(1, 2, 3)])
    assert len(graph.rank("e", 10).spill_first) == 3, "it may have tiers, and not have said so yet"
    graph.apply("e", [Pressure(10, 0, 3, 0, 0)])
    assert len(graph.rank("e", 10).order) == 3
    assert not len(graph.rank("e", 10).spill_first)
    graph.apply("e", [REPORT])
    assert len(graph.rank("e", 10).spill_first) == 3


def test_spills_come_in_the_order_of_loss_the_protected_last(cache: Cache) -> None:
    rules = Segment(int(SourceLayer.RULES), 0, SIZE)
    cache.tell(*turn_events("s", 1, 2, 3, segments=(rules,))[:-1])
    assert cache.spilling == [3, 2, 1]
    cache.copied(1, 3)
    assert cache.spilling == [3, 2, 1], "they may be dropped before the next ranking comes"


def test_a_waiting_session_gets_copies_of_what_it_wrote_too(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3, prompt=2, waiting_for_tool=True)
    assert cache.graph.explain(3)["layer"] == "generation"
    assert cache.spilling == [3, 2, 1]


def test_nothing_is_copied_for_a_session_that_is_over(cache: Cache) -> None:
    cache.turn("chat", 1, 2, session_ended=True)
    assert cache.spilling == []
    cache.turn("other", 1, 5, waiting_for_tool=True)
    assert cache.spilling == [5, 1], "what another session shares is copied"


def test_nothing_is_copied_of_an_abandoned_branch(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3)
    cache.turn("agent", 1, 4, found=1, waiting_for_tool=True)
    assert cache.spilling == [4, 1]


def test_under_lru_every_block_is_copied_and_copies_go_in_the_memorys_own_order() -> None:
    """Whatever is known of it, or said: nothing shows there that it is of use."""
    cache = Cache(policy=LruPolicy())
    cache.turn("agent", 1, 2)
    cache.now += 1
    cache.turn("over", 5, 6, session_ended=True)
    assert cache.spilling == [2, 1, 6, 5]
    assert cache.graph.rank("e", 2).spill_first.tolist() == [2, 1], "these go next"
    cache.copied(1, 2, 5, 6)
    cache.evicted(1, 2)
    assert cache.demoting == []
    assert cache.spilling == [6, 5]


def test_a_block_of_which_nothing_is_known_is_copied(cache: Cache) -> None:
    cache.tell(resident(7))
    assert cache.spilling == [7]


def test_who_asks_for_no_copies_gets_the_same_order(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3)
    cache.turn("other", 1, 5, waiting_for_tool=True)
    whole, bare = cache.graph.rank("e", 100), cache.graph.rank("e", 100, for_copies=False)
    assert bare.order.tolist() == whole.order.tolist()
    assert whole.spill_first.size
    assert not bare.spill_first.size


def test_where_ends_are_said_the_others_are_expected_back(cache: Cache) -> None:
    """Nine of ten sessions have one turn, and say so: of those that do not, all return."""
    for number in range(100):
        returns = number % 10 == 0
        cache.turn(f"s{number}", 10 * number, session_ended=not returns)
        if returns:
            cache.turn(f"s{number}", 10 * number, 10 * number + 1, found=1, session_ended=True)
    cache.turn("silent", 7, 8)
    cache.now += 300
    assert cache.spilling == [8, 7]


def test_an_end_that_was_wrong_counts_as_none(cache: Cache) -> None:
    """Callers that say after each turn that it was the last teach nothing."""
    sessions = cache.graph.tables.sessions
    for number in range(50):
        for turn in range(3):
            keys = range(10 * number, 10 * number + turn + 1)
            cache.turn(f"s{number}", *keys, found=turn, session_ended=True)
    row = sessions.find("s0", -1)
    assert sessions.state[row] == SessionState.ENDED
    sessions.end(row)  # said once more
    told = sessions.learned()
    assert told["reached"][:4].tolist() == [50, 50, 50, 0]
    assert told["ended"][:4].tolist() == [0, 0, 50, 0]


def test_what_was_never_hit_is_copied_only_if_its_session_probably_returns(cache: Cache) -> None:
    cache.turn(None, 1, 2)
    assert cache.spilling == [2, 1], "one of four first turns is followed by another"
    cache.now += 300
    assert cache.spilling == [], "and then it came sooner"
    cache.turn(None, 1, 2, 3, found=2)
    cache.now += 1200
    assert cache.spilling == [2, 1], "what was hit once is copied"
    for number in range(60):
        cache.turn(f"once {number}", 10, session_ended=True)
    cache.turn(None, 20)
    assert 20 not in cache.spilling, "here, first turns are followed by no other"
    for number in range(60):
        cache.turn(f"lively {number}", 10)
        cache.turn(f"lively {number}", 10, session_ended=True)
    cache.turn(None, 21)
    assert 21 in cache.spilling, "here, first turns are followed by another"


@pytest.mark.parametrize(
    ("said", "soon_s", "late_s"),
    [({}, 0, 600), ({"waiting_for_tool": True, "expected_return_s": 60.0}, 100, 1300)],
    ids=["who names a session means to come back for a while", "an agent that waits for ages"],
)
def test_who_does_not_come_back_is_given_up(
    cache: Cache, said: dict[str, Any], soon_s: float, late_s: float
) -> None:
    cache.turn("chat", 1, 2, **said)
    cache.now += soon_s
    assert cache.spilling == [2, 1]
    cache.now += late_s - soon_s
    assert cache.spilling == []


def test_evictions_are_counted_by_what_was_left_of_them(cache: Cache) -> None:
    cache.turn("agent", 1, 2, waiting_for_tool=True)
    cache.turn("chat", 5, 6, 7, session_ended=True)
    cache.copied(1, tier=COLD)
    cache.evicted(1, 2, 5, 6, 7)
    assert cache.graph.counters["evicted_with_copy"] == 1
    assert cache.graph.counters["evicted_without_copy"] == 1
    assert cache.graph.counters["evicted_not_worth_copy"] == 3
    cache.tell(stored(50), removed(50), engine="no tiers")
    assert cache.graph.counters["evicted_without_copy"] == 1


def test_a_block_that_was_lost_tells_why_it_has_no_copy(cache: Cache) -> None:
    cache.turn("agent", 1, waiting_for_tool=True)
    cache.turn("chat", 5, session_ended=True)
    assert cache.graph.explain(1)["copies"] == "none yet"
    assert cache.graph.explain(5)["copies"] == "none: not worth one (session over)"
    cache.evicted(1, 5)
    assert cache.graph.explain(1)["copies"] == "none: worth one, and lost before it was made"
    cache.now += 3000
    expected = "none: not worth one (not likely to return)"
    assert cache.graph.explain(1)["copies"] == expected


def test_under_lru_no_block_is_called_not_worth_a_copy() -> None:
    cache = Cache(policy=LruPolicy())
    cache.turn("chat", 5, session_ended=True)
    assert cache.graph.explain(5)["copies"] == "none yet"
    cache.evicted(5)
    assert cache.graph.explain(5)["copies"] == "none: worth one, and lost before it was made"
    assert cache.graph.counters["evicted_not_worth_copy"] == 0
    assert cache.graph.counters["evicted_without_copy"] == 1


def test_where_no_engine_has_tiers_no_copy_is_called_lost() -> None:
    graph = KVCacheGraph()
    graph.apply("e", [stored(1), removed(1)])
    assert graph.explain(1)["copies"] == "none: no engine here keeps copies"


def test_a_session_tells_what_it_holds_in_which_tier(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3)
    cache.copied(2, 3)
    cache.copied(3, tier=COLD)
    cache.evicted(3)
    held = cache.graph.explain_session("agent")
    assert (held["blocks_hot"], held["blocks_warm"], held["blocks_cold"]) == (2, 2, 1)


def test_idle_copies_are_demoted_tail_first_lost_sessions_before_others(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3, waiting_for_tool=True)
    cache.turn("chat", 11, 12, session_ended=True)
    cache.copied(1, 2, 3, 11, 12)
    assert cache.demoting == [], "the pool still holds them all"
    cache.evicted(2, 3, 11, 12)
    assert cache.demoting == [12, 11, 3, 2]
    cache.tell(dropped(12), spilled(3, tier=COLD))
    assert cache.demoting == [11, 3, 2]
    assert cache.graph.rank("e", 2).demote_first.tolist() == [11, 3]


def test_copies_that_nobody_holds_are_not_demoted_elsewhere(cache: Cache) -> None:
    cache.turn("agent", 1)
    cache.copied(1, tier=COLD)
    cache.evicted(1)
    assert cache.demoting == []
    stranger = cache.graph.rank("stranger", 10)
    assert stranger.demote_first.size == stranger.order.size == 0


def test_who_is_due_is_kept_once_there_are_copies_to_make_room(cache: Cache) -> None:
    cache.turn("soon", 1, 2, waiting_for_tool=True, expected_return_s=10.0)
    cache.now += 8
    cache.turn("late", 11, 12, waiting_for_tool=True, expected_return_s=60.0)
    assert cache.order() == [2, 1, 12, 11], "the longer unused go first"
    cache.copied(12)
    assert cache.order() == [12, 11, 2, 1]
    assert cache.graph.explain(1)["standing"] == ["due"]
    cache.now += 13
    assert cache.order() == [2, 1, 12, 11], "no longer: it is overdue"


def test_a_copy_keeps_its_block_known_when_ghosts_are_forgotten() -> None:
    cache = Cache(limits=GraphLimits(max_ghosts=100))
    cache.turn("agent", 1, 2)
    cache.copied(1)
    cache.evicted(1, 2)
    for batch in range(1, 40):
        cache.now += 1
        keys = range(1000 * batch, 1000 * batch + 20)
        cache.tell(stored(*keys), removed(*keys))
    assert cache.graph.explain(1)["tiers"] == {"e": ["warm"]}
    with pytest.raises(Exception, match="long forgotten"):
        cache.graph.explain(2)


def test_after_a_resync_only_what_is_announced_again_counts(cache: Cache) -> None:
    cache.turn("agent", 1, 2, 3)
    cache.copied(1, 2)
    cache.copied(3, tier=COLD)
    cache.tell(resident(1))
    assert cache.graph.explain(3)["tiers"] == {}
    assert cache.graph.stats().edges["spill_link"] == 0
    cache.copied(2, 99)
    assert cache.graph.explain(2)["tiers"] == {"e": ["warm"]}
    assert cache.graph.explain(99)["tiers"] == {"e": ["warm"]}, "known by its copy alone"


def test_a_reset_of_the_pool_leaves_the_copies_until_the_engine_drops_them(cache: Cache) -> None:
    cache.turn("agent", 1)
    cache.tell(spilled(1), BlocksCleared())
    assert cache.graph.explain(1)["tiers"] == {"e": ["warm"]}
    cache.tell(dropped(1))
    assert cache.graph.explain(1)["tiers"] == {}


def test_a_copy_of_two_engines_is_linked_until_neither_has_it(cache: Cache) -> None:
    cache.turn("agent", 1)
    for engine in ("e", "other"):
        cache.tell(spilled(1), engine=engine)
    for engine, links in (("other", 1), ("e", 0)):
        cache.graph.forget_engine(engine)
        cache.graph.check_integrity()
        assert cache.graph.stats().edges["spill_link"] == links
