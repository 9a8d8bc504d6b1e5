"""What engines should hold yet of what they got, where nobody says so."""

from __future__ import annotations

import random

import pytest
from kvgraph.advisor.fleet.pools import PoolShadows, PromptPrefix
from kvgraph.advisor.replay.simulator import Instance, LruOrder

SIZE = 16
POOL = 40  # blocks


def links(chain: list[int]) -> list[PromptPrefix]:
    return [PromptPrefix(block, SIZE * at) for at, block in enumerate(chain, start=1)]


def held(shadow: PoolShadows, chain: list[int], engines: int = 1) -> list[int]:
    return [int(tokens) for tokens in shadow.holdings(links(chain), engines).pool]


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
        assert held(shadow, chain) == [SIZE * found]
        if len(chain) <= POOL:
            engine.admit(number, chain, len(chain), 0, float(number))
            engine.finish(number, chain, float(number))
        shadow.sent(links(chain), 0, SIZE * POOL)


def test_engines_lose_each_for_itself_and_only_what_was_there_is_lost() -> None:
    shadow, one, two = PoolShadows(), [1, 2, 3], [4, 5]
    for chain in (one, two):
        shadow.sent(links(chain), 0, 3 * SIZE)
        shadow.sent(links(chain), 1, 0)
    assert held(shadow, one, 3) == [SIZE, 3 * SIZE, 0], "of a pool of no size nothing leaves"
    assert shadow.holdings(links(one), 3).lost.tolist() == [True, False, False]
    assert shadow.holdings(links([6, 7]), 3).lost.tolist() == [False, False, False]
    assert shadow.holdings([], 3).lost.tolist() == [False, False, False], "too short for a link"
    shadow.sent(links([8, 9, 10, 11]), 0, 3 * SIZE)
    assert held(shadow, two, 2) == [2 * SIZE, 2 * SIZE], "what does not fit was never there"
    shadow.sent([], 0, 3 * SIZE)
    shadow.sent(links(one), 0, 9 * SIZE)
    assert not shadow.holdings(links(one), 3).lost.any(), "it is there again"


def test_an_engine_that_started_anew_has_nothing_and_lost_nothing() -> None:
    shadow = PoolShadows()
    for chain in ([1, 2, 3], [4, 5]):
        shadow.sent(links(chain), 0, 3 * SIZE)
        shadow.sent(links(chain), 1, 3 * SIZE)
    shadow.forget(0)
    shadow.forget(7)
    assert held(shadow, [4, 5], 2) == [0, 2 * SIZE]
    assert shadow.holdings(links([1, 2, 3]), 2).lost.tolist() == [False, True]


def test_what_is_remembered_is_bounded_and_what_is_forgotten_is_not_lost() -> None:
    shadow = PoolShadows(most=10)
    for number in range(50):
        shadow.sent(links([number]), number % 2, 0)
    assert [any(held(shadow, [n], 2)) for n in range(50)] == [False] * 40 + [True] * 10
    assert not shadow.holdings(links([3]), 2).lost.any()
    for number in range(50):
        shadow.sent(links([number]), 0, 2 * SIZE)
    lost = [shadow.holdings(links([n]), 1).lost.any() for n in range(50)]
    assert lost == [False] * 38 + [True] * 10 + [False] * 2
