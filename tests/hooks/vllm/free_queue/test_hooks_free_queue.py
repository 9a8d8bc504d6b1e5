"""The head of the free queue: what a hit, protection and copies make of it, and who looks when."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.types import Keys
from kvgraph.hooks.keys import key_in_pool
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.free_queue.protection import ProtectedKeys
from kvgraph.hooks.vllm.free_queue.window import Victims
from kvgraph.hooks.vllm.index import FoundBlocks
from kvgraph.hooks.vllm.tap import PoolTap
from kvgraph_bench.hotpath import a_ranking, cached_pool
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from paper import text
from pool_engine import Engine, counted_walks, prompt
from pool_requests import needless, ranking
from seeded import seeded

pytestmark = pytest.mark.usefixtures("vllm_loaded")
BLOCKS = 4001
MOST = 1500  # blocks that a step could take


class World:
    """A real pool of cached blocks, followed and arranged; a step took ``usual`` blocks."""

    def __init__(self, usual: int) -> None:
        self.pool, _, self.index = cached_pool(BLOCKS)
        self.arranger = FreeQueueArranger(self.pool, self.index, blocks_per_step=MOST)
        self.tap = PoolTap(self.pool, 0)
        self.tap.freed, self.tap.touched = self.arranger.freed, self.arranger.touched
        self.tap.attach()
        for _ in range(400):
            self.end_step(usual)

    def queue(self) -> list[int]:
        return [key_in_pool(b.block_hash) for b in self.pool.free_block_queue.get_all_free_blocks()]

    def end_step(self, evicted: int) -> None:
        self.arranger.step_ended(evicted)
        self.arranger.expect(64, 0)

    def hit(self, keys: list[int]) -> None:
        self.pool.touch([self.index.find(key) for key in keys])

    def take(self, count: int) -> list[int]:
        """A step takes so many blocks; their keys."""
        blocks = self.pool.free_block_queue.get_all_free_blocks()[:count]
        hashes = [block.block_hash for block in blocks]
        keys = [key_in_pool(each) for each in hashes]
        self.pool.get_new_blocks(count)
        self.arranger.evicted(self.index.forget(hashes, keys))
        self.end_step(count)
        return keys

    def lost(self, precious: list[int], steps: int, *advice: Any) -> set[int]:
        """Protected blocks that go, while others are free, in so many steps of 64 blocks."""
        lost: set[int] = set()
        for _ in range(steps):
            lost |= set(precious) & set(self.take(64))
            self.arranger.step(*advice)
        return lost


@pytest.mark.parametrize("same_step", [True, False])
def test_victims_that_a_hit_took_are_not_counted_on(same_step: bool) -> None:
    """Hit all victims but the first; then steps as large as those of late go on."""
    world = World(usual=80)
    queue = world.queue()
    precious, victims = queue[:1500], queue[1500:2012]
    advice = ranking(victims, precious)
    world.arranger.step(advice)
    world.hit(victims[1:] if same_step else victims[200:])
    assert not world.lost(precious, 20, advice)


@pytest.mark.parametrize("at", [0, 300])
def test_victims_that_the_next_ranking_protects_leave_the_head(at: int) -> None:
    """After a long prompt, more victims are carried over than the guard looks at."""
    world = World(usual=400)
    world.arranger.copies_first(Copies())
    victims = world.queue()[1000:3000]
    world.arranger.step(ranking(victims))
    precious = victims[at : at + 8]
    advice = ranking([key for key in victims[::-1] if key not in precious], precious)
    world.arranger.step(advice)
    assert not world.lost(precious, 12, advice)


@pytest.mark.parametrize("at", [1, 40, 64, 100])
def test_the_head_that_a_hit_thinned_is_looked_at_again(at: int) -> None:
    world = World(usual=64)
    queue = world.queue()
    reach = 128
    precious = queue[2 * reach : 2 * reach + 1500]
    advice = ranking(protected=precious)
    world.arranger.step(None, advice)
    world.hit(queue[at : 2 * reach])
    assert not world.lost(precious, 10, None, advice)


def test_a_hit_elsewhere_costs_no_look_at_the_head() -> None:
    world = World(usual=64)
    queue = world.queue()
    world.arranger.step(None, ranking(protected=queue[:40]))
    looks: list[object] = []
    look = world.pool.free_block_queue.iter_blocks_after
    world.pool.free_block_queue.iter_blocks_after = lambda at: looks.append(at) or look(at)
    for at in range(1000, 2000, 10):
        world.hit(queue[at : at + 10])
    assert not looks
    world.hit(queue[40:300])
    assert len(looks) == 1


class Unread:
    """Blocks of a hit that nobody may look at."""

    def __iter__(self) -> Any:
        raise AssertionError("nothing stands at the head: a hit costs nothing")


def test_a_hit_where_nothing_is_advised_costs_nothing() -> None:
    world = World(usual=64)
    queue = world.queue()
    world.arranger.touched(Unread())  # type: ignore[arg-type]
    world.arranger.step(None, ranking(protected=queue[:40]))
    with pytest.raises(AssertionError):
        world.arranger.touched(Unread())  # type: ignore[arg-type]
    world.arranger.step(None, ranking())
    world.arranger.touched(Unread())  # type: ignore[arg-type]


def cached_keys(engine: PaperEngine) -> list[int]:
    """Keys of the free queue's blocks, each once, the next to go first."""
    free = engine.pool.free_block_queue.get_all_free_blocks()
    return list(dict.fromkeys(key_in_pool(b.block_hash) for b in free if b.block_hash))


