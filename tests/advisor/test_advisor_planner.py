"""The advisor's thread: one immutable opinion per engine, fresh or re-dated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hand_clock import Clock
from kvgraph.advisor.config.sections import PrefetchConfig
from kvgraph.advisor.page.intents import IntentWish, IntentWishes, replies_of
from kvgraph.advisor.planner import RERANK_AFTER_S, GraphEvictionAdvisor
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.ranking.formulas import ClassicPolicy
from kvgraph.graph.ranking.policy import Rules, Terms, View
from kvgraph.graph.tables.blocks import Selection
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import (
    BlocksRemoved,
    BlocksResident,
    BlocksSpilled,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestFinished,
    RequestStarted,
    Segment,
    SessionSignal,
    TierReport,
)
from msgspec.structs import replace
from small_world import page_over
from waiting import until
from wire_keys import pack

KEYS = pack(*range(1, 11))  # of a's blocks
ALL = list(range(1, 11))


class Planned:
    """A graph of two engines, and the advisor over it."""

    def __init__(self, max_ranked: int = 100, interval_s: float = 0.01, clock: Any = None) -> None:
        self.clock = clock or Clock(50.0)
        self.ranked = threading.Event()
        self.graph = KVCacheGraph(clock=self.clock)
        self.engines = ["a", "b"]
        self.heard = 0
        for engine, first in (("a", 1), ("b", 1000)):
            self.graph.apply(engine, [BlocksResident(b"")])
            self.store(engine, first)
        self.planner = GraphEvictionAdvisor(
            self.graph,
            lambda: dict.fromkeys(self.engines, self.heard),
            interval_s=interval_s,
            max_ranked=max_ranked,
            prefetch=PrefetchConfig(),
            clock=self.clock,
            wake=self.ranked.set,
        )

    def store(self, engine: str, first: int) -> None:
        self.graph.apply(engine, [BlocksStored(pack(*range(first, first + 10)), None, 16)])

    def report_tiers(self) -> None:
        """Engine a has host memory."""
        self.graph.apply("a", [TierReport(4096, 10, 100, *([0] * 20))])

    def pause(self, expected_return_s: float | None, tool: str | None = None) -> None:
        """An agent takes all of a's blocks and waits for a tool."""
        turn = RequestFinished(
            "r", KEYS, 160, 160, "stop", "agent",
            waiting_for_tool=True, expected_return_s=expected_return_s, tool=tool,
        )  # fmt: skip
        self.graph.apply("a", [RequestStarted("r", KEYS, 160, 0, 16, "agent"), turn])

    def park(self, expected_return_s: float) -> None:
        """An agent waits for a tool, and of its blocks there are only copies."""
        self.pause(expected_return_s)
        self.graph.apply("a", [BlocksSpilled(KEYS, 2, 4096), BlocksRemoved(KEYS)])

    def slow_down(self, monkeypatch: pytest.MonkeyPatch, stores: bool = False) -> None:
        """Each ranking takes a hundred seconds, in which a may store more blocks."""
        rank = self.graph.rank

        def slowly(engine: str, limit: int) -> EvictionRanking:
            self.clock.now += 100.0
            if stores:
                self.store("a", int(self.clock.now))
            return rank(engine, limit)

        monkeypatch.setattr(self.graph, "rank", slowly)

    @property
    def ordered(self) -> list[int]:
        """What a is to bring back."""
        return self.planner.orders.latest["a"].keys.tolist()

    def protect(self, authority: Authority = Authority.CALLER) -> None:
        """A request tags the first of a's blocks as rules."""
        rules = Segment(int(SourceLayer.RULES), 0, 16, authority=int(authority))
        self.graph.apply("a", [RequestStarted("r", KEYS, 160, 0, 16, None, None, (rules,))])
        self.planner.applied()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The advisor's thread runs."""
        self.planner.start()
        try:
            yield
        finally:
            self.planner.stop()

    def tick(self, after_s: float = 0.5) -> None:
        self.clock.now += after_s
        self.planner.tick()


def test_no_more_than_max_ranked_blocks_are_named() -> None:
    planned = Planned(max_ranked=4)
    planned.tick()
    assert len(planned.planner.latest["a"].order) == 4


def test_an_unchanged_graph_is_only_dated_again() -> None:
    planned = Planned()
    planned.tick()
    first = planned.planner.latest["a"]
    planned.tick()
    second = planned.planner.latest["a"]
    assert second.epoch == first.epoch
    assert second.ts == first.ts + 0.5
    assert second.order is first.order
    assert planned.planner.counters == {"ranked": 2, "redated": 2}
    planned.tick(after_s=RERANK_AFTER_S)
    assert planned.planner.counters["ranked"] == 4, "in the end it is ranked again"


