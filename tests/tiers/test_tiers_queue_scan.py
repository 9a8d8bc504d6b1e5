"""Who looks at a bounded stretch of the free queue misses nobody who leaves by its head."""

from __future__ import annotations

import random

import pytest
from kvgraph.bench.hotpath import cached_pool, new_pool

pytestmark = pytest.mark.usefixtures("vllm_loaded")

BLOCKS, AHEAD = 2001, 300


def test_all_that_leaves_was_looked_at_before() -> None:
    from kvgraph.hooks.vllm.free_queue.queue_scan import QueueScan

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
        hits = rng.sample(pool.free_block_queue.get_all_free_blocks(), rng.randrange(4))
        pool.touch(hits)
        pool.free_blocks(hits)  # to the queue's end
        seen.difference_update(block.block_id for block in hits)
        scan.moved(taken)
        seen.update(block.block_id for _, block in scan.look(AHEAD, taken))
    assert left > 3_000
    assert missed == 0


def test_it_knows_how_many_can_go_without_a_loss() -> None:
    from kvgraph.hooks.vllm.free_queue.queue_scan import QueueScan

    pool = new_pool(BLOCKS)
    scan = QueueScan(pool)
    for _ in range(10):
        scan.moved(0)
        assert list(scan.look(AHEAD, 0))
    assert scan.safe == AHEAD
    scan.must_wait(100)
    assert scan.safe == 100
    pool.get_new_blocks(30)
    scan.moved(30)
    assert scan.safe == 70
    scan.start_again()
    for _ in range(10):
        list(scan.look(AHEAD, 0))
    assert scan.safe == AHEAD
