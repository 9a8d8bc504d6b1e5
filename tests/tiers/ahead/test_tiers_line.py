"""Requests that wait in vLLM's queue find their copies in the pool when their turn comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hall import Clock, Hall, by_priority
from kvgraph.hooks.vllm.tiers.prefetcher import WaitingLine
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape
from paper import begin_load, park, text, words

pytestmark = pytest.mark.usefixtures("vllm_loaded")

BLOCKS = 6


def full_house(engine: Any, length: int = 60) -> list[Any]:
    """As many requests as may run."""
    runs = [engine.ask(text(1, 500 + number), length) for number in range(6)]
    until(engine, lambda: len(engine.scheduler.running) == 6)
    return runs


def until(engine: Any, done: Callable[[], object]) -> None:
    for _ in range(400):
        if done():
            return
        engine.step()
        engine.finish_copies()
    raise AssertionError("what was awaited did not come")


@pytest.fixture
def engine(paper: Callable[..., Any]) -> Any:
    """An engine with tiers that keeps copies of three prompts."""
    engine = paper(Shape(blocks=129, warm=512, ahead=True))
    for seed in (1, 2, 3):
        park(engine, text(BLOCKS, seed))
    return engine


def counts(engine: Any) -> Any:
    engine.side.index.catch_up()
    return engine.side.bridge.ledger.counts


def in_pool(engine: Any, prompt: list[int]) -> int:
    held = engine.pool.cached_block_hash_to_block
    hashes = engine.make("probe", prompt, 1).block_hashes
    return sum(held.get_one_block(each + bytes(4)) is not None for each in hashes)


def test_who_waits_finds_its_copies_in_the_pool_and_waits_for_no_load(engine: Any) -> None:
    full_house(engine)
    stalls = counts(engine).stalls
    returning = engine.ask(text(BLOCKS, 1))
    for _ in range(4):
        engine.step()
        engine.finish_copies()
    assert len(engine.scheduler.running) == 6, "it waits for a place still"
    assert in_pool(engine, text(BLOCKS, 1)) == BLOCKS
    until(engine, lambda: engine.outputs[returning.request_id])
    assert counts(engine).stalls == stalls
    assert counts(engine).prefetch_useful == BLOCKS
    engine.settle()
    assert engine.is_whole()


@pytest.mark.parametrize(("plain", "waits"), [(True, 10), (False, 0)])
def test_of_a_crowd_behind_a_full_house_nobody_waits_for_a_load(
    paper: Callable[..., Any], plain: bool, waits: int
) -> None:
    engine = paper(Shape(blocks=257, warm=1024, plain=plain, ahead=not plain))
    for seed in range(1, 11):
        park(engine, text(BLOCKS, seed))
    full_house(engine)
    stalls = counts(engine).stalls
    crowd = [engine.ask(text(BLOCKS, seed), 4) for seed in range(1, 11)]
    until(engine, lambda: all(len(engine.outputs[each.request_id]) == 4 for each in crowd))
    assert counts(engine).stalls - stalls == waits
    engine.settle()
    assert engine.is_whole()


def test_where_nobody_is_before_it_a_request_loads_for_itself(engine: Any) -> None:
    stalls = counts(engine).stalls
    begin_load(engine, text(BLOCKS, 1))
    engine.settle()
    assert counts(engine).stalls == stalls + 1
    assert counts(engine).prefetched == 0


def test_several_are_served_in_the_queues_order(engine: Any) -> None:
    full_house(engine)
    for seed in (3, 1, 2):
        engine.ask(text(BLOCKS, seed))
    engine.side.bridge.spiller.step = lambda *_: BLOCKS  # so much can go without a loss
    found = []
    for _ in range(3):
        engine.step()
        engine.finish_copies()
        found.append([in_pool(engine, text(BLOCKS, seed)) for seed in (3, 1, 2)])
        engine.step()
        engine.finish_copies()
    assert found[-1] == [BLOCKS] * 3
    assert all(first >= second >= third for first, second, third in found)


def test_the_queues_order_may_be_priority(paper_config: Any) -> None:
    engine = PaperEngine(by_priority(paper_config), Shape(blocks=129, warm=512, ahead=True))
    try:
        for seed in (1, 2):
            park(engine, text(BLOCKS, seed))
        full_house(engine)
        engine.side.bridge.spiller.step = lambda *_: BLOCKS
        engine.ask(text(BLOCKS, 1), priority=5)
        engine.ask(text(BLOCKS, 2), priority=1)
        engine.step()
        engine.finish_copies()
        engine.step()
        assert in_pool(engine, text(BLOCKS, 2)) == BLOCKS
        assert in_pool(engine, text(BLOCKS, 1)) == 0
    finally:
        engine.close()


def test_no_room_is_taken_from_who_stands_before(paper: Callable[..., Any]) -> None:
    engine = paper(Shape(blocks=41, warm=512, ahead=True))
    park(engine, text(BLOCKS, 1))
    full_house(engine, length=30)
    engine.ask(text(25, 70))  # needs all that is free
    engine.ask(text(BLOCKS, 1))
    for _ in range(4):
        engine.step()
        engine.finish_copies()
    assert counts(engine).prefetched == 0
    engine.settle()
    assert engine.is_whole()


def test_nothing_is_loaded_for_who_skips_the_prefix_cache(engine: Any) -> None:
    full_house(engine)
    request = engine.make("skips", text(BLOCKS, 1), 1)
    request.skip_reading_prefix_cache = True
    engine.outputs["skips"] = []
    engine.scheduler.add_request(request)
    for _ in range(4):
        engine.step()
        engine.finish_copies()
    assert counts(engine).prefetched == 0


def test_nothing_is_loaded_that_is_computed_faster(engine: Any) -> None:
    full_house(engine)
    engine.side.bridge.ledger.costs.worth_loading = lambda *_: False
    request = engine.ask(text(BLOCKS, 1))
    before = counts(engine).recomputed
    until(engine, lambda: engine.outputs[request.request_id])
    assert counts(engine).prefetched == 0
    assert counts(engine).recomputed == before + BLOCKS, "that was decided once"


def test_another_salt_finds_nothing(engine: Any) -> None:
    full_house(engine)
    engine.ask(text(BLOCKS, 1), cache_salt="theirs")
    for _ in range(4):
        engine.step()
        engine.finish_copies()
    assert counts(engine).prefetched == 0


def test_a_reset_while_copies_come_brings_nothing_old(engine: Any) -> None:
    full_house(engine)
    engine.ask(text(BLOCKS, 1))
    engine.step()
    assert engine.side.bridge.ledger.coming
    assert engine.reset(reset_running_requests=True)
    engine.settle()  # its workers compare what is read with what should stand there
    assert counts(engine).prefetched == 0
    assert engine.is_whole()


def test_who_leaves_while_its_copies_come_leaves_no_block_behind(engine: Any) -> None:
    full_house(engine)
    request = engine.ask(text(BLOCKS, 1))
    engine.step()
    engine.abort(request)
    engine.settle()
    assert not engine.side.bridge.line
    assert engine.is_whole()


def test_a_turn_that_comes_while_copies_come_waits_for_them(engine: Any) -> None:
    runs = full_house(engine)
    stalls, stall_s = counts(engine).stalls, counts(engine).stall_s
    request = engine.ask(text(BLOCKS, 1))
    engine.step()
    assert engine.side.bridge.ledger.coming
    engine.abort(runs[0])
    engine.step()
    assert request.num_computed_tokens == 0
    until(engine, lambda: engine.outputs[request.request_id])
    assert counts(engine).prefetch_useful == BLOCKS
    assert counts(engine).stalls == stalls + 1, "it did wait for a load"
    assert counts(engine).stall_s > stall_s


def test_who_is_held_gets_nothing_before_it_is_let_in(paper: Callable[..., Any]) -> None:
    hall = Hall(paper(Shape(blocks=129, warm=512, ahead=True), clock=Clock()))
    hall.say(None)
    park(hall.engine, text(BLOCKS, 1))
    for number in range(6):
        hall.busy(9000 + number)
    hall.say(0)
    hall.saturate()
    known = text(BLOCKS, 1)[: BLOCKS * BLOCK_SIZE]  # the rest is new: so is the session
    name = hall.engine.ask([*known, *words(18 * BLOCK_SIZE, 1)]).request_id
    assert hall.held == [name]
    for _ in range(5):
        hall.step(room=0)
        hall.engine.finish_copies()
    assert counts(hall.engine).prefetched == 0
    for _ in range(5):
        hall.step(room=None)
        hall.engine.finish_copies()
    assert hall.held == []
    assert counts(hall.engine).prefetched == BLOCKS


def test_a_line_keeps_order_and_sums_whoever_comes_and_goes() -> None:
    random_numbers = random.Random(7)
    for priority in (False, True):
        line, known = WaitingLine(priority, served=True), dict[str, Any]()
        for number in range(600):
            if known and random_numbers.random() < 0.45:
                name = random_numbers.choice(list(known))
                line.leave(name)
                del known[name]
            else:
                request = Waiter(f"r{number}", random_numbers.randrange(3), number)
                line.join(request, 1 + number % 5)  # type: ignore[arg-type]
                known[request.request_id] = (request, 1 + number % 5)
            line.passed()
            assert (len(line), line.needed) == (len(known), sum(n for _, n in known.values()))
            order = list(known.values())
            if priority:
                order.sort(key=lambda each: (each[0].priority, each[0].arrival_time))
            first = line.next()
            assert (first.request if first else None) is (order[0][0] if order else None)


class Waiter:
    def __init__(self, name: str, priority: int, arrival_time: float) -> None:
        self.request_id, self.priority, self.arrival_time = name, priority, arrival_time