@pytest.mark.parametrize(
    "change",
    [
        lambda planned: planned.store("a", 500),
        lambda planned: planned.graph.configure(Rules(protected_share=0.1)),
    ],
    ids=["graph", "rules"],
)
def test_what_changed_is_ranked_again_at_once(change: Callable[[Planned], None]) -> None:
    planned = Planned()
    planned.tick()
    before = planned.planner.latest["a"].epoch
    change(planned)
    planned.tick()
    assert planned.planner.latest["a"].epoch > before


def test_an_engine_with_many_blanks_needs_no_ranking() -> None:
    planned = Planned()
    roomy = Pressure(total_blocks=100, free_blocks=90, cached_blocks=10, running=0, waiting=0)
    planned.graph.apply("a", [EngineHello("a", "", 16, 100, "v"), roomy])
    planned.tick()
    ranking, other = planned.planner.latest["a"], planned.planner.latest["b"]
    assert not len(ranking.order)
    assert ranking.ts == planned.clock.now, "fresh: the engine keeps its own order"
    assert len(other.order) == 10, "nothing is known of its room"
    planned.graph.apply("a", [BlocksStored(pack(*range(5000, 5070)), None, 16)])
    planned.tick()
    assert len(planned.planner.latest["a"].order) == 80, "its word is older than what it stored"


def test_protected_blocks_are_named_however_much_room_there_is() -> None:
    planned = Planned()
    planned.graph.apply("a", [Pressure(100, 90, 10, 0, 0)])
    planned.protect()
    planned.tick()
    assert len(planned.planner.latest["a"].protected) == 1


def test_advice_says_how_many_batches_it_knows() -> None:
    planned = Planned()
    for planned.heard in (4, 6):
        planned.tick()
        assert planned.planner.latest["a"].heard == planned.heard, "also where nothing changed"
        assert planned.planner.admissions["a"].heard == planned.heard


def test_an_unchanged_graph_is_ranked_again_when_somebody_is_due() -> None:
    planned = Planned()
    planned.pause(expected_return_s=5.0)
    planned.tick()
    planned.tick()
    assert planned.planner.counters == {"ranked": 2, "redated": 2}
    planned.tick(after_s=2.0)
    assert planned.planner.counters == {"ranked": 4, "redated": 2}


def test_what_to_bring_back_changes_with_time_alone() -> None:
    planned = Planned()
    planned.park(expected_return_s=30.0)
    planned.tick()
    assert planned.ordered == []
    planned.tick(after_s=27.0)
    assert planned.ordered == ALL
    assert planned.planner.orders.latest["a"].ts == planned.clock.now
    assert planned.planner.orders.latest["b"].keys.tolist() == []
    planned.planner.orders.bounds = PrefetchConfig(max_blocks=3)
    planned.tick()
    assert planned.ordered == [1, 2, 3]
    planned.planner.orders.bounds = PrefetchConfig(enabled=False)
    planned.tick()
    assert planned.ordered == []


def test_readers_hold_an_immutable_snapshot() -> None:
    planned = Planned()
    planned.tick()
    held = planned.planner.latest
    with pytest.raises(TypeError):
        held["c"] = held["a"]  # type: ignore[index]
    planned.store("a", 500)
    planned.tick()
    assert 500 not in held["a"].order
    assert 500 in planned.planner.latest["a"].order


def test_a_failing_ranking_leaves_the_other_engine_its_advice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned = Planned()
    planned.tick()
    rank = planned.graph.rank

    def rank_but_not_a(engine: str, limit: int) -> EvictionRanking:
        if engine == "a":
            raise ZeroDivisionError("no luck")
        return rank(engine, limit)

    monkeypatch.setattr(planned.graph, "rank", rank_but_not_a)
    stale = planned.planner.latest["a"]
    planned.store("a", 500)
    for _ in range(3):
        planned.tick()
    assert planned.planner.latest["a"] is stale, "dated as of before: it grows too old to be used"
    assert planned.planner.latest["b"].ts == planned.clock.now
    assert planned.planner.counters["failed"] == 3
    assert len(caplog.records) == 1


def test_the_first_protected_block_is_not_kept_waiting() -> None:
    planned = Planned(interval_s=3600.0)
    with planned.running():
        planned.store("a", 500)
        planned.planner.applied()
        assert not planned.ranked.wait(0.2), "what nobody protects waits for the interval"
        planned.protect()
        assert planned.ranked.wait(30.0)
        assert planned.planner.latest["a"].protected.tolist() == [1]
        planned.ranked.clear()
        planned.protect()
        assert not planned.ranked.wait(0.2), "a ranking names what is protected: the next can wait"


