"""A prefix hit takes blocks from the queue's midst: what stands at the head is counted anew."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.keys import key_in_pool
from kvgraph.hooks.vllm.free_queue.arranger import FreeQueueArranger
from kvgraph.hooks.vllm.tap import PoolTap
from kvgraph_bench.hotpath import cached_pool
from kvgraph_bench.paper.paper_engine import PaperEngine, Shape
from paper import text

pytestmark = pytest.mark.usefixtures("vllm_loaded")
BLOCKS = 4001
MOST = 1500  # blocks that a step could take


def ranking(order: Any = (), protected: Any = ()) -> EvictionRanking:
    as_keys = [np.array(list(keys), dtype=np.uint64) for keys in (order, protected, (), ())]
    return EvictionRanking(1, math.inf, *as_keys)


class World:
    """A real pool of cached blocks, followed and arranged as in an engine.

    Args:
        usual: Blocks that a step of late took.
    """

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


@pytest.mark.parametrize("same_step", [True, False])
def test_victims_that_a_hit_took_are_not_counted_on(same_step: bool) -> None:
    """Hit all victims but the first; then steps as large as those of late go on."""
    world = World(usual=80)
    queue = world.queue()
    precious, victims = queue[:1500], queue[1500:2012]
    advice = ranking(victims, precious)
    world.arranger.step(advice)
    world.hit(victims[1:] if same_step else victims[200:])
    lost: set[int] = set()
    for _ in range(20):
        lost |= set(precious) & set(world.take(64))
        world.arranger.step(advice)
    assert not lost, f"{len(lost)} protected blocks went while others were free"


@pytest.mark.parametrize("at", [1, 40, 64, 100])
def test_the_head_that_a_hit_thinned_is_looked_at_again(at: int) -> None:
    world = World(usual=64)
    queue = world.queue()
    reach = 128
    precious = queue[2 * reach : 2 * reach + 1500]
    advice = ranking(protected=precious)
    world.arranger.step(None, advice)
    world.hit(queue[at : 2 * reach])
    lost: set[int] = set()
    for _ in range(10):
        lost |= set(precious) & set(world.take(64))
        world.arranger.step(None, advice)
    assert not lost, f"{len(lost)} protected blocks went while others were free"


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


def needless(engine: PaperEngine, precious: set[int]) -> list[int]:
    """Counts, at vLLM's own allocations, protected blocks that go while others are free."""
    found: list[int] = []
    take = engine.pool.get_new_blocks

    def get_new_blocks(count: int) -> Any:
        free = engine.pool.free_block_queue.get_all_free_blocks()
        marks = [b.block_hash is not None and key_in_pool(b.block_hash) in precious for b in free]
        found.append(min(sum(marks[:count]), marks[count:].count(False)))
        return take(count)

    engine.pool.get_new_blocks = get_new_blocks
    return found


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
