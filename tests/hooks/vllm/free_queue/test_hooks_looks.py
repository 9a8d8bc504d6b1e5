"""What is near the head of the free queue is looked at once, while advice says the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.free_queue.protection import ProtectedKeys
from kvgraph_bench.hotpath import a_ranking, cached_pool
from pool_engine import Engine, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def busy_engine(prompts: int = 4) -> Engine:
    """One whose pool is full after four prompts, and finds nothing worth a copy."""
    engine = Engine(blocks=401, warm=4000)
    engine.advise(spill_first=[])
    for number in range(prompts):
        engine.serve(prompt(100, number))
    return engine


def counted_walks(pool: Any) -> list[int]:
    """Numbers of the blocks that anybody looks at in the queue from now on."""
    looked: list[int] = []
    walk = pool.free_block_queue.iter_blocks_after

    def counting(cursor: object) -> Iterator[Any]:
        for block in walk(cursor):
            looked.append(block.block_id)
            yield block

    pool.free_block_queue.iter_blocks_after = counting
    return looked


def test_a_ranking_that_finds_the_same_worth_a_copy_has_nothing_looked_at_again() -> None:
    engine = busy_engine()
    looked, taken = counted_walks(engine.pool), 0
    for number in range(20):
        engine.advise(spill_first=[number])
        turn = engine.ask(prompt(2, 100 + number))
        engine.step()
        taken += len(turn.blocks)
        engine.end(turn)
    assert len(looked) <= 2 * taken + 8 + 3 * 101, "as many as went, and what is ahead at first"


def test_what_turns_out_to_be_worth_a_copy_later_gets_one() -> None:
    engine = busy_engine(prompts=3)
    assert not engine.counts.spilled
    engine.advise(spill_first=engine.keys_of(prompt(100, 0))[-8:])
    engine.settle()
    engine.settle()
    last = engine.hashes_of(prompt(100, 0))[-8:]
    assert [block_hash in engine.directory for block_hash in last] == [True] * 8


def test_what_left_without_a_copy_is_counted_when_its_eviction_is_told() -> None:
    engine = busy_engine()
    _ = engine.counts  # all that went before is counted by this
    turn = engine.ask(prompt(8, 100))
    counts = engine.bridge.ledger.counts
    before = counts.passed_over
    engine.step()
    assert counts.passed_over == before, "the step itself only keeps them"
    assert engine.counts.passed_over > before
    engine.end(turn)


def test_a_head_without_protected_blocks_is_looked_at_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, keys, index = cached_pool(2001)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=400)
    asked: list[object] = []
    ranked = ProtectedKeys.ranked
    monkeypatch.setattr(
        ProtectedKeys, "ranked", lambda self, blocks: asked.append(blocks) or ranked(self, blocks)
    )
    precious = keys[:100]  # at the queue's end
    arranger.step(None, a_ranking(keys[:0], protected=precious))
    assert not asked
    arranger.step(None, a_ranking(keys[:0], protected=np.concatenate((precious, keys[-2:]))))
    assert asked, "two stand at the head now"
    assert arranger.held_back == 2
