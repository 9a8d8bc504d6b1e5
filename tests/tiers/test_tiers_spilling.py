"""What is copied before it is evicted, what is demoted to disk, and what makes room."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace

import pytest
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.events import CopiesDropped
from kvgraph.hooks.tiers.jobs import Demote, Load, Spill, TierAnswer, TierWork, WorkerStart
from kvgraph.hooks.vllm.tiers.spiller import Spiller, StepTaken
from kvgraph_bench.hotpath import BLOCK_SIZE
from pool_engine import Engine, Turn, counted_walks, keys, parked, picture, prompt
from seeded import seeded

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_a_block_that_a_request_holds_is_never_spilled() -> None:
    engine = Engine()
    held = engine.ask(prompt(4, 1))
    engine.finish_loading(held)
    for number in range(6):
        engine.serve(prompt(3, 2 + number))
    assert not any(block_hash in engine.directory for block_hash in held.request.block_hashes)
    engine.end(held)
    engine.settle()
    engine.push_out()
    assert all(block_hash in engine.directory for block_hash in held.request.block_hashes)


def test_a_spill_is_void_even_if_the_same_content_came_back_into_its_block() -> None:
    """Evicted, overwritten half way, filled again with the very same prompt: still not a copy."""
    engine = Engine(blocks=6)
    turn = engine.ask(prompt(4, 1))
    engine.step()
    engine.end(turn)
    engine.step()
    (spill,) = engine.worker.open
    before = [block.block_hash for block in engine.pool.blocks[1:]]
    blocks = engine.pool.get_new_blocks(5)
    engine.pool.cache_full_blocks(turn.request, blocks[::-1][:4], 0, 4, BLOCK_SIZE, 0)
    for at, block in enumerate(blocks[::-1][:4]):
        engine.memory[block.block_id] = (turn.request.block_hashes[at], engine.weights)
    assert sorted(filter(None, before)) == sorted(
        filter(None, (block.block_hash for block in engine.pool.blocks[1:]))
    )
    engine.pool.free_blocks(blocks)
    engine.worker.finish(spill)
    engine.update()
    assert engine.counts.spilled == 0
    assert engine.directory.warm_blocks == 0


def test_what_is_not_worth_a_copy_gets_none_and_the_saving_is_counted() -> None:
    engine = Engine()
    engine.advise(spill_first=engine.keys_of(prompt(4, 1)))
    one, two = engine.serve(prompt(4, 1)), engine.serve(prompt(4, 2))
    engine.push_out()
    assert all(h in engine.directory for h in one.request.block_hashes)
    assert not any(h in engine.directory for h in two.request.block_hashes)
    assert engine.counts.passed_over >= 4
    everything = Engine(spill_all=True)
    everything.advise(spill_first=[])
    everything.serve(prompt(4, 1))
    everything.push_out()
    assert everything.counts.passed_over == 0
    assert everything.counts.spilled >= 4


def test_what_was_passed_over_is_copied_once_advice_asks_for_it() -> None:
    engine = Engine()
    engine.advise(spill_first=[])
    turn = engine.serve(prompt(4, 1))
    engine.settle()
    assert not any(each in engine.directory for each in turn.request.block_hashes)
    engine.advise(spill_first=engine.keys_of(prompt(4, 1)))
    engine.step()
    engine.settle()
    assert all(each in engine.directory for each in turn.request.block_hashes)


def finished(engine: Engine, seed: int, adapter: bool = False, image: str = "") -> Turn:
    """A request of an adapter or of the model itself, from its arrival to its end; an ``image`` of
    that identifier is in its third block.
    """
    turn = engine.ask(prompt(4, seed))
    if adapter:
        turn.request.lora_request = SimpleNamespace(lora_name="tuned", lora_path="/tuned")
    if image:
        turn.request.mm_features = [picture(image, 2 * BLOCK_SIZE + 3)]
    engine.finish_loading(turn)
    engine.end(turn)
    return turn


def test_a_failed_spill_is_counted_and_gives_its_room_back() -> None:
    engine = Engine(warm=4)
    engine.serve(prompt(4, 1))
    for number in range(20):
        turn = engine.ask(prompt(4, 2 + number))
        engine.step()
        engine.worker.finish_all(failed=range(64))
        engine.end(turn)
        engine.step()
    engine.worker.finish_all(failed=range(64))
    engine.settle()
    assert engine.counts.spill_failed > 0
    assert engine.counts.spill_lost > 0
    engine.directory.voided.take()
    while engine.busy:
        engine.worker.finish_all()
        engine.step()
    assert engine.directory.room + engine.directory.warm_blocks == 4


def test_after_a_copy_that_failed_none_is_begun_for_a_second() -> None:
    """By the engine's clock, and not longer: what is evicted meanwhile is lost."""
    engine = Engine(blocks=33)
    engine.serve(prompt(4, 1))
    while not engine.counts.spill_failed:
        engine.end(ask_and_step(engine))
        engine.worker.finish_all(failed=range(64))
    failed_at = engine.now
    while not engine.worker.open:
        engine.end(ask_and_step(engine))
    assert 1.0 <= engine.now - failed_at < 1.5
    engine.settle()
    engine.check_whole()


