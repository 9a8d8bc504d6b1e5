"""Copies come back for the request that needs them, or before; what is looked at for that."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.events import BlocksLoaded
from kvgraph.hooks.keys import key_in_pool, key_of
from kvgraph.hooks.tiers.jobs import Load
from kvgraph.hooks.vllm.tiers.spiller import QueueScan
from kvgraph_bench.hotpath import (
    BLOCK_SIZE,
    cached_pool,
    new_pool,
)
from kvgraph_bench.paper.paper_engine import Shape
from paper import hashes_of, text, words
from pool_engine import BLOCK_BYTES, Engine, Turn, counted_walks, keys, parked, prompt
from pool_requests import needless, ranking
from seeded import seeded

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_the_last_token_is_always_computed() -> None:
    engine = Engine()
    parked(engine)
    exactly = engine.serve(prompt(4, 1, extra=0))
    assert exactly.loaded == 3


def test_a_second_request_waits_for_the_first_ones_load() -> None:
    engine = Engine(blocks=33)
    parked(engine)
    one, two = engine.ask(prompt(4, 1)), engine.ask([*prompt(4, 1), 7])
    engine.step()
    assert (one.state, two.state) == ("loading", "waiting")
    engine.step()
    assert two.state == "waiting"
    engine.worker.finish_all()
    engine.step()
    engine.step()
    assert (one.state, two.state) == ("running", "running")
    assert (one.loaded, two.loaded, two.hits) == (4, 0, 4)
    engine.finish_whole(one, two)


def test_a_failed_load_is_computed_from_its_first_gap() -> None:
    engine = Engine()
    parked(engine)
    turn = engine.ask(prompt(4, 1))
    engine.step()
    (load,) = engine.worker.open
    engine.worker.finish(load, failed=[2])
    engine.finish_loading(turn)
    assert (turn.loaded, turn.computed) == (2, 2)
    assert engine.counts.load_failed == 1
    assert turn.request.block_hashes[2] not in engine.directory, "it would fail again"
    engine.finish_whole(turn)


@pytest.mark.parametrize("served", [5, 7, 9, 11])
def test_a_chain_on_a_full_disk_is_read_before_its_records_make_room(served: int) -> None:
    """What the load overwrites is copied, for which copies go to disk: others make room there."""
    engine = Engine(warm=12, cold=8)
    for number in range(served):
        engine.serve(prompt(4, number))
    oldest = engine.directory.cold_hashes()[0]
    (number,) = [n for n in range(served) if oldest in engine.hashes_of(prompt(4, n))]
    turn = engine.serve(prompt(4, number))
    assert (turn.hits, turn.loaded) == (0, 4)
    assert engine.counts.load_failed == 0


@pytest.mark.parametrize(("length", "warm"), [(3, 8), (5, 10), (5, 12), (8, 12)])
def test_a_chain_on_disk_is_read_whole_though_memory_is_full(length: int, warm: int) -> None:
    engine = Engine(warm=warm, cold=64)
    for number in range(7):
        engine.serve(prompt(length, number))
    wanted = engine.hashes_of(prompt(length, 0))
    assert all(map(engine.directory.is_cold, wanted))
    assert engine.directory.run(wanted) < length, "there is room for a part of it"
    turn = engine.serve(prompt(length, 0))
    assert (turn.hits, turn.loaded) == (0, length)


def test_of_a_chain_on_disk_no_more_is_read_than_memory_holds() -> None:
    engine = Engine(blocks=65, warm=12, cold=64)
    for block_hash in engine.hashes_of(prompt(20, 0)):
        engine.directory.add_cold(block_hash)
    turn = engine.ask(prompt(20, 0))
    for taken in (0, 60):
        engine.pool.get_new_blocks(taken)
        assert engine.look_up(turn.request, 0) == (12 * BLOCK_SIZE, True)


def test_what_makes_way_for_a_chain_on_disk_is_on_disk_too_if_anything_is() -> None:
    engine = Engine(warm=2, cold=8)
    ledger, directory = engine.bridge.ledger, engine.directory
    only_here, there_too, wanted = engine.hashes_of(prompt(3, 1))
    directory.complete_all(directory.begin_all([only_here, there_too], (True,)))
    directory.add_cold(there_too)
    directory.add_cold(wanted)
    assert directory.run([wanted]) == 0
    ledger.make_way([wanted])
    assert directory.run([wanted]) == 1
    assert directory.warm_hashes() == [only_here], "though the other was used later"


def test_nothing_makes_way_for_a_chain_that_has_to_wait_for_the_pool() -> None:
    engine = Engine(warm=10, cold=64)
    for number in range(7):
        engine.serve(prompt(5, number))
    blocker = engine.ask(prompt(13, 9))
    engine.step()
    before = engine.directory.lost
    turn = engine.ask(prompt(5, 0))
    engine.step()
    assert turn.state == "waiting"
    assert engine.directory.lost == before
    engine.end(blocker)
    engine.finish_loading(turn)
    assert turn.loaded == 5


def test_a_preempted_request_is_loaded_again() -> None:
    engine = Engine(blocks=10)
    turn = engine.ask(prompt(4, 1))
    engine.step()
    engine.preempt(turn)
    turn.state = "behind"
    engine.settle()
    other = engine.serve(prompt(8, 2))
    assert other.computed == 8
    turn.state = "waiting"
    engine.finish_loading(turn)
    assert turn.computed == 0
    engine.finish_whole(turn)


def test_what_is_slower_than_computing_is_declined_once() -> None:
    engine = Engine()
    parked(engine)
    asked: list[Any] = []
    engine.bridge.ledger.costs.worth_loading = lambda *sizes: bool(asked.append(sizes))
    blocker = engine.ask(prompt(13, 2))
    engine.step()
    turn = engine.ask(prompt(4, 1))
    for _ in range(5):
        engine.step()
        assert turn.state == "waiting", "there are no blocks for it yet"
    assert asked == [(4 * BLOCK_SIZE, 4 * BLOCK_BYTES, 0, 0)]
    engine.end(blocker)
    engine.finish_loading(turn)
    assert turn.computed == 4
    assert engine.counts.recomputed == 4


def test_whom_a_prefetch_keeps_waiting_for_too_long_computes() -> None:
    """A disk may hang: a request that could compute must not wait for what nobody hears of."""
    engine = Engine(blocks=33)
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    assert engine.bridge.promises.lend()
    engine.advise()
    now = engine.bridge.ledger.clock()
    turn = engine.ask(prompt(4, 1))
    engine.step()
    assert turn.state == "waiting"
    engine.bridge.ledger.clock = lambda: now + 2.0
    engine.step()
    assert turn.state == "running"
    assert turn.computed == 4
    engine.finish_whole(turn)


def test_others_wait_longer_for_a_load_that_usually_takes_longer() -> None:
    engine = Engine(blocks=33)
    ledger = engine.bridge.ledger
    parked(engine)
    ledger.costs.load_bytes_per_s = BLOCK_BYTES  # a block a second
    one, two = engine.ask(prompt(4, 1)), engine.ask([*prompt(4, 1), 7])
    now = ledger.clock()
    ledger.clock = lambda: now
    engine.step()
    ledger.clock = lambda: now + 8.5
    engine.step()
    assert (one.state, two.state) == ("loading", "waiting")
    ledger.clock = lambda: now + 9.5
    engine.step()
    assert two.state == "running"


BLOCKS, AHEAD = 2001, 300


def test_all_that_leaves_was_looked_at_before() -> None:
    rng, (pool, _, _) = seeded(), cached_pool(12_001)
    scan, seen, missed, left = QueueScan(pool), set[int](), 0, 0
    for step in range(600):
        taken = rng.choice((0, 1, 1, 2, 40))
        blocks = pool.get_new_blocks(taken)
        if step > 10:
            left += taken
            missed += sum(block.block_id not in seen for block in blocks)
        free = pool.free_block_queue.get_all_free_blocks()
        hits = rng.sample(free, rng.randrange(4))
        if rng.random() < 0.1:  # the last one that was looked at, and those behind it
            hits = free[scan.reached - taken - 2 : scan.reached - taken + 2]
        pool.touch(hits)
        scan.touched(hits)
        pool.free_blocks(hits)  # to the queue's end
        seen.difference_update(block.block_id for block in hits)
        if scan.evicted(taken):
            scan.start_again()
        seen.update(scan.look(AHEAD, taken).ids.tolist())
    assert left > 3_000
    assert missed == 0


def test_it_looks_at_each_block_once_and_goes_on_where_it_ended() -> None:
    pool, _, _ = cached_pool(BLOCKS)
    free, scan = pool.free_block_queue.get_all_free_blocks(), QueueScan(pool)
    looked = [block for _ in range(10) for block in scan.look(AHEAD, 0).blocks]
    assert looked == free[:AHEAD]
    assert scan.reached == AHEAD
    pool.get_new_blocks(30)
    assert not scan.evicted(30)
    found = scan.look(AHEAD, 0).blocks
    assert found == free[AHEAD : AHEAD + 30]
    scan.back_to(found, 10)
    assert scan.look(AHEAD, 0).blocks == free[AHEAD + 10 : AHEAD + 30]


def test_empty_blocks_are_passed_over_a_bounded_number_in_each_step() -> None:
    pool = new_pool(3 * BLOCKS)
    scan = QueueScan(pool)
    looked = counted_walks(pool)
    for _ in range(12):
        before = len(looked)
        assert scan.look(AHEAD, 0).blocks == []
        assert len(looked) - before <= 1024
    assert len(looked) == 3 * BLOCKS - 1


def test_what_a_new_ranking_puts_first_has_copies_before_it_goes() -> None:
    """A ranking that came between two steps had its victims taken at once, without copies."""
    rng, engine = seeded(), Engine(blocks=301, warm=4000)
    for number in range(100):
        cached = [key_in_pool(b.block_hash) for b in engine.pool.blocks if b.block_hash]
        engine.advise(order=rng.sample(cached, len(cached)), spill_first=cached)
        turn = engine.ask(prompt(18, number))
        engine.step()
        engine.worker.finish_all()
        engine.end(turn)
    counts = engine.counts
    assert counts.spilled > 1000
    assert counts.spilled / (counts.spilled + counts.spill_lost) >= 0.9


def test_a_request_that_waits_is_looked_up_once_until_a_copy_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine asks in every step that a request waits for room."""
    engine = Engine(warm=64)
    engine.serve(prompt(8, 1))
    engine.push_out()
    turn = engine.ask(prompt(8, 1))
    run, runs = engine.directory.run, list[int]()
    monkeypatch.setattr(engine.directory, "run", lambda *a, **k: runs.append(1) or run(*a, **k))
    for _ in range(10):
        assert engine.look_up(turn.request, 0) == (8 * BLOCK_SIZE, True)
    assert len(runs) == 1
    assert engine.look_up(turn.request, BLOCK_SIZE) == (7 * BLOCK_SIZE, True)
    engine.bridge.ledger.give_up([engine.directory.warm(turn.request.block_hashes[2])])
    assert engine.look_up(turn.request, 0) == (2 * BLOCK_SIZE, True)


