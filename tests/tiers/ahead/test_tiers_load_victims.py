"""What a load overwrites is copied before it does, without a copy ahead of time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
from hall import Clock, Hall, by_priority
from kvgraph.hooks.tiers.directory import CopyDirectory
from kvgraph.hooks.tiers.jobs import Load, Spill
from kvgraph.hooks.vllm.tiers.prefetcher import WaitingLine
from kvgraph.hooks.vllm.tiers.spiller import CopyLead
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, PaperEngine, Shape
from paper import begin_load, in_pool, park, text, words
from pool_engine import Engine, Turn, parked, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def new_engine() -> Engine:
    """Prompt 1 has copies alone; the pool holds the prompts 2, 3 and 4, without copies."""
    engine = Engine(blocks=13)
    parked(engine, seed=1)
    for seed in (2, 3, 4):
        engine.serve(prompt(4, seed, extra=0))
    keep_copies_of(engine, prompt(4, 1))
    return engine


def keep_copies_of(engine: Engine, tokens: Sequence[int]) -> None:
    """All others are given up."""
    kept = engine.hashes_of(tokens)
    others = [each for each in engine.directory.warm_hashes() if each not in kept]
    engine.bridge.ledger.give_up([engine.directory.warm(each) for each in others])
    engine.worker.submit(engine.bridge.outstanding())


def has_copies(engine: Engine, seed: int) -> list[bool]:
    return [each in engine.directory for each in engine.hashes_of(prompt(4, seed))]


def is_saved(job: Any) -> bool:
    return isinstance(job, Spill) and job.overwritten


def loads(engine: Engine, seed: int = 1) -> tuple[Turn, list[Any]]:
    """A turn that begins to load, and the jobs that were given out for it."""
    turn = engine.ask(prompt(4, seed))
    engine.step()
    assert turn.state == "loading"
    return turn, list(engine.worker.open)


def finish(engine: Engine, turn: Turn) -> None:
    engine.finish_loading(turn)
    engine.finish_whole(turn)


def test_what_a_load_takes_is_copied_first_and_comes_back() -> None:
    engine = new_engine()
    lost_before = engine.counts.spill_lost
    turn, (saved, load, *_) = loads(engine)
    assert is_saved(saved)
    assert isinstance(load, Load)
    assert sorted(saved.blocks) == sorted(load.blocks)
    engine.finish_loading(turn)
    engine.end(turn)
    assert all(has_copies(engine, 2)), "it stood at the head"
    assert engine.counts.spill_lost == lost_before + 1, "the last token is computed at once"
    again = engine.serve(prompt(4, 2))
    assert (again.computed, again.loaded) == (0, 4)
    engine.check_whole()


def test_nothing_is_saved_that_has_a_copy() -> None:
    engine = new_engine()
    engine.bridge.spiller.copy(engine.hashes_of(prompt(4, 2)), engine.side.group.suffix)
    engine.settle()
    turn, jobs = loads(engine)
    assert not any(map(is_saved, jobs))
    finish(engine, turn)


def test_nothing_is_saved_that_is_not_worth_a_copy() -> None:
    engine = new_engine()
    engine.advise(spill_first=engine.keys_of(prompt(4, 2))[:1])
    engine.step()
    engine.worker.finish_all()
    engine.settle()
    keep_copies_of(engine, prompt(4, 1))
    turn, (saved, load, *_) = loads(engine)
    assert is_saved(saved)
    assert len(saved.blocks) == 1 < len(load.blocks)
    finish(engine, turn)


def test_where_there_is_no_room_the_last_to_go_are_saved() -> None:
    engine = new_engine()
    engine.directory.warm_capacity = 6
    queued = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    turn, (saved, load, *_) = loads(engine)
    assert is_saved(saved)
    assert len(saved.blocks) == 2, "four of six copies are being read"
    taken = [each for each in queued if each in load.blocks]
    assert list(saved.blocks) == taken[-2:]
    finish(engine, turn)


def test_hits_at_the_queue_s_head_leave_others_to_be_taken() -> None:
    engine = Engine(blocks=13)
    parked(engine, blocks=8, seed=1)
    for seed in (1, 2, 3):  # what is left of prompt 1 stands at the head
        engine.serve(prompt(4, seed, extra=0))
    keep_copies_of(engine, prompt(8, 1))
    turn = engine.ask(prompt(8, 1))
    engine.step()
    assert (turn.state, turn.hits) == ("loading", 4)
    saved, load = engine.worker.open[:2]
    assert is_saved(saved)
    assert sorted(saved.blocks) == sorted(load.blocks)
    engine.worker.finish_all()
    engine.step()
    assert all(has_copies(engine, 2))
    finish(engine, turn)


def test_a_copy_that_failed_is_not_found() -> None:
    engine = new_engine()
    turn, (saved, *_) = loads(engine)
    engine.worker.finish(saved, failed=[0])
    engine.finish_loading(turn)
    assert engine.counts.spill_failed == 1
    assert has_copies(engine, 2).count(True) == 3
    engine.finish_whole(turn)


def test_what_is_not_copied_when_the_load_is_given_up_is_never_found() -> None:
    engine = new_engine()
    turn, (saved, load, *_) = loads(engine)
    worker = engine.worker
    worker.open.remove(saved)  # its lane hangs
    worker.finish(load, failed=range(4))  # a disk's deadline passed
    engine.step()
    engine.finish_loading(turn)  # what it computes is written there
    worker.open.append(saved)
    worker.finish(saved)
    engine.step()
    assert not any(has_copies(engine, 2))
    engine.finish_whole(turn)


def test_what_is_saved_while_the_weights_change_is_never_found() -> None:
    engine = new_engine()
    turn, _ = loads(engine)
    engine.bridge.clear()
    engine.worker.finish_all()
    engine.step()
    assert not any(has_copies(engine, 2))
    engine.end(turn)


def test_a_prefetch_saves_what_it_overwrites() -> None:
    engine = new_engine()  # the copies were given up after the queue's head was looked at
    engine.advise(wanted=engine.keys_of(prompt(4, 1)), spill_first=engine.keys_of(prompt(4, 2)))
    lost_before = engine.counts.spill_lost
    engine.step()
    saved = next(job for job in engine.worker.open if is_saved(job))
    (load,) = (job for job in engine.worker.open if isinstance(job, Load))
    assert sorted(saved.blocks) == sorted(load.blocks)
    engine.settle()
    assert engine.counts.prefetched == len(load.blocks)
    assert engine.counts.spill_lost == lost_before
    engine.check_whole()


def test_a_prefetch_whose_victims_cannot_be_saved_gives_its_blocks_back() -> None:
    engine = new_engine()

    def fail(*_: Any) -> Any:
        raise RuntimeError("an injected fault")

    engine.bridge.loader.load_victims.save = fail
    engine.advise(wanted=engine.keys_of(prompt(4, 1)), spill_first=engine.keys_of(prompt(4, 2)))
    steps = (engine.step() for _ in range(8))
    with pytest.raises(RuntimeError, match="injected"):
        deque(steps, maxlen=0)
    engine.worker.submit(engine.bridge.outstanding())
    engine.worker.finish_all()
    engine.update()
    engine.check_whole()


def test_what_advice_lays_right_before_a_load_is_what_is_saved() -> None:
    engine = new_engine()
    first, last = (engine.keys_of(prompt(4, seed)) for seed in (3, 2))
    engine.advise(order=first, spill_first=[*first, *last])
    turn, (saved, load, *_) = loads(engine)
    assert is_saved(saved)
    assert sorted(saved.blocks) == sorted(load.blocks)
    engine.finish_loading(turn)
    engine.end(turn)
    assert all(has_copies(engine, 3)), "advice has it go first"
    engine.settle()
    engine.check_whole()


POOL = 1000
STEP = 10


def full(memory: int) -> CopyDirectory:
    directory = CopyDirectory(memory)
    for number in range(memory):
        directory.begin(number.to_bytes(32, "big"))
    return directory


def lead(load: int = 0, late: int = 0, steps: int = 100) -> CopyLead:
    """One that saw such steps, spills that ended so many steps later, and then a load."""
    found = CopyLead(0.0)
    for number in range(steps):
        found.stepped(STEP, 0, 0.01 * number)
        found.ended(found.steps - late)
    found.stepped(STEP, load, 0.01 * steps)
    return found


def test_a_small_memory_keeps_what_the_pool_lost_whatever_a_load_took() -> None:
    for load in (0, 400):
        assert lead(load).blocks(0, full(100), POOL) == 8 + STEP
    assert lead(400).blocks(64, full(100), POOL) == 8 + STEP, "nor for a prefetch"


def test_a_large_memory_covers_larger_steps_and_prefetches_but_no_loads() -> None:
    for load in (0, 400):  # what a load takes is copied before it writes there
        assert lead(load).blocks(0, full(4000), POOL) == 8 + 3 * STEP
        assert lead(load).blocks(64, full(4000), POOL) == 8 + 3 * STEP + 64
    assert lead().blocks(4000, full(2000), POOL) == 8 + int(0.375 * 2000), "a part of it"


def test_free_memory_is_used_whatever_its_size() -> None:
    assert lead().blocks(400, CopyDirectory(100), POOL) == 100


@pytest.mark.parametrize(("late", "steps"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_copies_that_take_longer_are_begun_earlier(late: int, steps: int) -> None:
    assert lead(late=late).blocks(0, full(100), POOL) == pytest.approx(8 + steps * STEP, abs=1)


def test_the_largest_step_is_forgotten_by_work_and_not_by_rest() -> None:
    found = lead()
    found.stepped(0, 0, 1000.0)
    assert found.step > 0.9 * STEP, "an engine that rests begins where it left off"
    for number in range(1000):
        found.stepped(1, 0, 1000.0 + 0.02 * number)
    assert found.step < 2


def test_without_memory_nothing_is_copied() -> None:
    assert lead().blocks(64, CopyDirectory(0), POOL) == 0


BLOCKS = 6


def full_house(engine: Any, length: int = 60) -> list[Any]:
    """As many requests as may run."""
    runs = [engine.ask(text(1, 500 + number), length) for number in range(6)]
    until(engine, lambda: len(engine.scheduler.running) == 6)
    return runs


def steps(engine: Any, count: int) -> None:
    for _ in range(count):
        engine.step()
        engine.finish_copies()


def until(engine: Any, done: Callable[[], object]) -> None:
    for _ in range(400):
        if done():
            return
        steps(engine, 1)
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


def test_who_waits_finds_its_copies_in_the_pool_and_waits_for_no_load(engine: Any) -> None:
    full_house(engine)
    stalls = counts(engine).stalls
    returning = engine.ask(text(BLOCKS, 1))
    steps(engine, 4)
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
        steps(engine, 1)
        found.append([in_pool(engine, text(BLOCKS, seed)) for seed in (3, 1, 2)])
        steps(engine, 1)
    assert found[-1] == [BLOCKS] * 3
    assert all(first >= second >= third for first, second, third in found)


def test_the_queues_order_may_be_priority(paper_config: Any) -> None:
    shape = Shape(blocks=129, warm=512, ahead=True)
    with closing(PaperEngine(by_priority(paper_config), shape)) as engine:
        for seed in (1, 2):
            park(engine, text(BLOCKS, seed))
        full_house(engine)
        engine.side.bridge.spiller.step = lambda *_: BLOCKS
        engine.ask(text(BLOCKS, 1), priority=5)
        engine.ask(text(BLOCKS, 2), priority=1)
        steps(engine, 1)
        engine.step()
        assert in_pool(engine, text(BLOCKS, 2)) == BLOCKS
        assert in_pool(engine, text(BLOCKS, 1)) == 0


def test_no_room_is_taken_from_who_stands_before(paper: Callable[..., Any]) -> None:
    engine = paper(Shape(blocks=41, warm=512, ahead=True))
    park(engine, text(BLOCKS, 1))
    full_house(engine, length=30)
    engine.ask(text(25, 70))  # needs all that is free
    engine.ask(text(BLOCKS, 1))
    steps(engine, 4)
    assert counts(engine).prefetched == 0
    engine.settle()
    assert engine.is_whole()


def test_nothing_is_loaded_that_is_computed_faster(engine: Any) -> None:
    full_house(engine)
    engine.side.bridge.ledger.costs.worth_loading = lambda *_: False
    request = engine.ask(text(BLOCKS, 1))
    before = counts(engine).recomputed
    until(engine, lambda: engine.outputs[request.request_id])
    assert counts(engine).prefetched == 0
    assert counts(engine).recomputed == before + BLOCKS, "that was decided once"


@pytest.mark.parametrize("why", ["another salt", "skips the prefix cache"])
def test_nothing_is_loaded_for_who_could_not_use_it(engine: Any, why: str) -> None:
    full_house(engine)
    salt = "theirs" if why == "another salt" else None
    request = engine.make("asks", text(BLOCKS, 1), 1, cache_salt=salt)
    request.skip_reading_prefix_cache = salt is None
    engine.outputs["asks"] = []
    engine.scheduler.add_request(request)
    steps(engine, 4)
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