def ask_and_step(engine: Engine) -> Turn:
    turn = engine.ask(prompt(4, round(1000 * engine.now)))
    engine.step()
    return turn


def test_full_memory_gives_up_what_the_advice_says_first() -> None:
    engine = Engine(warm=8)
    all_keys = [engine.keys_of(prompt(4, seed)) for seed in (1, 2, 3)]
    engine.advise(spill_first=list(chain(*all_keys)))
    one, two = engine.serve(prompt(4, 1)), engine.serve(prompt(4, 2))
    engine.push_out()
    assert engine.directory.warm_blocks == 8
    engine.advise(spill_first=list(chain(*all_keys)), demote_first=all_keys[1][::-1])
    three = engine.serve(prompt(4, 3))
    engine.push_out()
    kept = [all(h in engine.directory for h in turn.request.block_hashes) for turn in (one, three)]
    assert kept == [True, True]
    assert not any(h in engine.directory for h in two.request.block_hashes)
    assert engine.counts.dropped == 4
    dropped = [event for event in engine.events if isinstance(event, CopiesDropped)]
    assert dropped


def test_a_record_that_cannot_be_read_is_computed_and_forgotten() -> None:
    engine = Engine(warm=16, cold=64)
    first = engine.serve(prompt(6, 1))
    engine.push_out()
    engine.push_out()
    cold = [h for h in first.request.block_hashes if engine.directory.warm(h) is None]
    assert cold
    del engine.worker.disk[cold[0]]
    again = engine.ask([*prompt(6, 1), 9])
    engine.finish_loading(again)
    assert again.hits + again.loaded == list(first.request.block_hashes).index(cold[0])
    assert engine.counts.load_failed == 1
    assert not engine.directory.is_cold(cold[0])
    engine.finish_whole(again)


def test_a_full_disk_keeps_to_its_capacity_and_reads_what_it_says_it_has() -> None:
    engine = Engine(warm=8, cold=8)
    for number in range(20):
        engine.serve(prompt(4, number))
        assert engine.directory.cold_blocks <= 8
    assert engine.counts.demoted > 8
    assert set(engine.directory.cold_hashes()) == set(engine.worker.disk)


def test_the_first_request_waits_for_the_disks_and_not_for_ever() -> None:
    engine = Engine(cold=8, started=False)
    turn = engine.ask(prompt(3, 1))
    engine.step()
    assert turn.state == "waiting"
    hashes = tuple(turn.request.block_hashes)
    engine.bridge.answered(TierAnswer(starts=(WorkerStart(32, 8, hashes),)))
    engine.worker.disk = {h: (h, 0) for h in turn.request.block_hashes}
    engine.finish_loading(turn)
    assert turn.loaded == 3
    silent = Engine(cold=8, started=False)
    lonely = silent.ask(prompt(3, 2))
    for _ in range(100):
        silent.step()
    assert lonely.state == "running"