def test_while_a_request_waits_for_room_its_load_s_victims_are_not_looked_at_in_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(warm=64)
    engine.serve(prompt(8, 1))
    engine.push_out()
    turn, victims = engine.ask(prompt(8, 1)), engine.bridge.spiller.load_victims
    look, looks = victims.look, list[int]()
    monkeypatch.setattr(victims, "look", lambda: looks.append(1) or look())
    held = engine.pool.get_new_blocks(2)
    for _ in range(10):
        engine.look_up(turn.request, 0)
    assert len(looks) == 1
    engine.pool.free_blocks(held)
    looks.clear()
    engine.look_up(turn.request, 0)
    assert looks, "there may be room now"


def test_each_block_near_the_head_is_looked_at_once() -> None:
    engine = Engine(blocks=2001, warm=4000)
    for number in range(12):
        engine.serve(prompt(200, number))
    looked, taken = counted_walks(engine.pool), 0
    for number in range(20):
        turn = engine.ask(prompt(2, 100 + number))
        engine.step()
        taken += len(turn.blocks)
        engine.worker.finish_all()
        engine.end(turn)
    assert taken >= 40
    assert len(looked) <= taken + 3 * 202, "as many as went, and what is ahead at first"


def brought_back(engine: Engine, turn: Turn) -> None:
    """A sidecar had its blocks prefetched, and names none any more."""
    engine.advise(keys(turn))
    engine.settle()
    engine.advise()


