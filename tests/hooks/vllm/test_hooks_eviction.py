"""The free queue stays vLLM's: a permutation, linked both ways, blanks first, nothing touched."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.graph.wire.events import BlocksRemoved, BlocksStored
from kvgraph.hooks.keys import key_in_pool, key_of, pack_hashes, unpack
from kvgraph.hooks.link.client import AdvisorClient
from kvgraph.hooks.link.mailbox import looked_up
from kvgraph.hooks.settings import CORE_VARIABLE
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.free_queue.window import move_behind
from kvgraph.hooks.vllm.index import BlockIndex
from kvgraph.hooks.vllm.meters import PromptDemand
from kvgraph.hooks.vllm.observer import ChangeReporter
from kvgraph_bench.hotpath import (
    BLOCK_SIZE,
    STEP,
    a_ranking,
    cached_pool,
    connected,
    new_pool,
    request_maker,
)
from pool_engine import Engine, prompt
from pool_requests import leave_behind, ranking
from seeded import seeded

pytestmark = pytest.mark.usefixtures("vllm_loaded")


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


def arranged(
    blocks: int, blocks_per_step: int = 8
) -> tuple[Any, list[int], BlockIndex, FreeQueueArranger]:
    """A pool of cached blocks, the tail of a chain first in its queue; keys from the root on."""
    pool, keys, index = cached_pool(blocks)
    return pool, keys.tolist(), index, FreeQueueArranger(pool, index, blocks_per_step)


def keys_in_queue(pool: Any) -> list[int]:
    return [key_in_pool(b.block_hash) for b in queue_of(pool) if b.block_hash is not None]


def test_the_ranking_goes_first_and_its_window_is_refilled_behind_what_is_left_of_it() -> None:
    pool, keys, _, arranger = arranged(64)
    order = random.Random(4).sample(keys, 50)
    advice, evicted = ranking(order), []
    for number in range(10):
        arranger.step(advice)
        assert number or (arranger.moved, arranger.epoch) == (16, 1), "two steps' worth"
        evicted += [key_in_pool(b.block_hash) for b in queue_of(pool)[:5]]
        pool.get_new_blocks(5)
    assert evicted == order[:50]


def test_a_step_without_news_moves_nothing() -> None:
    pool, keys, _, arranger = arranged(64)
    advice = ranking(keys[:30])
    arranger.step(advice)
    moved, order = arranger.moved, queue_of(pool)
    for _ in range(5):
        arranger.step(advice)
    assert arranger.moved == moved
    assert queue_of(pool) == order


def used_since(used: slice) -> tuple[Any, FreeQueueArranger, Any, list[int], list[int]]:
    """A pool with blocks used after the ranking: pool, arranger, advice, keys, and those."""
    now = 1000.0
    pool, keys, index = cached_pool(64, lambda: now)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=4)
    by_key = {key_in_pool(b.block_hash): b for b in queue_of(pool)}
    order = keys.tolist()[:20]
    now = 1010.0
    advice = ranking(order, known_of=now)
    arranger.step(advice)
    now = 1011.0
    back = order[used]
    pool.touch([by_key[key] for key in back])
    arranger.step(advice)
    index.remember(back, [by_key[key].block_id for key in back])
    pool.free_blocks([by_key[key] for key in back])
    return pool, arranger, advice, order, back


def test_a_block_that_was_used_after_the_ranking_stays_where_that_put_it() -> None:
    """What a ranking says of a session is void once the session came back."""
    pool, arranger, advice, order, back = used_since(slice(8, 12))
    evicted = []
    for _ in range(8):
        arranger.step(advice)
        evicted += [key_in_pool(b.block_hash) for b in queue_of(pool)[:2]]
        pool.get_new_blocks(2)
    assert evicted == [key for key in order if key not in back]
    assert keys_in_queue(pool)[-4:] == back
    arranger.step(ranking(back, epoch=2, known_of=1012.0))  # a later one knows
    assert keys_in_queue(pool)[:4] == back


def test_a_block_of_the_window_that_was_used_since_leaves_it() -> None:
    pool, arranger, advice, _, back = used_since(slice(5, 8))  # they stand in the window
    for _ in range(3):
        pool.get_new_blocks(4)
        arranger.step(advice)
    assert keys_in_queue(pool)[-3:] == back


def test_an_evicted_protected_block_is_counted_once() -> None:
    _, keys, _, arranger = arranged(64)
    for epoch in (1, 2):
        arranger.step(ranking(protected=keys[:4], epoch=epoch))
    arranger.evicted([keys[0], keys[20]])
    assert arranger.protected_evicted == 1


def test_referenced_recycled_and_unknown_blocks_are_left_alone() -> None:
    pool, keys, _, arranger = arranged(64, 16)
    by_key = {key_in_pool(b.block_hash): b for b in queue_of(pool)}
    referenced, recycled, free = keys[:3]
    pool.touch([by_key[referenced]])
    pool.evict_blocks({by_key[recycled].block_id})
    before = queue_of(pool)
    arranger.step(ranking([referenced, recycled, 12345, free]))
    assert by_key[referenced] not in queue_of(pool)
    assert by_key[referenced].ref_cnt == 1
    assert keys_in_queue(pool)[0] == free
    assert (arranger.moved, arranger.recycled) == (1, 3)
    assert sorted(b.block_id for b in queue_of(pool)) == sorted(b.block_id for b in before)


def test_blank_blocks_stay_ahead() -> None:
    pool, keys, _, arranger = arranged(64)
    blanks = pool.get_new_blocks(5)
    pool.free_blocks(blanks)
    arranger.step(ranking(keys[:20]))
    queue = queue_of(pool)
    assert queue[:5] == blanks
    assert [key_in_pool(b.block_hash) for b in queue[5:15]] == keys[:10]


def test_without_pressure_nothing_is_done() -> None:
    pool = new_pool(512)
    index = BlockIndex(pool)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=8)
    request = request_maker()(list(range(20 * BLOCK_SIZE)))
    known = unpack(pack_hashes(request.block_hashes))
    index.remember(known, [block.block_id for block in leave_behind(pool, request)])
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
    pool, _, _, arranger = arranged(64)
    order = queue_of(pool)
    for _ in range(3):
        arranger.step(None)
    assert queue_of(pool) == order
    assert arranger.stale == 3


def test_blocks_survive_a_failure_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, keys, index, arranger = arranged(64)
    find = index.find_unused

    def one_is_not_as_we_know_it(*args: Any) -> Any:
        found = find(*args)
        strange = SimpleNamespace(block_id=1000, block_hash=b"", prev_free_block=None)
        return found._replace(blocks=[*found.blocks[:7], strange, *found.blocks[8:]])

    monkeypatch.setattr(index, "find_unused", one_is_not_as_we_know_it)
    with pytest.raises(AttributeError):
        arranger.step(ranking(keys[:30]))
    assert len(queue_of(pool)) == 63


def test_random_traffic_keeps_the_queue_whole() -> None:
    """Requests come, hit, preempt, finish and reset at random under random rankings."""
    rng = seeded()
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


BLOCKS = 4001
MOST = 1500  # blocks that a step could take


def busy(usual: int, taken: bool = True) -> tuple[Any, Any, BlockIndex, FreeQueueArranger]:
    """A large pool; a step could take ``MOST`` blocks, and took so many of late, or was to."""
    pool, keys, index = cached_pool(BLOCKS)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    for _ in range(400):
        arranger.expect(usual, 0)
        arranger.step_ended(usual if taken else 0)
    return pool, keys, index, arranger


def take(arranger: FreeQueueArranger, pool: Any, index: Any, count: int) -> list[int]:
    """A step takes blocks and gives them back, blank; the keys that they had."""
    hashes = [b.block_hash for b in pool.free_block_queue.get_all_free_blocks()[:count]]
    blocks = pool.get_new_blocks(count)
    gone = [each for each in hashes if each is not None]
    keys = list(map(key_in_pool, gone))
    arranger.evicted(index.forget(gone, keys))
    arranger.step_ended(len(gone))
    for block in blocks:
        block.ref_cnt = 0
    pool.free_block_queue.append_n(blocks)
    return keys


def head_of(pool: Any, count: int) -> list[int]:
    """Keys of the next blocks to go."""
    return [key_in_pool(b.block_hash) for b in pool.free_block_queue.get_all_free_blocks()[:count]]


def test_a_new_ranking_moves_what_a_few_steps_take() -> None:
    _, keys, _, arranger = busy(64, taken=False)
    arranger.step(a_ranking(keys[::-1].copy()))
    assert 64 <= arranger.moved <= 512, "and not two steps of 1,500"


def test_a_prompt_that_was_looked_up_finds_as_many_victims_as_it_takes() -> None:
    pool, keys, index, arranger = busy(64, taken=False)
    order = np.random.default_rng(3).permutation(keys)
    ranking = a_ranking(order)
    arranger.step(ranking)
    assert arranger.expect(64, 1000), "it reaches further than what is ready"
    arranger.step(ranking)
    assert set(take(arranger, pool, index, 1000)) == set(order[:1000].tolist())


def test_a_step_larger_than_any_of_late_takes_nothing_protected() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    advice = a_ranking(keys[:0], protected=keys[-1200:])  # at the queue's head
    for _ in range(100):
        arranger.expect(64, 0)
        arranger.step_ended(0)
        arranger.step(None, advice)
    arranger.expect(64, 1400)
    arranger.guard_head()
    take(arranger, pool, index, 1464)
    assert arranger.protected_evicted == 0


def test_an_engine_that_foresees_nothing_looks_at_a_few_blocks_all_the_same() -> None:
    pool, keys, _, arranger = arranged(65, MOST)
    pool.get_new_blocks(64)
    arranger.expect(0, 0)
    arranger.step(None, ranking(protected=keys[:8]))
    assert arranger.protected_evicted == 0


def test_what_a_prompt_needs_is_counted_until_it_is_computed() -> None:
    make, demand = request_maker(), PromptDemand(BLOCK_SIZE)
    request = make(list(range(10 * BLOCK_SIZE)))
    demand.looked_up(request, 2 * BLOCK_SIZE)
    assert demand.prompts == 9
    demand.looked_up(request, 2 * BLOCK_SIZE)
    assert demand.prompts == 9, "looked up again, as in every step that it waits"
    demand.cached([(request, [], 2, 6)])
    assert demand.prompts == 5
    demand.cached([(request, [], 6, 10)])
    assert demand.prompts == 0
    demand.looked_up(make(list(range(64))), 0)
    demand.finished("request-1")
    assert demand.prompts == 0


def test_each_ranking_lays_what_the_next_step_can_take_and_little_more() -> None:
    pool, keys, index, arranger = busy(40)
    for epoch in range(1, 20):
        before = arranger.moved
        order = np.random.default_rng(epoch).permutation(keys)
        ranking = a_ranking(order, epoch)
        for _ in range(8):
            arranger.step(ranking)
        assert 40 <= arranger.moved - before <= 256, "though no step took any"
    assert take(arranger, pool, index, 40) == order[:40].tolist()


def test_victims_whose_copies_are_made_ahead_are_laid_a_part_in_each_step() -> None:
    pool, keys, index, arranger = busy(40)
    copier = SimpleNamespace(touched=len, gone=len, laid_more=lambda victims, at_head: None)
    arranger.copies_first(copier)
    order = np.random.default_rng(4).permutation(keys)
    ranking, before = a_ranking(order), 0
    for _ in range(8):
        arranger.step(ranking)
        assert arranger.moved - before <= 256, "and not all that a window holds"
        before = arranger.moved
    assert arranger.moved == 512
    assert take(arranger, pool, index, 512) == order[:512].tolist()


def test_victims_that_stand_already_are_not_looked_for_again() -> None:
    pool, keys, index, arranger = busy(100)
    arranger.copies_first(SimpleNamespace(touched=len, laid_more=lambda victims, at_head: None))
    order = np.random.default_rng(5).permutation(keys)
    arranger.step(looked_up(a_ranking(order), index.holders))
    asked: list[int] = []
    find = index.find_unused
    index.find_unused = lambda keys, *rest: asked.extend(keys.tolist()) or find(keys, *rest)
    arranger.step(looked_up(a_ranking(order.copy(), epoch=2), index.holders))
    assert asked
    assert set(order[:200].tolist()).isdisjoint(asked), "two steps' victims are carried over"
    assert head_of(pool, 300) == order[:300].tolist()


def test_after_a_rest_too_victims_that_may_have_copies_go_first() -> None:
    pool, keys, _, arranger = busy(100)
    arranger.copies_first(SimpleNamespace(touched=len, laid_more=lambda victims, at_head: None))
    first = np.random.default_rng(6).permutation(keys)
    arranger.step(a_ranking(first))
    later = a_ranking(first[::-1].copy(), epoch=2)
    arranger.step(replace(later, ts=later.ts + 100.0))
    assert head_of(pool, 300) == [*first[:200].tolist(), *first[:-101:-1].tolist()]


def test_victims_that_were_found_when_the_ranking_arrived_are_checked_all_the_same() -> None:
    pool, keys, index, arranger = busy(40)
    held = looked_up(a_ranking(keys.copy()), index.holders)
    assert held.order_blocks is not None
    assert (held.order_blocks > 0).all()
    recycled, in_use = (index.find(key) for key in keys[:2].tolist())
    pool.evict_blocks({recycled.block_id})
    pool.touch([in_use])
    arranger.step(held)
    assert head_of(pool, 100) == keys[2:102].tolist()


def test_a_hit_on_blocks_in_use_changes_nothing_at_the_head() -> None:
    pool, keys, index, arranger = busy(64)
    arranger.step(a_ranking(keys[::-1].copy()))
    blocks = [index.find(key) for key in keys[-300:].tolist()]
    pool.touch(blocks)
    pool.touch(blocks)
    looks: list[object] = []
    pool.free_block_queue.iter_blocks_after = looks.append
    arranger.touched(blocks)
    assert not looks


@pytest.mark.parametrize("noted_first", [False, True])
def test_what_a_step_changed_is_worked_through_when_it_is_told(
    noted_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORE_VARIABLE, "python")
    worked: list[object] = []
    work = ChangeReporter.events
    monkeypatch.setattr(
        ChangeReporter, "events", lambda *given: worked.append(given) or work(*given)
    )
    pool, make = new_pool(9), request_maker()
    connector = connected(pool)
    requests = [make([number, *range(6 * BLOCK_SIZE - 1)]) for number in (0, 1)]
    for request in requests:
        leave_behind(pool, request)
        connector.build_connector_meta(STEP)
    assert not worked, "the step itself only keeps them"
    if noted_first:  # as where the engine's thread must find a key
        connector.side.index.catch_up()
    stored, again, removed = connector.side.client.outbox.take_all()
    assert len(worked) == 2
    assert stored.hashes == pool_keys(requests[0].block_hashes)
    assert again.hashes == pool_keys(requests[1].block_hashes)
    assert removed.hashes == pool_keys(reversed(requests[0].block_hashes[2:]))
    keys = np.frombuffer(stored.hashes + again.hashes, dtype="<u8").astype(np.uint64)
    here = [at > 0 for at in connector.side.index.holders(keys)]
    assert here == [True] * 2 + [False] * 4 + [True] * 6


def test_changes_that_nobody_is_told_of_are_noted_all_the_same() -> None:
    pool, make = new_pool(9), request_maker()
    connector = connected(pool)
    connector.side.client.outbox.shut()  # as without a sidecar
    request = make(list(range(4 * BLOCK_SIZE)))
    blocks = leave_behind(pool, request)
    connector.build_connector_meta(STEP)
    found = [connector.side.index.find(key_of(each)) for each in request.block_hashes]
    assert found == blocks


def test_blocks_that_follow_one_another_are_moved_as_one_in_any_order() -> None:
    rng = seeded()
    pool, _, _ = cached_pool(41)
    queue = pool.free_block_queue
    for _ in range(400):
        free = queue.get_all_free_blocks()
        place = rng.choice([queue.fake_free_list_head, *free])
        rest = [block for block in free if block is not place]
        start, cut = rng.randrange(len(rest)), rng.randrange(1, 9)
        moved = rest[start : start + cut] + rng.sample(rest[:start], min(start, rng.randrange(5)))
        move_behind(place, moved)
        others = [block for block in free if block not in moved]
        at = others.index(place) + 1 if place in others else 0
        expected = others[:at] + moved + others[at:]
        assert queue.get_all_free_blocks() == expected
        backwards, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            backwards.append(block)
            block = block.prev_free_block
        assert backwards[::-1] == expected


def test_what_is_evicted_and_cached_again_in_one_step_is_told_as_back() -> None:
    pool, make = new_pool(9), request_maker()
    connector = connected(pool)
    requests = [make([number, *range(4 * BLOCK_SIZE - 1)]) for number in (0, 1, 0)]
    for request in requests:
        blocks = pool.get_new_blocks(4 if request is not requests[2] else 8)
        pool.cache_full_blocks(request, blocks[:4], 0, 4, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))
    connector.build_connector_meta(STEP)
    events = connector.side.client.outbox.take_all()
    assert [type(each) for each in events[:3]] == [BlocksStored] * 3
    first, second, _ = (request.block_hashes for request in requests)
    assert [(type(each), each.hashes) for each in events[3:]] == [
        (BlocksRemoved, pool_keys([*reversed(second), *first])), (BlocksStored, pool_keys(first)),
    ]  # fmt: skip


def pool_keys(hashes: Iterable[bytes]) -> bytes:
    return b"".join(each[:-9:-1] for each in hashes)


def test_marks_are_made_where_the_ranking_arrives() -> None:
    client = AdvisorClient("ipc:///nowhere", SimpleNamespace())  # type: ignore[arg-type]
    keys = np.arange(9, dtype="<u8")
    named = {"protected": keys[:3], "spill_first": keys[:2:-1]}
    client.put(replace(EvictionRanking.empty(time.monotonic()), epoch=1, **named))
    held = client.ranking()
    assert held.spill_keys.tolist() == list(range(3, 9))
    assert held.protected_places == {0: 0, 1: 1, 2: 2}


def test_spills_begun_in_a_step_follow_what_a_step_takes() -> None:
    """At most 64 were begun while one prompt of 16k tokens took a thousand blocks."""
    engine = Engine(blocks=1301, warm=4000)
    for seed in range(20):
        turn = engine.ask(prompt(400, seed))
        engine.step()
        engine.worker.finish_all()
        engine.end(turn)
        counts = engine.counts  # whatever left is noted, as by the client's thread
    assert counts.spilled / (counts.spilled + counts.spill_lost) >= 0.9
