"""From a key to the free block that holds it: checked at every use, and bounded by the pool."""

from __future__ import annotations

import random
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from kvgraph.hooks.keys import key_in_pool, pack_hashes, unpack
from kvgraph.hooks.vllm.index import BlockIndex
from kvgraph_bench.hotpath import BLOCK_SIZE, cached_pool, new_pool, request_maker

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def computed(pool: Any, make: Any, tokens: list[int]) -> tuple[list[int], list[Any]]:
    """Keys and blocks of a prompt that was computed, not found."""
    request = make(tokens)
    blocks = pool.get_new_blocks(len(request.block_hashes))
    pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_SIZE, 0)
    return unpack(pack_hashes(request.block_hashes)), blocks


@pytest.mark.parametrize("hears_all", [True, False])
def test_a_key_is_gone_only_with_the_last_block_that_holds_it(hears_all: bool) -> None:
    pool, make = new_pool(32), request_maker()
    index = BlockIndex(pool, hears_all=hears_all)
    keys, first = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    same, second = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    assert keys == same
    index.cached(keys, [block.block_id for block in first])
    index.cached(keys, [block.block_id for block in second])
    pool.free_blocks([*first, *second])
    for blocks, gone in ((second, []), (first, keys)):
        hashes = [block.block_hash for block in blocks]
        pool.evict_blocks({block.block_id for block in blocks})
        assert list(index.forget(hashes, keys)) == gone
        assert [index.find(key) for key in keys] == ([None] * 4 if gone else first)


def test_holders_are_counted_whatever_the_pool_has_by_now() -> None:
    """Steps are noted late: both holders of the keys went, and a third block has them again."""
    pool, make = new_pool(32), request_maker()
    index = BlockIndex(pool)
    keys, first = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    _, second = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    hashes = [block.block_hash for block in first]
    pool.free_blocks([*first, *second])
    pool.evict_blocks({block.block_id for block in (*first, *second)})
    _, third = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    pool.free_blocks(third)
    for blocks in (first, second):
        index.cached(keys, [block.block_id for block in blocks])
    assert list(index.forget(hashes, keys)) == []
    assert list(index.forget(hashes, keys)) == keys
    index.cached(keys, [block.block_id for block in third])
    assert [index.find(key) for key in keys] == third
    pool.evict_blocks({block.block_id for block in third})
    assert list(index.forget(hashes, keys)) == keys


def test_what_may_be_counted_wrong_is_looked_for_in_the_pool() -> None:
    pool, make = new_pool(32), request_maker()
    index = BlockIndex(pool)
    keys, first = computed(pool, make, list(range(4 * BLOCK_SIZE)))
    hashes = [block.block_hash for block in first]
    for _ in range(2):
        index.cached(keys, [block.block_id for block in first])
    index.doubt()  # as where a step could not be noted in full
    assert list(index.forget(hashes[:2], keys[:2])) == []
    pool.free_blocks(first)
    pool.evict_blocks({block.block_id for block in first})
    assert list(index.forget(hashes, keys)) == keys


def test_changes_are_noted_one_at_a_time_and_in_order() -> None:
    """By whichever thread: a second one waits until the first has noted its change."""
    index = BlockIndex(new_pool(32))
    noted: list[int] = []
    begun, go_on = Event(), Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(10)
        noted.append(1)

    index.late.add(first)
    index.late.add(lambda: noted.append(2))
    others = [Thread(target=index.catch_up) for _ in range(2)]
    others[0].start()
    assert begun.wait(10)
    others[1].start()
    assert noted == []
    go_on.set()
    for each in others:
        each.join(10)
    assert noted == [1, 2]


def test_many_keys_are_found_as_one_is() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng, now = random.Random(seed), 1000.0
    pool, keys, index = cached_pool(400, lambda: now)
    free = pool.free_block_queue.get_all_free_blocks()
    pool.touch(rng.sample(free, 60))
    pool.evict_blocks({block.block_id for block in rng.sample(free, 60)})
    now = 1005.0
    index.freed([block.block_id for block in rng.sample(free, 60)])
    asked = np.array(rng.choices([*keys.tolist(), 0, 12345], k=500), dtype=np.uint64)
    for since in (1000.0, 1001.0, 1006.0):
        first = sorted(np.unique(asked, return_index=True)[1].tolist())
        one_by_one = [(at, index.find(int(asked[at]))) for at in first]
        expected = [
            (at, block) for at, block in one_by_one if block and index.freed_at(block) <= since
        ]
        found = index.find_unused(asked, since)
        assert list(found.places) == [at for at, _ in expected]
        assert all(one is other for one, (_, other) in zip(found.blocks, expected, strict=True))
        assert found.ids.tolist() == [block.block_id for block in found.blocks]
        assert found.hashes == [block.block_hash for block in found.blocks]


def test_keys_that_no_block_holds_do_not_pile_up() -> None:
    """As of blocks that vLLM skipped: their eviction is never reported."""
    pool, keys, index = cached_pool(64)
    for start in range(0, 10_000, 10):
        index.cached(range(start, start + 10), [0] * 10)
    assert len(index) <= 2 * 64
    by_key = {key_in_pool(b.block_hash): b for b in pool.free_block_queue.get_all_free_blocks()}
    assert all(index.find(key) is by_key[key] for key in keys.tolist())