def test_what_all_workers_still_have_is_found_at_the_start() -> None:
    engine = Engine(cold=8, workers=2, started=False)
    bridge, hashes = engine.bridge, engine.hashes_of(prompt(3, 1))
    bridge.answered(TierAnswer(starts=(WorkerStart(32, 8, tuple(hashes[:2])),)))
    assert engine.directory.cold_blocks == 0
    bridge.answered(TierAnswer(starts=(WorkerStart(32, 8, tuple(hashes[1:])),)))
    assert engine.directory.cold_hashes() == [hashes[1]]
    bridge.answered(TierAnswer(starts=(WorkerStart(32, 8, (hashes[0],)),)))
    assert engine.directory.cold_hashes() == [hashes[1]], "said once, at the start"


def test_records_that_are_told_after_a_reset_are_of_older_weights_and_erased() -> None:
    """Trainers load new weights before the first request, so before any worker said a word."""
    engine = Engine(cold=8, started=False)
    bridge, hashes = engine.bridge, engine.hashes_of(prompt(3, 1))
    assert engine.reset()
    for catch_up in engine.calls.catch_up:
        catch_up()  # a step's output arrives
    engine.hear(TierAnswer(starts=(WorkerStart(32, 8, tuple(hashes)),)))
    assert engine.directory.cold_blocks == 0
    assert set(bridge.outstanding().erase) == set(hashes)


def test_nothing_is_planned_with_memory_that_one_of_the_workers_does_not_have() -> None:
    """Of uneven pipeline stages the largest holds the fewest blocks, in memory and on disk."""
    engine = Engine(cold=64, workers=3, started=False)
    bridge = engine.bridge
    starts = (WorkerStart(30, 64, ()), WorkerStart(22, 64, ()), WorkerStart(30, 0, ()))
    bridge.answered(TierAnswer(starts=starts))
    assert engine.directory.warm_capacity == 22
    assert engine.directory.cold_capacity == 0, "one has no disk: no copy goes there"


def test_without_a_word_from_the_workers_nothing_is_copied() -> None:
    engine = Engine(started=False)
    engine.serve(prompt(4, 1))
    engine.push_out()
    assert engine.counts.spilled == engine.counts.spill_failed == 0


def test_what_an_adapter_computed_never_reaches_the_disk() -> None:
    """It may be trained on under the same name: its blocks are not to be found by a next engine."""
    engine = Engine(blocks=12, warm=8, cold=64)
    for number in range(8):
        finished(engine, number, adapter=number % 2 == 1)
        engine.settle()
    adapted = {h for seed in range(1, 8, 2) for h in engine.hashes_of(prompt(4, seed))}
    assert engine.counts.demoted > 0
    assert engine.counts.dropped > 0, "in memory they were"
    assert not adapted & set(engine.worker.disk)
    assert not adapted & set(engine.directory.cold_hashes())


def test_what_a_client_names_is_not_on_disk_for_another_to_find() -> None:
    """A picture's own id may be another picture's the next time; a digest is of its content."""
    engine = Engine(blocks=12, warm=8, cold=64)
    for number in range(12):
        finished(engine, number, image=("", "0f" * 32, "screenshot")[number % 3])
        engine.settle()
    engine.push_out()
    engine.settle()
    disk = set(engine.worker.disk)
    named = [engine.hashes_of(prompt(4, seed)) for seed in range(2, 12, 3)]
    assert not disk & {h for hashes in named for h in hashes[2:]}
    assert disk & {h for hashes in named for h in hashes[:2]}, "before it stands plain text"
    assert disk & {h for seed in range(1, 12, 3) for h in engine.hashes_of(prompt(4, seed))[2:]}


def test_what_an_adapter_computed_stays_off_the_disk_after_a_prefetch() -> None:
    engine = Engine(blocks=17, warm=32, cold=64)
    turn = finished(engine, 1, adapter=True)
    engine.settle()
    engine.push_out()
    assert not engine.bridge.ledger.kept_off_disk, "what left the pool is forgotten"
    engine.advise(keys(turn))
    engine.step()
    engine.worker.finish_all()
    engine.advise()
    engine.settle()
    assert engine.bridge.ledger.kept_off_disk == set(keys(turn))
    engine.bridge.ledger.give_up([engine.directory.warm(h) for h in turn.request.block_hashes])
    engine.push_out()
    engine.bridge.ledger.make_room(32, turn.request.block_hashes)
    engine.settle()
    assert not set(turn.request.block_hashes) & set(engine.worker.disk)
    assert engine.reset()
    assert not engine.bridge.ledger.kept_off_disk


