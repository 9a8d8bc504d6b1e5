"""The free queue stays vLLM's: a permutation, linked both ways, blanks first, nothing touched."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_of, pack_hashes, unpack
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.index import BlockIndex
from kvgraph_bench.hotpath import BLOCK_SIZE, cached_pool, new_pool, request_maker

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def ranking(
    order: Any, protected: Any = (), epoch: int = 1, known_of: float = math.inf
) -> EvictionRanking:
    as_keys = [np.array(list(keys), dtype=np.uint64) for keys in (order, protected, (), ())]
    return EvictionRanking(epoch, math.inf, *as_keys, known_of=known_of)


def queue_of(pool: Any) -> list[Any]:
    """The free blocks in order; asserts that the list is linked both ways and counted right."""
    queue = pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    assert len(blocks) == queue.num_free_blocks
    assert len({block.block_id for block in blocks}) == len(blocks)
    before = [queue.fake_free_list_head, *blocks]
    after = [*blocks, queue.fake_free_list_tail]
    for left, right in zip(before, after, strict=True):
        assert left.next_free_block is right
        assert right.prev_free_block is left
    return list(blocks)


def keys_in_queue(pool: Any) -> list[int]:
    return [key_of(b.block_hash[:-4]) for b in queue_of(pool) if b.block_hash is not None]


def test_the_ranking_goes_first_in_its_order() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    order = random.Random(3).sample(keys.tolist(), 40)
    before = set(keys_in_queue(pool))
    arranger.step(ranking(order))
    assert keys_in_queue(pool)[:16] == order[:16]
    assert set(keys_in_queue(pool)) == before
    assert arranger.moved == 16
    assert arranger.epoch == 1


def test_the_window_is_refilled_behind_what_is_left_of_it() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    order = random.Random(4).sample(keys.tolist(), 50)
    advice, evicted = ranking(order), []
    for _ in range(10):
        arranger.step(advice)
        evicted += [key_of(b.block_hash[:-4]) for b in queue_of(pool)[:5]]
        pool.get_new_blocks(5)
    assert evicted == order[:50]


def test_a_step_without_news_moves_nothing() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    advice = ranking(keys.tolist()[:30])
    arranger.step(advice)
    moved, order = arranger.moved, queue_of(pool)
    for _ in range(5):
        arranger.step(advice)
    assert arranger.moved == moved
    assert queue_of(pool) == order


def test_a_block_that_was_used_after_the_ranking_stays_where_that_put_it() -> None:
    """What a ranking says of a session is void once the session came back."""
    now = 1000.0
    pool, keys, index = cached_pool(64, lambda: now)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=4)
    by_key = {key_of(b.block_hash[:-4]): b for b in queue_of(pool)}
    order = keys.tolist()[:20]
    now = 1010.0
    advice = ranking(order, known_of=now)
    arranger.step(advice)
    now = 1011.0
    back = order[8:12]
    pool.touch([by_key[key] for key in back])
    arranger.step(advice)
    index.remember(back, [by_key[key].block_id for key in back])
    pool.free_blocks([by_key[key] for key in back])
    evicted = []
    for _ in range(8):
        arranger.step(advice)
        evicted += [key_of(b.block_hash[:-4]) for b in queue_of(pool)[:2]]
        pool.get_new_blocks(2)
    assert evicted == [key for key in order if key not in back]
    assert keys_in_queue(pool)[-4:] == back
    arranger.step(ranking(back, epoch=2, known_of=1012.0))  # a later one knows
    assert keys_in_queue(pool)[:4] == back


def test_a_block_of_the_window_that_was_used_since_leaves_it() -> None:
    now = 1000.0
    pool, keys, index = cached_pool(64, lambda: now)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=4)
    by_key = {key_of(b.block_hash[:-4]): b for b in queue_of(pool)}
    order = keys.tolist()[:20]
    now = 1010.0
    advice = ranking(order, known_of=now)
    arranger.step(advice)
    now = 1011.0
    back = order[5:8]  # they stand in the window
    pool.touch([by_key[key] for key in back])
    arranger.step(advice)
    index.remember(back, [by_key[key].block_id for key in back])
    pool.free_blocks([by_key[key] for key in back])
    for _ in range(3):
        pool.get_new_blocks(4)
        arranger.step(advice)
    assert all(by_key[key] in queue_of(pool) for key in back)
    assert keys_in_queue(pool)[-3:] == back


def test_an_evicted_protected_block_is_counted_once() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    protected = keys.tolist()[:4]
    arranger.step(ranking([], protected))
    arranger.step(ranking([], protected, epoch=2))
    arranger.evicted([protected[0], keys.tolist()[20]])
    assert arranger.protected_evicted == 1


def test_referenced_recycled_and_unknown_blocks_are_left_alone() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=16)
    by_key = {key_of(b.block_hash[:-4]): b for b in queue_of(pool)}
    referenced, recycled, free = keys.tolist()[:3]
    pool.touch([by_key[referenced]])
    pool.evict_blocks({by_key[recycled].block_id})
    before = queue_of(pool)
    arranger.step(ranking([referenced, recycled, 12345, free]))
    assert by_key[referenced] not in queue_of(pool)
    assert by_key[referenced].ref_cnt == 1
    assert keys_in_queue(pool)[0] == free
    assert (arranger.moved, arranger.recycled) == (1, 3)
    assert sorted(b.block_id for b in queue_of(pool)) == sorted(b.block_id for b in before)


def test_a_ranking_that_repeats_itself_does_no_harm() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    some = keys.tolist()[:10]
    arranger.step(ranking(some + some + some[::-1], some + some))
    assert len(queue_of(pool)) == 63


def test_blank_blocks_stay_ahead() -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    blanks = pool.get_new_blocks(5)
    pool.free_blocks(blanks)
    arranger.step(ranking(keys.tolist()[:20]))
    queue = queue_of(pool)
    assert queue[:5] == blanks
    assert [key_of(b.block_hash[:-4]) for b in queue[5:15]] == keys.tolist()[:10]


def test_without_pressure_nothing_is_done() -> None:
    pool, index = new_pool(512), None
    index = BlockIndex(pool)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    request = request_maker()(list(range(20 * BLOCK_SIZE)))
    blocks = pool.get_new_blocks(20)
    pool.cache_full_blocks(request, blocks, 0, 20, BLOCK_SIZE, 0)
    known = unpack(pack_hashes(request.block_hashes))
    index.remember(known, [b.block_id for b in blocks])
    pool.free_blocks(reversed(blocks))
    order, advice = queue_of(pool), ranking(known)
    arranger.step(advice)
    assert queue_of(pool) == order
    assert arranger.moved == 0
    # As the blanks run out, the ranking takes effect before the first cached block is reached.
    while pool.get_num_free_blocks() > 20:
        pool.get_new_blocks(min(8, pool.get_num_free_blocks() - 20))
        arranger.step(advice)
    assert keys_in_queue(pool)[:16] == known[:16]


def test_no_advice_changes_nothing_and_is_counted() -> None:
    pool, _, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    order = queue_of(pool)
    for _ in range(3):
        arranger.step(None)
    assert queue_of(pool) == order
    assert arranger.stale == 3


def test_blocks_survive_a_failure_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, keys, index = cached_pool(64)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    find = index.find_unused

    def one_is_not_as_we_know_it(*args: Any) -> Any:
        found = find(*args)
        strange = SimpleNamespace(block_id=1000, block_hash=b"", prev_free_block=None)
        return found._replace(blocks=[*found.blocks[:7], strange, *found.blocks[8:]])

    monkeypatch.setattr(index, "find_unused", one_is_not_as_we_know_it)
    with pytest.raises(AttributeError):
        arranger.step(ranking(keys.tolist()[:30]))
    assert len(queue_of(pool)) == 63


def test_random_traffic_keeps_the_queue_whole() -> None:
    """Requests come, hit, preempt, finish and reset at random under random rankings."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng = random.Random(seed)
    pool = new_pool(96)
    index = BlockIndex(pool)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=12)
    make, running, seen, advice = request_maker(), [], [], None
    for _ in range(1500):
        _traffic(rng, pool, index, make, running, seen)
        if rng.random() < 0.3 and seen:
            picked = rng.choices(seen, k=rng.randrange(1, 60))
            cut = rng.randrange(len(picked) + 1)
            advice = ranking(picked[cut:], picked[:cut]) if rng.random() < 0.9 else None
        _step_and_check(pool, arranger, advice)


