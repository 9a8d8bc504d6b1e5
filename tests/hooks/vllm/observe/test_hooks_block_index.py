"""From a key to the free block that holds it: checked at every use, and bounded by the pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.hooks.keys import key_in_pool, pack_hashes, unpack
from kvgraph.hooks.link.late import RecentPrompts
from kvgraph.hooks.vllm.index import BlockIndex
from kvgraph_bench.hotpath import cached_pool, new_pool, request_maker
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import words

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


SIZE = 4
TEXT = list(range(100, 124))


def hashes(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Of the full blocks; each covers all before it, as vLLM's do."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [blake2b(f"{salt}{list(tokens[:end])}".encode()).digest() for end in ends]


@pytest.mark.parametrize("shared", [4, 5, 6, 7, 12, 15])
def test_it_counts_the_tokens_that_both_have(shared: int) -> None:
    recent = RecentPrompts(SIZE)
    other = [*TEXT[:shared], *(token + 1000 for token in TEXT[shared:])]
    missing = shared // SIZE
    assert recent.add(TEXT, hashes(TEXT), 0) == 0
    assert recent.add(other, hashes(other), missing) == shared % SIZE


def test_of_several_the_one_that_goes_furthest_counts() -> None:
    recent = RecentPrompts(SIZE)
    for shared in (5, 7, 6, 0):
        other = [*TEXT[:shared], *(token + 1000 * (shared + 1) for token in TEXT[shared:])]
        recent.add(other, hashes(other), 0)
    assert recent.add(TEXT, hashes(TEXT), 1) == 3


def test_nothing_is_said_where_they_part_elsewhere_or_have_another_salt() -> None:
    recent = RecentPrompts(SIZE)
    other = [*TEXT[:6], *(token + 1000 for token in TEXT[6:])]
    recent.add(other, hashes(other), 0)
    recent.add(other, hashes(other, "theirs"), 0)
    assert recent.add(TEXT, hashes(TEXT, "mine"), 1) == 0
    assert recent.add(TEXT, hashes(TEXT), 3) == 0, "an eviction: they parted before"
    assert recent.add(TEXT, hashes(TEXT), 6) == 0, "nothing is missing"
    assert recent.add(TEXT[:22], hashes(TEXT[:22]), 1) == 2


def test_old_prompts_are_forgotten() -> None:
    recent = RecentPrompts(SIZE)
    other = [*TEXT[:6], *(token + 1000 for token in TEXT[6:])]
    recent.add(other, hashes(other), 0)
    for number in range(64):
        recent.add([number], [], 0)
    assert recent.add(TEXT, hashes(TEXT), 1) == 0


@pytest.mark.usefixtures("vllm_loaded")
def test_the_request_log_tells_the_token(paper: Callable[..., Any]) -> None:
    engine, graph = paper(Shape(blocks=97)), KVCacheGraph()
    engine.side.client.outbox.open(1 << 16)
    first = words(80, 1)
    second = [*first[:37], *words(40, 2)]
    engine.serve(first, 1)
    engine.serve(second, 1)
    graph.apply("e", [engine.side.hello(), *engine.side.client.outbox.take_all()])
    history = graph.tables.history
    miss = request_view(history, history.requests.next - 1, float).miss
    assert miss is not None
    assert (miss.reason, miss.index, miss.token) == ("diverged", 37 // BLOCK_SIZE, 37)
    assert "Token 38 of the prompt is the first that differs" in miss.sentence
