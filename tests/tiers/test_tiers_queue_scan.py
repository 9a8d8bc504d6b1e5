"""Who looks at a bounded stretch of the free queue misses nobody who leaves by its head."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from kvgraph_bench.hotpath import cached_pool, new_pool

pytestmark = pytest.mark.usefixtures("vllm_loaded")

BLOCKS, AHEAD = 2001, 300


def test_all_that_leaves_was_looked_at_before() -> None:
    from kvgraph.hooks.vllm.tiers.spiller import QueueScan

    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng, (pool, _, _) = random.Random(seed), cached_pool(12_001)
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
        seen.update(block.block_id for block in scan.look(AHEAD, taken))
    assert left > 3_000
    assert missed == 0


def test_it_looks_at_each_block_once_and_goes_on_where_it_ended() -> None:
    from kvgraph.hooks.vllm.tiers.spiller import QueueScan

    pool, _, _ = cached_pool(BLOCKS)
    free, scan = pool.free_block_queue.get_all_free_blocks(), QueueScan(pool)
    looked = [block for _ in range(10) for block in scan.look(AHEAD, 0)]
    assert looked == free[:AHEAD]
    assert scan.reached == AHEAD
    pool.get_new_blocks(30)
    assert not scan.evicted(30)
    found = scan.look(AHEAD, 0)
    assert found == free[AHEAD : AHEAD + 30]
    scan.back_to(found, 10)
    assert scan.look(AHEAD, 0) == free[AHEAD + 10 : AHEAD + 30]


def test_empty_blocks_are_passed_over_a_bounded_number_in_each_step() -> None:
    from kvgraph.hooks.vllm.tiers.spiller import QueueScan

    pool = new_pool(3 * BLOCKS)
    scan = QueueScan(pool)
    walked: list[int] = []
    walk = pool.free_block_queue.iter_blocks_after

    def counting(cursor: Any) -> Iterator[Any]:
        walked.append(0)
        for block in walk(cursor):
            walked[-1] += 1
            yield block

    pool.free_block_queue.iter_blocks_after = counting
    for _ in range(12):
        assert scan.look(AHEAD, 0) == []
    assert max(walked) <= 1024
    assert sum(walked) == 3 * BLOCKS - 1