def test_prefetched_blocks_are_hit() -> None:
    engine = Engine()
    first = parked(engine)
    brought_back(engine, first)
    assert engine.counts.prefetched == 4
    warmed = [event for event in engine.events if isinstance(event, BlocksLoaded)]
    assert sum(len(event.hashes) for event in warmed) == 4 * 8
    again = engine.serve(prompt(4, 1))
    assert (again.hits, again.computed) == (4, 0)
    assert engine.counts.prefetch_useful == 4
    assert engine.counts.stalls == 0
    engine.check_whole()


def test_prefetched_blocks_are_lost_tail_first_and_counted() -> None:
    engine = Engine()
    first = parked(engine)
    brought_back(engine, first)
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
        brought_back(engine, first)
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


@pytest.mark.parametrize("way", ["loaded", "prefetched"])
def test_what_copies_come_back_to_is_not_protected(paper: Any, way: str) -> None:
    """30 blocks are loaded at once where a step computes 8; up to 64 are brought back unasked."""
    engine, rng, precious = paper(Shape(blocks=201, warm=400)), random.Random(1), set[int]()
    found, client = needless(engine, precious), engine.side.client
    texts = [text(30, seed) for seed in range(12)]
    for tokens in texts:
        engine.serve(tokens)
    for head in (text(20, 100), text(20, 101)):
        engine.serve(head)
        precious.update(map(key_of, hashes_of(engine, head)))
    for _ in range(60):
        two = rng.sample(texts, 2)
        cached = {key_in_pool(b.block_hash) for b in engine.pool.blocks if b.block_hash}
        client.hold_ranking(ranking(protected=sorted(cached & precious)))
        if way == "prefetched":
            wanted = [key_of(each) for tokens in two for each in hashes_of(engine, tokens)]
            client.hold_wanted(np.array(wanted, dtype=np.uint64))
            for _ in range(4):
                engine.step()
                engine.finish_copies()
        for tokens in two:
            engine.ask(tokens)
        engine.settle()
        for _ in range(rng.randrange(6)):
            engine.serve(words(rng.randrange(3, 14) * BLOCK_SIZE, rng.randrange(1 << 30)))
    assert getattr(engine.side.bridge.ledger.counts, way) > 150, "too little came back to tell"
    assert sum(found) == 0


@pytest.mark.parametrize(("others", "brought"), [(0, 0), (8, 0), (24, 4)])
def test_a_prefetch_leaves_a_step_others_than_protected_blocks(others: int, brought: int) -> None:
    engine = Engine(blocks=33, warm=64)
    due = parked(engine)
    free = [block.block_hash for block in engine.pool.free_block_queue.get_all_free_blocks()]
    rules = {key_in_pool(block_hash) for block_hash in free[others:] if block_hash}
    for wanted in ([], keys(due)):
        engine.advise(wanted, protected=rules)
        engine.settle()
    cached = {key_in_pool(b.block_hash) for b in engine.pool.blocks if b.block_hash}
    assert rules <= cached
    assert engine.counts.prefetched == brought