def test_a_write_to_the_disk_keeps_no_engine_awake() -> None:
    """Where the disk hangs, the engine would never be idle: no pause, no sleep, no shutdown."""
    engine = Engine(warm=8, cold=64)
    for number in range(5):
        finished(engine, number)
        for _ in range(4):
            engine.step()
            engine.worker.finish_all(Spill)
    engine.step()
    assert [type(job) for job in engine.worker.open] == [Demote] * len(engine.worker.open)
    assert engine.worker.open
    assert not engine.busy
    engine.settle()


def test_pool_and_memory_hold_different_blocks() -> None:
    """Sessions in turn, more than the pool holds, fit into both; but not if memory is plain LRU."""
    computed = {}
    for plain in (False, True):
        engine = Engine(blocks=257, warm=128, spill_all=plain)
        sessions = range(42)  # 336 blocks
        for seed in sessions:
            engine.serve(prompt(8, seed))
        computed[plain] = sum(engine.serve(prompt(8, seed)).computed for seed in sessions)
    assert computed[False] <= 8
    assert computed[True] >= 84


def test_what_is_about_to_leave_keeps_its_copy() -> None:
    engine = Engine(blocks=65, warm=64)
    first = parked(engine, blocks=8)
    back = engine.ask(prompt(8, 1))
    engine.finish_loading(back)
    assert back.loaded == 8
    directory = engine.directory
    assert all(directory.stands_twice(h) for h in first.request.block_hashes)
    engine.end(back)
    for number in range(6):
        engine.serve(prompt(8, 2 + number))
    assert not any(directory.stands_twice(h) for h in first.request.block_hashes)
    assert all(h in directory for h in first.request.block_hashes)


