"""What a step pays follows what steps do, and not what a configuration would allow them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking, RankingMessage
from kvgraph.graph.wire.events import BlocksRemoved, BlocksStored
from kvgraph.hooks.keys import key_of
from kvgraph.hooks.link.client import AdvisorClient
from kvgraph.hooks.link.mailbox import HeldRanking, places_of, worth_of
from kvgraph.hooks.settings import CORE_VARIABLE
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.free_queue.window import move_behind
from kvgraph.hooks.vllm.meters import PromptDemand
from kvgraph.hooks.vllm.observer import ChangeReporter
from kvgraph_bench.hotpath import BLOCK_SIZE, STEP, cached_pool, connected, new_pool, request_maker
from pool_engine import Engine, prompt

pytestmark = pytest.mark.usefixtures("vllm_loaded")
BLOCKS = 4001
MOST = 1500  # blocks that a step could take


def ranked(keys: Any, epoch: int = 1, protected: Any = ()) -> EvictionRanking:
    none = np.empty(0, dtype=np.uint64)
    protected = np.array(protected, dtype=np.uint64)
    return EvictionRanking(epoch, time.monotonic() + 1e6, keys, protected, none, none)


def take(arranger: FreeQueueArranger, pool: Any, index: Any, count: int) -> list[bytes]:
    """A step takes blocks and gives them back, blank."""
    hashes = [b.block_hash for b in pool.free_block_queue.get_all_free_blocks()[:count]]
    blocks = pool.get_new_blocks(count)
    gone = [each for each in hashes if each is not None]
    keys = [int.from_bytes(each[-12:-4], "big") for each in gone]
    arranger.evicted(index.forget(gone, keys))
    arranger.step_ended(len(gone))
    pool.free_block_queue.append_n([pool_free(block) for block in blocks])
    return gone


def pool_free(block: Any) -> Any:
    block.ref_cnt = 0
    return block


def test_a_new_ranking_moves_what_a_few_steps_take() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    for _ in range(400):
        arranger.expect(64, 0)
        arranger.step_ended(0)
    arranger.step(ranked(keys[::-1].copy()))
    assert 64 <= arranger.moved <= 512, "and not two steps of 1,500"


def test_a_prompt_that_was_looked_up_finds_as_many_victims_as_it_takes() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    for _ in range(400):
        arranger.expect(64, 0)
        arranger.step_ended(0)
    order = np.random.default_rng(3).permutation(keys)
    ranking = ranked(order)
    arranger.step(ranking)
    assert arranger.expect(64, 1000), "it reaches further than what is ready"
    arranger.step(ranking)
    gone = {int.from_bytes(each[-12:-4], "big") for each in take(arranger, pool, index, 1000)}
    assert gone == set(order[:1000].tolist())


def test_a_step_larger_than_any_of_late_takes_nothing_protected() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    precious = keys[-1200:].tolist()  # at the queue's head
    advice = ranked(keys[:0], protected=precious)
    for _ in range(100):
        arranger.expect(64, 0)
        arranger.step_ended(0)
        arranger.step(None, advice)
    arranger.expect(64, 1400)
    arranger.guard_head()
    take(arranger, pool, index, 1464)
    assert arranger.protected_evicted == 0


def test_an_engine_that_foresees_nothing_looks_at_a_few_blocks_all_the_same() -> None:
    pool, keys, index = cached_pool(65)
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    pool.get_new_blocks(64)
    arranger.expect(0, 0)
    arranger.step(None, ranked(keys[:0], protected=keys[:8].tolist()))
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


def busy_arranger(pool: Any, index: Any, usual: int) -> FreeQueueArranger:
    """One whose steps took so many blocks of late."""
    arranger = FreeQueueArranger(pool, index, blocks_per_step=MOST)
    for _ in range(400):
        arranger.expect(usual, 0)
        arranger.step_ended(usual)
    return arranger


def test_each_ranking_lays_what_the_next_step_can_take_and_little_more() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = busy_arranger(pool, index, 40)
    for epoch in range(1, 20):
        before = arranger.moved
        order = np.random.default_rng(epoch).permutation(keys)
        ranking = ranked(order, epoch)
        for _ in range(8):
            arranger.step(ranking)
        assert 40 <= arranger.moved - before <= 256, "though no step took any"
    gone = take(arranger, pool, index, 40)
    assert [int.from_bytes(each[-12:-4], "big") for each in gone] == order[:40].tolist()


def test_victims_whose_copies_are_made_ahead_are_laid_a_part_in_each_step() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = busy_arranger(pool, index, 40)
    copier = SimpleNamespace(touched=len, gone=len, laid_more=lambda victims, at_head: None)
    arranger.copies_first(copier)
    order = np.random.default_rng(4).permutation(keys)
    ranking, before = ranked(order), 0
    for _ in range(8):
        arranger.step(ranking)
        assert arranger.moved - before <= 256, "and not all that a window holds"
        before = arranger.moved
    assert arranger.moved == 512
    gone = take(arranger, pool, index, 512)
    assert [int.from_bytes(each[-12:-4], "big") for each in gone] == order[:512].tolist()


def test_victims_that_stand_already_are_not_looked_for_again() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = busy_arranger(pool, index, 100)
    arranger.copies_first(SimpleNamespace(touched=len, laid_more=lambda victims, at_head: None))
    order = np.random.default_rng(5).permutation(keys)
    arranger.step(HeldRanking.of(ranked(order), index.holders))
    asked: list[int] = []
    find = index.find_unused
    index.find_unused = lambda keys, *rest: asked.extend(keys.tolist()) or find(keys, *rest)
    arranger.step(HeldRanking.of(ranked(order.copy(), epoch=2), index.holders))
    assert asked
    assert set(order[:200].tolist()).isdisjoint(asked), "two steps' victims are carried over"
    head = pool.free_block_queue.get_all_free_blocks()[:300]
    assert [int.from_bytes(b.block_hash[-12:-4], "big") for b in head] == order[:300].tolist()


def test_after_a_rest_too_victims_that_may_have_copies_go_first() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = busy_arranger(pool, index, 100)
    arranger.copies_first(SimpleNamespace(touched=len, laid_more=lambda victims, at_head: None))
    first = np.random.default_rng(6).permutation(keys)
    arranger.step(ranked(first))
    later = ranked(first[::-1].copy(), epoch=2)
    arranger.step(replace(later, ts=later.ts + 100.0))
    head = pool.free_block_queue.get_all_free_blocks()[:300]
    placed = [int.from_bytes(b.block_hash[-12:-4], "big") for b in head]
    assert placed == [*first[:200].tolist(), *first[:-101:-1].tolist()]


def test_victims_that_were_found_when_the_ranking_arrived_are_checked_all_the_same() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = busy_arranger(pool, index, 40)
    held = HeldRanking.of(ranked(keys.copy()), index.holders)
    assert held.blocks is not None
    assert (held.blocks > 0).all()
    recycled, in_use = (index.find(key) for key in keys[:2].tolist())
    pool.evict_blocks({recycled.block_id})
    pool.touch([in_use])
    arranger.step(held)
    head = pool.free_block_queue.get_all_free_blocks()
    assert [int.from_bytes(b.block_hash[-12:-4], "big") for b in head[:100]] == keys[2:102].tolist()


def test_a_hit_on_blocks_in_use_changes_nothing_at_the_head() -> None:
    pool, keys, index = cached_pool(BLOCKS)
    arranger = busy_arranger(pool, index, 64)
    arranger.step(ranked(keys[::-1].copy()))
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
        blocks = pool.get_new_blocks(6)
        pool.cache_full_blocks(request, blocks, 0, 6, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))
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
    assert [at > 0 for at in connector.side.index.holders(keys)] == [True] * 2 + [False] * 4 + [
        True
    ] * 6


def test_changes_that_nobody_is_told_of_are_noted_all_the_same() -> None:
    pool, make = new_pool(9), request_maker()
    connector = connected(pool)
    connector.side.client.outbox.shut()  # as without a sidecar
    request = make(list(range(4 * BLOCK_SIZE)))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, 0, 4, BLOCK_SIZE, 0)
    pool.free_blocks(reversed(blocks))
    connector.build_connector_meta(STEP)
    found = [connector.side.index.find(key_of(each)) for each in request.block_hashes]
    assert found == blocks


def test_blocks_that_follow_one_another_are_moved_as_one_in_any_order() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng = random.Random(seed)
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
    assert [(type(each), each.hashes) for each in events[3:]] == [
        (
            BlocksRemoved,
            pool_keys([*reversed(requests[1].block_hashes), *requests[0].block_hashes]),
        ),
        (BlocksStored, pool_keys(requests[0].block_hashes)),
    ]


def pool_keys(hashes: Iterable[bytes]) -> bytes:
    return b"".join(each[:-9:-1] for each in hashes)


def test_marks_are_made_where_the_ranking_arrives() -> None:
    client = AdvisorClient("ipc:///nowhere", SimpleNamespace())  # type: ignore[arg-type]
    keys = np.arange(9, dtype="<u8")
    client.put(RankingMessage(1, 0.0, b"", keys[:3].tobytes(), keys[3:].tobytes()))
    held = client.ranking()
    assert isinstance(held, HeldRanking)
    assert worth_of(held) is held.worth == set(range(3, 9))
    assert places_of(held) is held.places == {0: 0, 1: 1, 2: 2}


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
