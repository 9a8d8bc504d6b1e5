"""Requests whose end is awaited, and walks that wait: how they end, and their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from kvgraph.graph.ingest.sessions import RequestSessions
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.logs import history as queues
from kvgraph.graph.logs import requests
from kvgraph.graph.logs.evictions import EvictionLog, RowMark
from kvgraph.graph.logs.history import ReplayedWalk, ReplayQueue
from kvgraph.graph.logs.reasons import Detail, Reason
from kvgraph.graph.logs.requests import LIMIT, UNHEARD, Origin, Running, RunningRequests
from kvgraph.graph.types import as_keys
from kvgraph.graph.wire.events import BlocksResident, EngineHello, RequestFinished, RequestStarted
from small_world import SIZE, World, pack
from turns import resident


def hello(engine: str) -> EngineHello:
    return EngineHello(f"host:{engine}", "model", SIZE, 100, "vllm")


def coming(world: World, engine: int = 0) -> int:
    """Blocks that running requests compute, by an engine's marks."""
    log = world.history.evictions[engine]
    return int(np.count_nonzero(log.marks & RowMark.COMPUTING))


def test_the_next_engine_in_a_column_does_not_judge_the_last_ones_requests(world: World) -> None:
    world.serve(1, 2, 3)
    world.start(1, 2, 3)  # by the books its pool has them: it read no cache
    assert world.last() == (Reason.UNKNOWN, Detail.IN_POOL, 0)
    world.graph.forget_engine("a")
    world.tell(hello("c"), engine="c")
    assert world.graph.tables.engines["c"] == 0
    assert 0 not in world.history.evictions
    world.serve(1, 2, 3, engine="c")
    world.evict(3, 2, 1, engine="c")
    assert world.history.totals[Reason.UNKNOWN] == 2
    assert world.history.totals[Reason.EVICTED] == 0
    assert int(world.history.requests.record(1)["reason"]) == Reason.UNKNOWN


def test_a_name_that_is_used_again_ends_the_request_before(world: World) -> None:
    for keys in (pack(1, 2), pack(3, 4)):
        world.tell(RequestStarted("same", keys, 2 * SIZE + 5, 0, SIZE, "s"))
    assert coming(world) == 2
    world.tell(RequestStarted("same", pack(5, 6), 2 * SIZE + 5, 0, SIZE, "s"), engine="b")
    assert (coming(world), coming(world, 1)) == (2, 2)
    for engine in "ab":
        world.graph.forget_engine(engine)
    assert (coming(world), world.history.running.nbytes) == (0, 0), "they are gone"


def test_the_oldest_request_is_awaited_no_longer_beyond_the_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_BLOCKS", 5)
    world.serve(1, 2, 3)
    world.start(1, 2, 3)
    world.start(4, 5, 6)
    assert coming(world) == 3
    assert world.history.running.of(0) == ["r3"]
    assert not world.history.open_cases
    assert world.history.totals[Reason.UNKNOWN] == 1


def test_the_oldest_request_is_surplus_beyond_the_number_that_is_awaited() -> None:
    running, nothing = RunningRequests(), np.empty(0, dtype=np.int32)
    for number in range(65_536):
        running.add(f"r{number}", Running(number, 0, nothing, "s"))
    assert running.surplus() is None
    running.add("one more", Running(65_536, 0, nothing, "s"))
    assert running.surplus() == (0, "r0")


def test_another_block_in_a_row_does_not_settle_the_case_of_the_one_before(world: World) -> None:
    world.serve(1, 2, 3)
    world.start(1, 2, 3)
    tables = world.graph.tables
    (row,) = tables.blocks.find(as_keys([1]), tables.salt(0))
    world.history.evicted(0, np.array([row], dtype=np.int32), world.now)
    tables.blocks.keys[row] ^= np.uint64(1)
    world.history.open_cases.step_reported(0, world.now)
    assert world.last() == (Reason.UNKNOWN, Detail.IN_POOL, 0)


def test_the_cases_of_one_engine_are_not_looked_at_for_another(world: World) -> None:
    for engine in "ab":
        world.serve(1, 2, 3, engine=engine)
    late = RequestStarted("late", pack(1, 2, 3), 53, SIZE, SIZE, "s")
    world.tell(late, engine="b")
    world.serve(4, 5)
    world.evict(5, 2)
    assert world.history.open_cases.awaits(1)
    assert not world.history.open_cases.awaits(0)
    world.evict(2, engine="b")
    assert int(world.history.requests.record(2)["reason"]) == Reason.UNKNOWN, "too late by then"
    assert not world.history.open_cases


def walk(blocks: int, at: float = 0.0) -> ReplayedWalk:
    rows = np.arange(blocks, dtype=np.int32)
    return ReplayedWalk(0, "s", rows, rows.astype(np.uint64), blocks, 0, SIZE * blocks, at)