def test_who_never_copies_looks_at_a_bounded_stretch_of_the_queue_in_each_step() -> None:
    """After steps of 16,000 tokens, 3,000 blocks ahead were looked at in each decode step."""
    engine = Engine(blocks=6001, warm=6000)
    spiller = Spiller(engine.pool, engine.bridge.ledger, engine.side.index.holders, spill_all=False)
    looked = counted_walks(engine.pool)
    for tokens in (16_384, *[16] * 400):
        before = len(looked)
        spiller.step(None, 1 + tokens // BLOCK_SIZE, 0, 0, StepTaken(tokens))
        most = 1024 if before else 8 + 3 * 1025
        assert len(looked) - before <= most, "blank blocks, until the queue's end"
    assert len(looked) <= 6000, "each of them once"


def test_the_workers_are_told_of_a_reset_before_anything_new_reaches_a_disk() -> None:
    engine, told = Engine(warm=8, cold=16), list[TierWork]()
    submit = engine.worker.submit
    engine.worker.submit = lambda work: (told.append(work), submit(work))[1]
    engine.serve(prompt(4, 1))
    assert engine.reset()
    for number in range(8):
        engine.serve(prompt(4, number))
    demotes = [any(isinstance(job, Demote) for job in work.jobs) for work in told]
    disowns = [work.disown for work in told]
    assert disowns.count(True) == 1
    assert disowns.index(True) <= demotes.index(True)


@pytest.mark.parametrize("warm", [16, 64])
def test_after_a_reset_nothing_old_is_found(warm: int) -> None:
    engine = Engine(warm=warm, cold=32)
    first = parked(engine)
    cold = engine.directory.cold_hashes()
    assert bool(cold) is (warm == 16)
    assert all(h in engine.directory for h in first.request.block_hashes)
    assert engine.reset()
    turn = engine.serve(prompt(4, 1))
    assert turn.computed == 4
    dropped = [e for e in engine.events if isinstance(e, CopiesDropped)]
    assert {e.tier for e in dropped} == {int(Tier.WARM)} | ({int(Tier.COLD)} if cold else set())
    assert not set(cold) & set(engine.worker.disk)
    engine.check_whole()


def test_a_reset_during_a_spill_and_a_demotion_leaves_no_copy() -> None:
    engine = Engine(warm=8, cold=16)
    for number in range(7):
        finished(engine, number)
        engine.step()
    assert engine.worker.open
    assert engine.reset()
    engine.settle()
    assert engine.directory.warm_blocks == engine.directory.cold_blocks == 0
    assert engine.serve(prompt(4, 1)).computed == 4
    assert set(engine.directory.cold_hashes()) == set(engine.worker.disk) == set()
    engine.check_whole()


def test_a_prefetch_under_way_does_not_stop_a_reset() -> None:
    """Stock vLLM resets an idle engine's cache; with a forced reset it even raises if it cannot."""
    engine = Engine()
    first = parked(engine)
    engine.advise(keys(first))
    engine.step()
    assert engine.bridge.promises.lend()
    engine.advise()
    assert engine.reset()
    during = engine.ask(prompt(3, 90))
    engine.step()
    held = {block.block_id for block in engine.bridge.promises.lend()}
    assert not held & {block.block_id for block in during.blocks}, "a worker still writes to them"
    engine.end(during)
    engine.settle()
    assert engine.counts.prefetched == 0
    assert engine.serve(prompt(4, 1)).computed == 4
    engine.check_whole()


@pytest.mark.parametrize("cold", [0, 12])
def test_random_traffic_matches_nothing_wrong_and_leaves_the_pool_whole(cold: int) -> None:
    """Turns, aborts, preemptions, failures, resets, advice and late answers, in any order."""
    rng = seeded()
    engine = Engine(blocks=24, warm=12, cold=cold)
    costs, totals = engine.bridge.ledger.costs, Counter[str]()
    costs.worth_loading = lambda *_: rng.random() < 0.9
    seen: list[int] = []
    actions: list[tuple[float, Callable[[], None]]] = [
        (0.50, lambda: _arrive(rng, engine, seen)),
        (0.75, lambda: _leave(rng, engine)),
        (0.80, lambda: _advise(rng, engine, seen)),
        (0.82, lambda: totals.update(resets=_reset(rng, engine))),
        (1.00, lambda: None),
    ]

    def all_happened() -> bool:
        return min(engine.counts.loaded, engine.counts.prefetched, totals["resets"]) > 0

    steps = 0
    while steps < 1500 or not all_happened():
        steps += 1
        assert steps < 30_000, "nothing is loaded, prefetched or reset any more"
        roll = rng.random()
        next(act for bound, act in actions if roll < bound)()
        engine.step()
        for job in [job for job in engine.worker.open if rng.random() < 0.5]:
            wrong = [at for at in range(len(job.copies)) if rng.random() < 0.03]
            engine.worker.finish(job, wrong)
        if rng.random() < 0.5:  # heard before the next step is scheduled, or only after it
            engine.update()
    for turn in list(engine.turns):
        engine.end(turn)
    engine.advise()
    engine.worker.finish_all()
    engine.settle()
    engine.check_whole()
    assert bool(engine.counts.demoted) is bool(cold)


def _arrive(rng: random.Random, engine: Engine, seen: list[int]) -> None:
    if len(engine.turns) < 5:
        parts = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        tokens = [part for part in parts for _ in range(BLOCK_SIZE)] + [9] * rng.randrange(2)
        seen += keys(engine.ask(tokens))
        del seen[:-200]


def _leave(rng: random.Random, engine: Engine) -> None:
    if engine.turns:
        turn = rng.choice(engine.turns)
        if turn.state == "running" and rng.random() < 0.1:
            engine.preempt(turn)
        elif turn.state == "running" or (turn.state != "over" and rng.random() < 0.2):
            engine.end(turn)


def _reset(rng: random.Random, engine: Engine) -> bool:
    for turn in [turn for turn in engine.turns if turn.state != "over"]:
        engine.end(turn)
    if rng.random() < 0.5:
        engine.worker.finish_all(Load)
        engine.step()
    return engine.reset()


def _advise(rng: random.Random, engine: Engine, seen: list[int]) -> None:
    def some() -> list[int]:
        return rng.sample(seen, rng.randrange(len(seen) + 1))

    engine.advise(some()[:30], order=some(), spill_first=some() + some(), demote_first=some())
