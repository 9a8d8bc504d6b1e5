"""What a load overwrites is copied before it does, without a copy ahead of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from kvgraph.hooks.tiers.directory import CopyDirectory
from kvgraph.hooks.tiers.jobs import Load, Spill
from kvgraph.hooks.vllm.tiers.spiller import CopyLead
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
    engine.end(turn)
    engine.settle()
    engine.check_whole()


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
    engine.end(turn)
    engine.settle()
    engine.check_whole()


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
    engine.end(turn)
    engine.settle()
    engine.check_whole()


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