def test_walks_that_nobody_takes_are_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MOST_BLOCKS", 25)
    queue = ReplayQueue()
    for _ in range(2):
        for number in range(5):
            queue.add(walk(10, float(number)))
        assert queue.nbytes == 2 * 10 * 12
        assert [heard.at for heard in queue.take()] == [3.0, 4.0]
        assert queue.nbytes == 0
    queue.add(walk(10))
    queue.add(walk(10))
    assert len(queue.take()) == 2, "what was taken takes no room"


def test_walks_that_nobody_takes_are_bounded_by_number() -> None:
    queue, empty = ReplayQueue(), walk(0)
    for _ in range(70_000):
        queue.add(empty)
    assert len(queue.take()) == 65_536


def test_what_waits_counts_as_memory_of_the_logs(world: World) -> None:
    world.history.listen()
    before = world.history.nbytes
    world.start(*range(1, 40))
    names = world.history.requests.nbytes
    assert world.history.nbytes >= before + 39 * (12 + 4)
    world.start(*range(1, 40))
    assert world.history.requests.nbytes > names


def test_names_that_left_the_log_weigh_nothing(world: World) -> None:
    log, world.number = world.history.requests, 10_000
    assert log.nbytes == 0
    world.start(1, 2, 3)
    assert log.nbytes > 10_000, "columns of many, and one name"
    for _ in range(LIMIT - 1):
        world.start(1, 2, 3)
    full = log.nbytes
    for _ in range(50):
        world.start(1, 2, 3)
    assert log.first == 50
    assert log.nbytes == full
    world.number = 1_000_000
    world.start(1, 2, 3)
    assert log.nbytes == full + 2


def test_memory_is_told_while_engines_come(world: World) -> None:
    """Whoever scrapes does so on another thread, and without the graph's lock."""
    logs = world.history.evictions

    class Coming(EvictionLog):
        @property
        def nbytes(self) -> int:
            logs[len(logs)] = EvictionLog(Origin(), "another")
            return 1

    logs[0] = Coming(Origin(), "a")
    assert world.history.nbytes > 0


def test_a_request_that_ran_through_a_gap_ends_when_that_is_heard_of(world: World) -> None:
    name = world.start(1, 2)
    world.tell(hello("a"), resident(1, 2))
    assert world.history.requests.names(0).finished == UNHEARD
    world.end(name, 1, 2)
    record = world.history.requests.record(0)
    assert world.history.requests.names(0).finished == "stop"
    assert float(record["ran"]) == 2.0


def test_how_long_a_request_ran_is_what_its_engine_says_not_when_it_was_heard(world: World) -> None:
    """Short requests' starts and ends come in one batch."""
    name = world.start(1, 2)
    world.tell(RequestFinished(name, pack(1, 2), 20, 24, "stop", ran_s=0.0625))
    assert float(world.history.requests.record(0)["ran"]) == 0.0625


def test_requests_whose_ends_were_lost_are_walked_no_more_and_forgotten_after_ten_minutes(
    world: World,
) -> None:
    running = world.history.running
    for number in range(5):
        world.start(number, number + 10)
    world.start(1, 11, engine="b")
    world.tell(hello("a"))
    assert coming(world) == 0
    assert list(running.computed(0)) == []
    assert len(list(running.computed(1))) == 1
    world.now += 300.0
    world.tell(hello("a"))  # more news was lost: they are awaited no longer for that
    late = world.start(20)
    assert running.of(0) == ["r1", "r2", "r3", "r4", "r5", late]
    world.now += 300.0
    world.tell(hello("a"))
    assert running.of(0) == [late]
    assert running.of(1) == ["r6"]
    world.now += 601.0
    world.tell(BlocksResident(b""))
    world.tell(BlocksResident(b""), engine="b")
    assert running.of(0) == []
    assert running.of(1) == ["r6"], "its engine lost nothing"
    world.graph.forget_engine("b")
    assert running.nbytes == 0


def test_the_oldest_of_all_is_surplus_doubted_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_BLOCKS", 3)
    running, rows = RunningRequests(), np.zeros(1, dtype=np.int32)
    for number, (engine, name) in enumerate([(1, "a"), (0, "b"), (1, "c"), (0, "d")]):
        running.add(name, Running(number, engine, rows, "s"))
        if name == "b":
            list(running.doubt(0, 1.0))
    for expected in ((1, "a"), (0, "b")):
        assert running.surplus() == expected
        running.pop(*expected)
        running.add(f"{expected[1]} again", Running(number := number + 1, 0, rows, "s"))
    assert running.surplus() == (1, "c")


def test_what_preceded_a_failure_is_not_counted_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = KVCacheGraph(clock=lambda: 1.0)
    for engine in ("broken", "whole"):
        graph.apply(engine, [EngineHello(engine, "m", 16, 100, "v")])
    start = RequestStarted("r", pack(1, 2), 40, 0, 16, "s")
    with monkeypatch.context() as patched:
        patched.setattr(RequestSessions, "began", None)
        with pytest.raises(TypeError):
            graph.apply("broken", [start])
    graph.apply("whole", [RequestStarted("q", pack(3, 4), 40, 32, 16, "t")])
    history = graph.tables.history
    assert history.hit_share("broken") == 0.0
    assert history.hit_share("whole") == 32 / 40
