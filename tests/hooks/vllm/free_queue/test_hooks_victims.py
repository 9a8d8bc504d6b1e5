"""What advice laid at the queue's head is followed, and each of it is looked at once."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvgraph.hooks.vllm.free_queue.window import Victims
from kvgraph.hooks.vllm.index import FoundBlocks
from kvgraph_bench.hotpath import cached_pool

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def test_victims_are_those_that_stand_and_are_looked_at_in_their_order() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201 - shown when the test fails
    rng, (pool, _, _) = random.Random(seed), cached_pool(1001)
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
