"""Where hardly any block is free but protected ones: what that costs, and that it passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.types import Keys
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph_bench.hotpath import a_ranking, cached_pool

pytestmark = pytest.mark.usefixtures("vllm_loaded")

REACH = 64


class Queue:
    """A pool whose blocks are all free and cached; all but the last two are protected."""

    def __init__(self, blocks: int) -> None:
        self.now = 1000.0
        self.pool, self.keys, index = cached_pool(blocks, self.clock)
        self.arranger = FreeQueueArranger(self.pool, index, REACH, 60.0, self.clock)
        self.looked = 0
        walk = self.pool.free_block_queue.iter_blocks_after

        def counting(cursor: object) -> Iterator[Any]:
            for block in walk(cursor):
                self.looked += 1
                yield block

        self.pool.free_block_queue.iter_blocks_after = counting

    def clock(self) -> float:
        return self.now

    @property
    def order(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def step(self, protected: Keys) -> None:
        self.arranger.step(None, a_ranking(self.keys[:0], protected=protected))

    def hit(self, ids: list[int]) -> None:
        """A request finds these blocks, and ends."""
        blocks = [self.pool.blocks[number] for number in ids]
        self.pool.touch(blocks)
        self.arranger.touched(blocks)
        self.pool.free_blocks(blocks)
        self.arranger.freed()


def test_once_protection_is_over_what_is_freed_stays_where_stock_puts_it() -> None:
    queue = Queue(401)
    queue.step(queue.keys[:-2])
    queue.step(queue.keys[:0])
    before, moved = queue.order, queue.arranger.moved
    for number in range(4):
        queue.hit(before[10 * number : 10 * number + 10])
        if number:
            queue.step(queue.keys[:0])
    assert queue.order == before[40:] + before[:40]
    assert queue.arranger.moved == moved


def test_all_of_the_queue_is_looked_at_once_and_the_least_precious_go_first() -> None:
    queue = Queue(2001)
    protected = queue.keys[:-2][np.random.default_rng(1).permutation(1998)]
    queue.step(protected)
    assert queue.looked >= 2000
    queue.looked, taken = 0, []
    for _ in range(40):
        taken += queue.pool.get_new_blocks(32)
        queue.step(protected)
    assert queue.looked <= 40 * 2 * REACH
    wanted = queue.keys[-2:].tolist()[::-1] + protected[: 40 * 32 - 2].tolist()
    of_block = dict(zip(range(1, 2001), queue.keys.tolist(), strict=True))
    assert [of_block[block.block_id] for block in taken] == wanted


def test_where_all_is_in_use_nobody_looks_for_what_is_protected() -> None:
    queue = Queue(2001)
    queue.pool.get_new_blocks(1990)
    queue.step(queue.keys[:1000])
    laid = queue.arranger.moved
    for _ in range(9):
        queue.step(queue.keys[:1000])
    assert queue.looked <= 10 * 2 * 10
    assert queue.arranger.moved == laid <= 10, "it stands in its order since the first step"


def test_what_callers_stated_may_lapse_while_it_waits_to_go() -> None:
    queue = Queue(401)
    stated, ranked = queue.keys[:100].tolist(), queue.keys[100:-2]
    queue.arranger.stated(stated, is_over=True)
    queue.step(ranked)
    taken = queue.pool.get_new_blocks(2 + 65)  # what is free, and stated first
    queue.now += 100.0
    queue.step(ranked)
    assert len(queue.order) == queue.pool.get_num_free_blocks() == 400 - len(taken)
    left = {block for block in range(1, 101) if queue.pool.blocks[block].ref_cnt == 0}
    assert len(left) == 35
    assert set(queue.order[:35]) == left, "nothing protects them, so they go first"


def test_all_that_is_freed_at_once_goes_before_what_is_protected() -> None:
    queue = Queue(2001)
    others, protected = queue.keys[-1000:], queue.keys[:-1000]
    blocks = [queue.pool.blocks[number] for number in range(1001, 2001)]
    queue.pool.touch(blocks)
    queue.step(protected)  # nothing else is free
    queue.pool.free_blocks(blocks)
    queue.arranger.freed()
    gone: list[int] = []
    for _ in range(len(others) // 40):
        gone += [block.block_id for block in queue.pool.get_new_blocks(40)]
        queue.step(protected)
    assert min(gone) > 1000


def test_what_was_laid_before_victims_is_looked_at_when_it_is_protected() -> None:
    """Freed blocks go before protected ones, and so before what a ranking laid."""
    queue = Queue(401)
    others, protected = queue.keys[-4:], queue.keys[:-4]
    queue.arranger.copies_first(Copies())
    queue.arranger.step(a_ranking(others[:2], 1, protected))
    queue.hit([399, 400])
    assert queue.order[:2] == [399, 400]
    queue.arranger.step(a_ranking(queue.keys[100:300], 2, others[2:]))
    assert not {399, 400} & set(queue.order[:REACH]), "they are protected by now"


class Copies:
    """Copies nothing."""

    def freed(self) -> None: ...
    def touched(self, blocks: object) -> None: ...
    def gone(self, keys: object) -> None: ...
    def laid_more(self, victims: object, at_head: bool) -> None: ...