@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("next_to_go", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(blocks=201, warm=None),
        Shape(blocks=201, warm=400),
        Shape(blocks=401, warm=None, windows=(None, 64)),
        Shape(blocks=801, warm=None, windows=(None, 64, 64, 64)),
    ],
    ids=["one group", "tiers", "two groups", "four groups"],
)
def test_vllms_scheduler_takes_none_while_another_is_free(
    paper: Any, shape: Shape, next_to_go: bool, ranked: bool
) -> None:
    """A model of several groups of layers takes blocks for each of them in a step."""
    rng = random.Random(1)
    engine, precious, most = paper(shape), set[int](), shape.blocks // (4 * len(shape.windows))
    found, texts = needless(engine, precious), [text(rng.randint(1, 26), s) for s in range(200)]
    for number in range(60):
        if number % 5 == 0:
            cached = cached_keys(engine)
            some = min(len(cached), most)
            precious.clear()
            precious.update(cached[:some] if next_to_go else rng.sample(cached, some))
        others = sorted(set(cached) - precious)
        order = rng.sample(others, len(others)) if ranked else ()
        engine.side.client.hold_ranking(ranking(order, sorted(precious)))
        for _ in range(rng.randint(1, 4)):
            engine.ask(rng.choice(texts), rng.randint(1, 4))
        engine.settle()
    assert engine.side is not None
    assert sum(found) == 0


def test_victims_are_those_that_stand_and_are_looked_at_in_their_order() -> None:
    rng, (pool, _, _) = seeded(), cached_pool(1001)
    victims, stand, looked = Victims(len(pool.blocks)), list[Any](), list[Any]()
    rest = pool.free_block_queue.get_all_free_blocks()
    while rest or stand:
        match rng.randrange(5):
            case 0:
                count = rng.randrange(60)
                victims.add(FoundBlocks.told(rest[:count]))
                stand, rest = stand + rest[:count], rest[count:]
            case 1:
                for block in stand[: (count := rng.randrange(40))]:
                    block.reset_hash()
                victims.drop_taken()
                stand = stand[count:]
            case 2:
                gone = rng.sample(stand, min(len(stand), rng.randrange(9)))
                assert victims.forget([block.block_id for block in gone]) == len(gone)
                stand = [block for block in stand if block not in gone]
            case 3:
                most = rng.randrange(200)
                victims.keep_first(most)
                stand, rest = stand[:most], rest + stand[most:]
                looked = [block for block in looked if block in stand]
            case _:
                found = victims.look(rng.randrange(50))
                assert found.blocks == [b for b in stand if b not in looked][: len(found.blocks)]
                assert found.ids.tolist() == [block.block_id for block in found.blocks]
                looked += found.blocks
        looked = [block for block in looked if block in stand]
        assert victims.blocks == stand
        assert victims.looked == len(looked)


def busy_engine(prompts: int = 4) -> Engine:
    """One whose pool is full after four prompts, and finds nothing worth a copy."""
    engine = Engine(blocks=401, warm=4000)
    engine.advise(spill_first=[])
    for number in range(prompts):
        engine.serve(prompt(100, number))
    return engine


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


REACH = 64


class Queue:
    """A pool whose blocks are all free and cached; all but the last two are protected."""

    def __init__(self, blocks: int) -> None:
        self.now = 1000.0
        self.pool, self.keys, index = cached_pool(blocks, self.clock)
        self.arranger = FreeQueueArranger(self.pool, index, REACH, 60.0, self.clock)
        self.looked = counted_walks(self.pool)

    def clock(self) -> float:
        return self.now

    @property
    def order(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def step(self, protected: Keys) -> None:
        self.arranger.step(None, a_ranking(self.keys[:0], protected=protected))

    def hit(self, ids: list[int]) -> None:
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
    assert len(queue.looked) >= 2000
    queue.looked.clear()
    taken = []
    for _ in range(40):
        taken += queue.pool.get_new_blocks(32)
        queue.step(protected)
    assert len(queue.looked) <= 40 * 2 * REACH
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
    assert len(queue.looked) <= 10 * 2 * 10
    assert queue.arranger.moved == laid <= 10, "it stands in its order since the first step"


def test_what_callers_stated_may_lapse_while_it_waits_to_go() -> None:
    queue = Queue(401)
    stated, ranked = queue.keys[:25].tolist(), queue.keys[25:-2]
    queue.arranger.stated(stated, is_over=True)
    queue.step(ranked)
    taken = queue.pool.get_new_blocks(2 + 16)  # what is free, and stated first
    queue.now += 100.0
    queue.step(ranked)
    assert len(queue.order) == queue.pool.get_num_free_blocks() == 400 - len(taken)
    left = {block for block in range(1, 26) if queue.pool.blocks[block].ref_cnt == 0}
    assert len(left) == 9
    assert set(queue.order[:9]) == left, "nothing protects them, so they go first"


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


@pytest.mark.parametrize("blanks", [10, 2 * REACH, 200])
def test_what_is_freed_behind_many_blank_blocks_goes_before_protected_ones(blanks: int) -> None:
    queue = Queue(401)
    protected, others = queue.keys[:-2], queue.pool.blocks[399:]
    queue.pool.touch(others)
    queue.step(protected)
    taken = queue.pool.get_new_blocks(blanks)
    queue.step(protected)
    queue.pool.free_blocks([*taken, *others])
    queue.arranger.freed()
    for _ in range(blanks // 20):
        queue.step(protected)
        queue.pool.get_new_blocks(20)
    queue.step(protected)
    next_ones = queue.order[: blanks % 20 + 2]
    assert {399, 400} <= set(next_ones), "no other is cached and not protected"


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
    def freed(self) -> None: ...
    def touched(self, blocks: object) -> None: ...
    def gone(self, keys: object) -> None: ...
    def laid_more(self, victims: object, at_head: bool) -> None: ...