def _traffic(
    rng: random.Random, pool: Any, index: BlockIndex, make: Any, running: list[Any], seen: list[int]
) -> None:
    roll = rng.random()
    if roll < 0.5 and pool.get_num_free_blocks() > 12:
        # Prompts share beginnings, so that there are hits and duplicates of a block.
        chosen = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
        request = make([token for token in chosen for _ in range(BLOCK_SIZE)])
        hashes = request.block_hashes
        hits: list[Any] = []
        for block_hash in hashes:
            cached = pool.get_cached_block(block_hash, [0])
            if cached is None or rng.random() < 0.2:
                break
            hits += cached
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(len(hashes) + 1 - len(hits))
        pool.cache_full_blocks(request, blocks, len(hits), len(hashes), BLOCK_SIZE, 0)
        running.append((request, blocks))
    elif roll < 0.95 and running:
        request, blocks = running.pop(rng.randrange(len(running)))
        known = unpack(pack_hashes(request.block_hashes))
        if rng.random() < 0.9:  # else as after a preemption: freed without a word
            index.remember(known, [b.block_id for b in blocks])
        seen += known
        pool.free_blocks(reversed(blocks))
    elif roll > 0.99 and not running:
        pool.reset_prefix_cache()


def _step_and_check(pool: Any, arranger: FreeQueueArranger, advice: Any) -> None:
    before = queue_of(pool)
    state = [(b.block_id, b.ref_cnt, b.block_hash) for b in pool.blocks]
    arranger.step(advice)
    after = queue_of(pool)
    assert sorted(b.block_id for b in after) == sorted(b.block_id for b in before)
    assert [(b.block_id, b.ref_cnt, b.block_hash) for b in pool.blocks] == state
    leading = 0
    while leading < len(before) and before[leading].block_hash is None:
        leading += 1
    assert after[:leading] == before[:leading], "blank blocks keep their place at the head"
