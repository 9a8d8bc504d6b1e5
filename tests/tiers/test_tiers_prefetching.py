"""Copies come back before a request needs them."""

from __future__ import annotations

import pytest
from kvgraph.graph.wire.events import BlocksLoaded
from kvgraph.hooks.tiers.jobs import Load
from kvgraph_bench.hotpath import BLOCK_SIZE
from pool_engine import Engine, keys, parked, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_prefetched_blocks_are_hit() -> None:
    engine = Engine()
    first = parked(engine)
    engine.advise(keys(first))
    engine.settle()
    assert engine.counts.prefetched == 4
    warmed = [event for event in engine.events if isinstance(event, BlocksLoaded)]
    assert sum(len(event.hashes) for event in warmed) == 4 * 8
    engine.advise()
    again = engine.serve(prompt(4, 1))
    assert (again.hits, again.computed) == (4, 0)
    assert engine.counts.prefetch_useful == 4
    assert engine.counts.stalls == 0
    engine.check_whole()


def test_prefetched_blocks_are_lost_tail_first_and_counted() -> None:
    engine = Engine()
    first = parked(engine)
    engine.advise(keys(first))
    engine.settle()
    engine.advise()
    order = [b.block_hash for b in engine.pool.free_block_queue.get_all_free_blocks()]
    chain = [block_hash + bytes(4) for block_hash in first.request.block_hashes]
    assert [h for h in order if h in chain] == chain[::-1]
    engine.push_out()
    assert engine.counts.prefetch_wasted == 4
    assert engine.counts.prefetch_useful == 0


def test_however_many_were_wasted_a_prefetch_is_tried_again() -> None:
    engine = Engine()
    first = parked(engine)
    for _ in range(80):
        engine.advise(keys(first))
        engine.settle()
        engine.advise()
        engine.push_out()
    assert engine.counts.prefetch_wasted > 150
    before = engine.counts.prefetched
    engine.advise(keys(first))
    engine.settle()
    assert engine.counts.prefetched > before


def test_what_a_reset_took_no_longer_stands_in_the_way_of_prefetches() -> None:
    engine = Engine()
    for seed in (1, 2, 3):
        engine.advise(spill_first=engine.keys_of(prompt(4, seed)))
        first = parked(engine, seed=seed)
        engine.advise(keys(first))
        engine.settle()
        assert engine.reset()
    assert engine.counts.prefetched == 12
    assert engine.counts.prefetch_wasted == 8  # the last reset is noticed with the next request


def test_a_request_that_comes_while_its_prefetch_is_under_way_waits_for_it() -> None:
    engine = Engine()
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    turn = engine.ask(prompt(4, 1))
    engine.step()
    assert turn.state == "waiting"
    engine.finish_loading(turn)
    assert (turn.hits, turn.loaded) == (4, 0)
    assert engine.counts.prefetch_useful == 4


def test_waiting_requests_keep_their_room() -> None:
    engine = Engine(blocks=17)
    first = parked(engine)
    holder = engine.ask(prompt(7, 70))
    engine.step()
    engine.ask(prompt(12, 71))  # does not fit now, but will
    engine.advise(keys(first))
    for _ in range(3):
        engine.step()
    assert engine.counts.prefetched == 0
    assert not engine.bridge.ledger.coming
    assert engine.counts.prefetch_cancelled == 1
    engine.end(holder)


def test_a_failed_prefetch_leaves_no_block_behind() -> None:
    engine = Engine()
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    (load,) = [job for job in engine.worker.open if isinstance(job, Load)]
    engine.worker.finish(load, failed=[0, 3])
    engine.advise()
    engine.settle()
    assert engine.counts.prefetched == 2
    assert engine.counts.load_failed == 2
    engine.check_whole()


def test_what_was_computed_meanwhile_is_not_registered_twice() -> None:
    engine = Engine(blocks=33)
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    blocks = engine.pool.get_new_blocks(4)
    for at, block in enumerate(blocks):
        engine.memory[block.block_id] = (first.request.block_hashes[at], 0)
    engine.pool.cache_full_blocks(first.request, blocks, 0, 4, BLOCK_SIZE, 0)
    engine.pool.free_blocks(blocks[::-1])
    engine.advise()
    engine.settle()
    assert engine.counts.prefetched == 0
    engine.check_whole()
