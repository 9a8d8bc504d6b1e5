"""What idle sessions left in pool and memory gets its disk copy, though nothing evicts it."""

from __future__ import annotations

import pytest
from kvgraph.hooks.tiers.jobs import Demote, TierWork
from kvgraph.hooks.vllm.tiers.idle import IDLE_S
from pool_engine import Engine, Turn, parked, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def steps(engine: Engine, seconds: float = 5.0) -> None:
    """An engine that goes on stepping for a while."""
    until = engine.now + seconds
    while engine.now < until:
        engine.step()
        engine.worker.finish_all()
    engine.settle()


def on_disk(engine: Engine, turn: Turn) -> list[bool]:
    return [engine.directory.is_cold(each) for each in turn.request.block_hashes]


def test_blocks_in_the_pool_are_on_disk_an_hour_after_their_request() -> None:
    engine = Engine(blocks=33, warm=32, cold=32)
    turn = engine.serve(prompt(4, 1))
    engine.now += IDLE_S - 60
    steps(engine)
    assert not any(on_disk(engine, turn))
    engine.now += 120
    steps(engine)
    assert all(on_disk(engine, turn))
    assert engine.pool.get_cached_block(turn.request.block_hashes[0], [0]), "nothing evicted them"
    assert set(engine.worker.disk) == set(turn.request.block_hashes)


def test_blocks_in_memory_are_too_and_stay_there() -> None:
    engine = Engine(warm=64, cold=64)
    turn = parked(engine)
    assert not any(on_disk(engine, turn))
    engine.now += IDLE_S
    steps(engine)
    assert all(on_disk(engine, turn))
    assert all(engine.directory.warm(each) for each in turn.request.block_hashes)
    again = engine.serve([*prompt(4, 1), 7])
    assert (again.loaded, again.computed) == (4, 0)


def test_a_restart_finds_all_of_an_idle_chain_its_root_too() -> None:
    """The root is in use all the time, and its blocks would never reach a disk by themselves."""
    engine = Engine(blocks=33, warm=32, cold=64)
    shared = prompt(3, 1, extra=0)
    first = engine.serve([*shared, *prompt(3, 2)])
    for number in range(30):
        engine.now += IDLE_S / 20
        engine.serve([*shared, *prompt(1, 10 + number)])
    steps(engine)
    assert all(on_disk(engine, first))


def test_each_block_is_written_once() -> None:
    engine, written = Engine(blocks=33, warm=32, cold=64), list[bytes]()
    submit = engine.worker.submit

    def noted(work: TierWork) -> None:
        written.extend(each for job in work.jobs if isinstance(job, Demote) for each in job.hashes)
        submit(work)

    engine.worker.submit = noted  # type: ignore[method-assign]
    tokens = prompt(3, 1)
    for _ in range(3):
        turn = engine.serve(tokens)
        engine.now += IDLE_S
        steps(engine)
    assert sorted(written) == sorted(turn.request.block_hashes)
    engine.push_out()
    engine.push_out()
    assert len(set(written)) == len(written), "leaving memory, they need no second write"


@pytest.mark.parametrize("why", ["evicted", "reset", "adapter", "no disk"])
def test_what_may_not_or_cannot_be_on_disk_is_left_alone(why: str) -> None:
    engine = Engine(warm=8, cold=0 if why == "no disk" else 64, spill_all=False)
    engine.advise(spill_first=[])
    turn = engine.ask(prompt(4, 1))
    if why == "adapter":
        turn.request.lora_request = object()
    engine.finish_loading(turn)
    engine.end(turn)
    if why == "evicted":
        engine.push_out()
    elif why == "reset":
        engine.reset()
    engine.now += IDLE_S
    steps(engine)
    assert not any(on_disk(engine, turn))
    engine.check_whole()


def test_an_idle_engine_does_not_step_for_it() -> None:
    engine = Engine(blocks=33, warm=32, cold=32)
    engine.serve(prompt(4, 1))
    engine.now += IDLE_S
    engine.step()
    engine.worker.finish_all()
    engine.step()
    assert not engine.busy
