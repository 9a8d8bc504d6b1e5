"""What a step pays for tiers follows what it takes, and what it takes has copies."""

from __future__ import annotations

import random

import pytest
from kvgraph.hooks.keys import key_in_pool
from kvgraph_bench.hotpath import BLOCK_SIZE
from pool_engine import Engine, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_what_a_new_ranking_puts_first_has_copies_before_it_goes() -> None:
    """A ranking that came between two steps had its victims taken at once, without copies."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng, engine = random.Random(seed), Engine(blocks=301, warm=4000)
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
    monkeypatch.setattr(engine.directory, "run", lambda hashes: runs.append(1) or run(hashes))
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
    turn, queue = engine.ask(prompt(8, 1)), engine.pool.free_block_queue
    walk, walks = queue.iter_blocks_after, list[object]()
    monkeypatch.setattr(queue, "iter_blocks_after", lambda at: walks.append(at) or walk(at))
    held = engine.pool.get_new_blocks(2)
    for _ in range(10):
        engine.look_up(turn.request, 0)
    assert len(walks) == 1
    engine.pool.free_blocks(held)
    walks.clear()
    engine.look_up(turn.request, 0)
    assert walks, "there may be room now"


def test_each_block_near_the_head_is_looked_at_once() -> None:
    engine, looked = Engine(blocks=2001, warm=4000), list[int]()
    for number in range(12):
        engine.serve(prompt(200, number))
    walk = engine.pool.free_block_queue.iter_blocks_after

    def counting(cursor: object) -> object:
        for block in walk(cursor):
            looked.append(block.block_id)
            yield block

    engine.pool.free_block_queue.iter_blocks_after = counting
    taken = 0
    for number in range(20):
        turn = engine.ask(prompt(2, 100 + number))
        engine.step()
        taken += len(turn.blocks)
        engine.worker.finish_all()
        engine.end(turn)
    assert taken >= 40
    assert len(looked) <= taken + 3 * 202, "as many as went, and what is ahead at first"