def test_the_first_system_text_that_is_asked_for_again_is_not_kept_waiting() -> None:
    planned = Planned(interval_s=3600.0)
    planned.graph.apply("a", [EngineHello("a", "", 16, 1_000, "v")])
    with planned.running():
        planned.store("a", 500)
        planned.protect(Authority.INFERRED)
        planned.planner.applied()
        assert not planned.ranked.wait(0.2), "one request alone may never be followed by another"
        planned.protect(Authority.INFERRED)
        assert planned.ranked.wait(30.0)
        assert planned.planner.latest["a"].protected.tolist() == [1]


def test_the_interval_counts_from_the_end_of_a_round_and_not_of_the_rest_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Planned(interval_s=60.0)

    def slept(seconds: float) -> None:
        planned.clock.now += seconds

    monkeypatch.setattr("kvgraph.advisor.planner.time", SimpleNamespace(sleep=slept))
    planned.slow_down(monkeypatch, stores=True)  # so that the rest is as long as the interval
    planned.store("a", 500)
    with planned.running():
        planned.planner.applied(intended=True)
        for _ in range(3):
            assert planned.ranked.wait(30.0), "the rest took the interval"
            planned.ranked.clear()


def test_a_round_that_ranks_nothing_is_followed_by_no_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned, rests = Planned(), list[float]()
    monkeypatch.setattr(planned.planner, "_rest", lambda took_s: rests.append(took_s))
    with planned.running():
        for _ in range(4):
            assert planned.ranked.wait(30.0)
            planned.ranked.clear()
            planned.clock.now += 0.5
    assert planned.planner.counters["redated"]
    assert len(rests) == 1


def test_a_planner_that_tells_nothing_rests_long_and_not_where_it_is_urgent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.advisor.planner._LONGEST_REST_S", 3600.0)
    planned = Planned(max_ranked=0)  # no ranking names a block
    planned.slow_down(monkeypatch)
    planned.store("a", 500)
    with planned.running():
        assert planned.ranked.wait(30.0)
        planned.ranked.clear()
        planned.store("a", 700)
        planned.planner.applied()
        assert not planned.ranked.wait(0.2), "nobody evicts by it"
        planned.planner.applied(intended=True)
        assert planned.ranked.wait(30.0)


@pytest.mark.parametrize(
    "wish",
    [
        {"kind": "prefetch", "session": "agent"},
        {"kind": "signal", "session": "agent", "waiting_for_tool": True, "expected_return_s": 0.5},
    ],
)
def test_what_somebody_says_is_urgent_is_ordered_at_once(wish: dict[str, Any]) -> None:
    planned = Planned(interval_s=3600.0)
    planned.park(expected_return_s=900.0)
    planned.tick()
    assert not planned.ordered
    with planned.running():
        page = page_over(planned.graph, intended=lambda: planned.planner.applied(intended=True))
        replies_of(page, IntentWishes(intents=[IntentWish(kind="pin", session="nobody")]))
        assert not planned.ranked.wait(0.2), "nothing was done: the next round can wait"
        replies_of(page, IntentWishes(intents=[IntentWish.model_validate(wish)]))
        assert planned.ranked.wait(30.0)
        assert planned.ordered == ALL


@pytest.mark.parametrize("tiers", [True, False])
def test_a_return_before_the_next_round_is_ordered_at_once_and_ranks_nothing(tiers: bool) -> None:
    planned = Planned(interval_s=3600.0)
    planned.park(expected_return_s=7200.0)
    if tiers:
        planned.report_tiers()
    planned.tick()
    ranking = planned.planner.latest["a"]
    with planned.running():
        said = SessionSignal("agent", waiting_for_tool=True, expected_return_s=7200.0)
        planned.graph.apply("a", [said])
        planned.planner.applied()
        assert not planned.ranked.wait(0.2), "a later return waits for the next round"
        planned.graph.apply("a", [replace(said, expected_return_s=0.4)])
        planned.planner.applied()
        assert planned.ranked.wait(30.0 if tiers else 0.2) == tiers
        assert planned.ordered == (ALL if tiers else [])
        assert planned.planner.latest["a"] is ranking
        planned.ranked.clear()
        planned.planner.applied()
        assert not planned.ranked.wait(0.2), "it was told"


def test_a_return_that_a_tools_time_foretells_is_ordered_at_once() -> None:
    planned = Planned(interval_s=10.0)
    for _ in range(8):  # until it is known how long the tool takes
        planned.pause(expected_return_s=None, tool="ls")
        planned.clock.now += 2.0
    planned.graph.apply("a", [BlocksSpilled(KEYS, 2, 4096), BlocksRemoved(KEYS)])
    planned.report_tiers()
    planned.tick(after_s=3600.0)
    assert not planned.planner.orders.cannot_wait(10.0)
    planned.graph.apply("a", [SessionSignal("agent", waiting_for_tool=True, tool="ls")])
    assert planned.planner.orders.cannot_wait(10.0)
    assert not planned.planner.orders.cannot_wait(1.0)
    planned.planner.order()
    assert planned.ordered == ALL
    assert not planned.planner.orders.cannot_wait(10.0)


