"""People's questions and the sidecar's own work: who waits for whom."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from kvgraph.advisor.page.questions import FRESH_S, STALE_S, WAITING, Questions, RecentAnswers
from kvgraph.dashboards.source import BusyError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import BlocksStored


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_after_a_question_the_graph_is_left_alone() -> None:
    clock = Clock()
    questions = Questions(threading.RLock(), clock, clock.sleep, clock)
    with questions.turn():
        clock.now += 0.1
    with questions.turn():
        pass
    assert clock.slept == [pytest.approx(0.3)]


def test_who_asks_alone_is_not_refused_for_a_question_that_was_held_up() -> None:
    clock = Clock()
    questions = Questions(threading.RLock(), clock, clock.sleep, worked=lambda: 0.0)
    with questions.turn():
        clock.now += 5.0
    with questions.turn():
        pass
    assert (clock.slept, questions.refused) == ([], 0)


def test_who_would_wait_for_too_long_is_refused() -> None:
    clock = Clock()
    questions = Questions(threading.RLock(), clock, clock.sleep, clock)
    with questions.turn():
        clock.now += 5.0
    with pytest.raises(BusyError, match="took long; try again in 15 s"), questions.turn():
        pass
    clock.now += 15.0
    with questions.turn():
        pass
    assert questions.refused == 1


def test_a_question_that_fails_leaves_room_for_the_next() -> None:
    questions = Questions(threading.RLock(), time.monotonic)
    for _ in range(WAITING + 3):
        with pytest.raises(KeyError), questions.turn():
            raise KeyError
    assert questions.refused == 0


def test_only_a_few_wait_and_the_others_are_refused_at_once() -> None:
    questions = Questions(threading.RLock(), time.monotonic)
    inside, go, refused = threading.Event(), threading.Event(), []

    def ask() -> None:
        try:
            with questions.turn():
                inside.set()
                go.wait(5)
        except BusyError:
            refused.append(1)

    first = threading.Thread(target=ask)
    first.start()
    inside.wait(5)
    others = [threading.Thread(target=ask) for _ in range(20)]
    for thread in others:
        thread.start()
    deadline = time.monotonic() + 5
    while len(refused) < 20 - (WAITING - 1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(refused) >= 20 - (WAITING - 1)
    go.set()
    for thread in (first, *others):
        thread.join()


def test_askers_do_not_keep_the_lock_from_the_loop() -> None:
    lock, stopping = threading.RLock(), threading.Event()
    questions = Questions(lock, time.monotonic, worked=time.monotonic)

    def ask() -> None:
        while not stopping.is_set():
            try:
                with questions.turn():
                    time.sleep(0.02)
            except BusyError:
                time.sleep(0.005)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    turns, end = 0, time.monotonic() + 1.0
    while time.monotonic() < end:
        with lock:
            turns += 1
        time.sleep(0.001)
    stopping.set()
    for thread in threads:
        thread.join()
    assert turns > 100, "askers hold it a quarter of the time at most"


def test_a_rank_is_looked_up_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgraph.graph.ranking import order as places

    graph, none = KVCacheGraph(clock=lambda: 1.0), as_keys([])
    graph.apply("e", [BlocksStored(np.arange(1, 6, dtype="<u8").tobytes(), None, 16)])
    ranked = graph.rank("e", 3)
    known = {"e": EvictionRanking(1, 1.0, ranked.order, none, none, none)}
    last = {"e": {"ranked_by": "classic", "rank": 4, "of": 5}}
    anew, looked_up = graph.explain(1)["ranks"], graph.explain(1, known)["ranks"]
    assert looked_up == anew == last, "it is in no ranking: all are ranked anew"
    computed = graph.explain(5)["ranks"]
    monkeypatch.setattr(places, "resident_scores", None)
    assert graph.explain(5, known)["ranks"] == computed == {"e": {**last["e"], "rank": 0}}


def test_an_answer_is_worked_out_once_while_it_is_fresh() -> None:
    clock, worked_out = Clock(), []
    recent = RecentAnswers(clock)
    for _ in range(3):
        assert recent.of("now", lambda: worked_out.append(clock.now) or len(worked_out)) == 1
    clock.now += FRESH_S
    assert recent.of("now", lambda: 2) == 2
    assert recent.of("another", lambda: 3) == 3


def test_while_one_works_it_out_others_get_the_answer_before() -> None:
    clock = Clock()
    recent = RecentAnswers(clock)
    recent.of("now", lambda: "before")
    clock.now += FRESH_S
    seen = []

    def slow() -> str:
        seen.append(recent.of("now", lambda: "worked out twice"))
        clock.now += STALE_S  # it is too old for anybody by then
        seen.append(recent.of("now", lambda: "worked out by who cannot wait"))
        return "after"

    assert recent.of("now", slow) == "after"
    assert seen == ["before", "worked out by who cannot wait"]


def test_who_is_refused_gets_the_answer_before_while_that_is_young() -> None:
    clock = Clock()
    recent = RecentAnswers(clock)

    def refused() -> str:
        raise BusyError("many ask", 1)

    recent.of("now", lambda: "before")
    clock.now += FRESH_S
    assert recent.of("now", refused) == "before"
    clock.now += STALE_S
    with pytest.raises(BusyError):
        recent.of("now", refused)
