"""What engines should hold yet of what they got, where nobody says so."""

from __future__ import annotations

import random

import pytest
from kvgraph.advisor.fleet.pool_shadows import Link, PoolShadows
from kvgraph.advisor.replay.engine.instance import Instance
from kvgraph.advisor.replay.orders.orders import LruOrder

SIZE = 16
POOL = 40  # blocks


def links(chain: list[int]) -> list[Link]:
    return [Link(block, SIZE * at) for at, block in enumerate(chain, start=1)]


def chains(dice: random.Random) -> list[list[int]]:
    """Prompts of sessions that grow, share beginnings, and sometimes do not fit."""
    sessions = [[1, 2, *range(100 * n, 100 * n + dice.randrange(1, 9))] for n in range(1, 9)]
    asked = []
    for _ in range(400):
        chain = dice.choice(sessions)
        if dice.random() < 0.5:
            chain += range(chain[-1] + 1, chain[-1] + dice.randrange(1, 4))
        if len(chain) > 1.2 * POOL:
            del chain[3:]
        asked.append(list(chain))
    return asked


@pytest.mark.parametrize("seed", range(5))
def test_it_holds_what_an_engine_holds_that_evicts_the_longest_unused(seed: int) -> None:
    engine, shadow = Instance(POOL, LruOrder()), PoolShadows(most=10_000)
    for number, chain in enumerate(chains(random.Random(seed))):
        found = engine.match(chain, len(chain))
        assert shadow.held(links(chain), 1).tolist() == [SIZE * found]
        if len(chain) <= POOL:
            engine.admit(number, chain, len(chain), 0, float(number))
            engine.finish(number, chain, float(number))
        shadow.sent(links(chain), 0, SIZE * POOL)


def test_engines_forget_each_for_itself() -> None:
    shadow, one, two = PoolShadows(most=100), links([1, 2, 3]), links([4, 5])
    shadow.sent(one, 0, 3 * SIZE)
    shadow.sent(one, 1, 0)
    shadow.sent(two, 0, 3 * SIZE)
    shadow.sent(two, 1, 0)
    assert shadow.held(one, 2).tolist() == [SIZE, 3 * SIZE], "of a pool of no size nothing leaves"
    shadow.forget(1)
    assert shadow.held(two, 2).tolist() == [2 * SIZE, 0]
    shadow.forget(7)
    shadow.sent([], 0, 0)  # a prompt that is too short for a link
    shadow.sent(links([8, 9, 10, 11]), 0, 3 * SIZE)
    assert shadow.held(two, 2).tolist() == [2 * SIZE, 0], "what does not fit was never there"


def test_what_is_remembered_is_bounded_and_the_newest_stays() -> None:
    shadow = PoolShadows(most=10)
    for number in range(50):
        shadow.sent(links([number]), number % 2, 0)
    held = [shadow.held(links([number]), 2).any() for number in range(50)]
    assert held == [False] * 40 + [True] * 10