def test_orders_alone_are_bounded_and_never_put_off_the_next_ranking() -> None:
    planned = Planned(interval_s=0.5, clock=time.monotonic)
    planned.pause(expected_return_s=900.0)
    planned.report_tiers()
    said = SessionSignal("agent", waiting_for_tool=True, expected_return_s=0.1)
    began = time.monotonic()
    with planned.running():
        while time.monotonic() < began + 3.0:
            planned.graph.apply("b", [said])
            planned.planner.applied()
            time.sleep(0.005)
    told, took = planned.planner.counters, time.monotonic() - began  # more on a busy machine
    assert 5 <= told["ordered_alone"] <= took / 0.02 + 1
    rankings = told["ranked"] + told["redated"]
    assert 2 * 2 <= rankings <= 2 * (took / 0.5 + 1), "two engines, twice a second"


def test_every_engine_hears_of_its_room_as_of_now_until_it_leaves() -> None:
    planned = Planned()
    planned.tick()
    before = planned.planner.admissions
    planned.tick()
    after = planned.planner.admissions
    assert set(after) == {"a", "b"}
    assert after["a"].room_blocks is None
    assert after["a"].epoch > before["a"].epoch
    assert after["a"].ts == before["a"].ts + 0.5
    planned.engines = ["b"]
    planned.tick()
    assert set(planned.planner.admissions) == set(planned.planner.latest) == {"b"}


class Untold(ClassicPolicy):
    """A policy of somebody's own that fails to say what its scores consist of."""

    name = "untold"  # type: ignore[misc]

    def __init__(self, change: Callable[[Terms], Any]) -> None:
        super().__init__()
        self._change = change

    def terms(self, view: View, picked: Selection) -> Terms:
        changed: Terms = self._change(super().terms(view, picked))
        return changed


def one_block_only(terms: Terms) -> Terms:
    raise TypeError("terms of one block only")


@pytest.mark.parametrize(
    "change",
    [
        one_block_only,
        lambda terms: {name: each[:, None] for name, each in terms.items()},
        lambda terms: {name: each[:1] for name, each in terms.items()},
        lambda terms: {name: np.repeat(each, 2) for name, each in terms.items()},
        lambda terms: {"age": terms["age"], "wide": np.zeros((len(terms["age"]), 2))},
        lambda terms: {"age": 1.0},
        lambda terms: {"age": terms["age"].astype(str)},
        lambda terms: None,
    ],
)
def test_a_policy_that_cannot_explain_itself_still_advises(
    change: Callable[[Terms], Any], caplog: pytest.LogCaptureFixture
) -> None:
    planned = Planned()
    planned.graph.policy = Untold(change)
    planned.planner.tick()
    assert len(planned.planner.latest["a"].order) == 10
    assert planned.planner.counters["failed"] == 0
    first = planned.planner.latest["a"].epoch
    planned.store("a", 500)
    planned.planner.tick()
    assert planned.planner.latest["a"].epoch > first
    assert "the policy untold does not tell the terms of its scores" in caplog.text
    planned.graph.apply("a", [BlocksRemoved(pack(1, 2))])
    log = planned.graph.tables.history.evictions[planned.graph.tables.engines["a"]]
    assert (log.next, log.terms.of(0)) == (2, None)


def test_a_long_round_tells_of_an_engine_before_the_last_one_is_ranked() -> None:
    planned, told = Planned(), list[dict[str, float]]()
    ranked = planned.graph.rank

    def slow(engine: str, limit: int) -> EvictionRanking:
        told.append({name: each.ts for name, each in planned.planner.latest.items()})
        planned.clock.now += 0.3
        return ranked(engine, limit)

    planned.graph.rank = slow  # type: ignore[method-assign]
    planned.tick()
    assert told == [{}, {"a": 50.5}]
    assert planned.ranked.is_set(), "whoever publishes is woken meanwhile"


def test_nothing_new_is_said_half_as_often_and_news_as_soon_as_ever() -> None:
    planned = Planned(interval_s=0.5, clock=time.monotonic)
    done = planned.planner.counters

    def seconds_until(what: str) -> float:
        before, began = done[what], time.monotonic()
        until(lambda: done[what] > before)
        return time.monotonic() - began

    with planned.running():
        seconds_until("redated")
        assert seconds_until("redated") > 0.9
        planned.store("a", 500)
        planned.planner.applied("a")
        assert seconds_until("ranked") < 0.9
