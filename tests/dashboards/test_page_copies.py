"""What a session held over time, its copies in colder tiers among it."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from kvgraph.advisor.page.page import Page
from kvgraph.advisor.page.sessions import session_of
from kvgraph.graph.tables.sessions import LIMIT, CopyLog
from kvgraph.graph.types import Tier
from kvgraph.graph.wire.events import BlocksResident, BlocksSpilled, CopiesDropped
from small_world import World, pack, page_of

WARM, COLD = int(Tier.WARM), int(Tier.COLD)


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def page(world: World) -> Page:
    return page_of(world)


def held(page: Page) -> list[tuple[int, int, int]]:
    """Blocks in the pool, with warm and with cold copies, as one followed the other."""
    view = session_of(page, "s", None).residency
    assert view.starts == sorted(view.starts)
    assert len(view.starts) == len(view.pool) == len(view.warm) == len(view.cold)
    steps = zip(view.pool, view.warm, view.cold, strict=True)
    return [step for step, _ in groupby(steps)]


def test_copies_come_and_go(world: World, page: Page) -> None:
    world.serve(1, 2, 3)
    world.tell(BlocksSpilled(pack(2, 3), WARM, 100))
    world.tell(BlocksSpilled(pack(2), WARM, 100))  # told twice
    world.evict(3)
    world.tell(BlocksSpilled(pack(3), COLD, 100))
    world.tell(CopiesDropped(pack(3), WARM, 1))
    world.serve(1, 2, 3, found=2)
    assert held(page) == [(3, 0, 0), (3, 2, 0), (2, 2, 0), (2, 2, 1), (2, 1, 1), (3, 1, 1)]


def test_a_copy_is_there_until_the_last_engine_dropped_it(world: World, page: Page) -> None:
    world.serve(1)
    for engine in ("a", "b"):
        world.tell(BlocksSpilled(pack(1), WARM, 100), engine=engine)
    world.tell(CopiesDropped(pack(1), WARM, 1), engine="b")
    world.tell(CopiesDropped(pack(1), WARM, 1), engine="b")  # which it does not have
    assert held(page) == [(1, 0, 0), (1, 1, 0)]
    world.tell(CopiesDropped(pack(1), WARM, 1))
    assert held(page) == [(1, 0, 0), (1, 1, 0), (1, 0, 0)]


def test_copies_of_an_engine_that_is_gone_are_gone(world: World, page: Page) -> None:
    world.serve(1, 2)
    world.tell(BlocksSpilled(pack(1, 2), COLD, 100))
    world.now += 10
    world.graph.forget_engine("a")
    assert held(page)[-1] == (0, 0, 0)
    assert (2, 0, 2) in held(page)


def test_an_engine_that_lists_its_pool_announces_its_copies_again(world: World, page: Page) -> None:
    world.serve(1, 2)
    world.tell(BlocksSpilled(pack(1, 2), WARM, 100))
    world.tell(BlocksResident(pack(1, 2)))
    world.tell(BlocksSpilled(pack(1), WARM, 100))
    assert held(page) == [(2, 0, 0), (2, 2, 0), (2, 0, 0), (2, 1, 0)]


def test_other_sessions_copies_are_not_its(world: World, page: Page) -> None:
    world.serve(1, 2)
    world.serve(8, 9, session="t")
    world.tell(BlocksSpilled(pack(8, 9), WARM, 100))
    assert held(page) == [(2, 0, 0)]


def test_the_log_is_bounded_and_keeps_the_last() -> None:
    log = CopyLog()
    assert len(log.changes()) == 0
    for start in range(0, 3 * LIMIT, 1000):
        log.add(np.arange(start, start + 1000, dtype=np.uint64), Tier.WARM, 1, float(start))
    keys = log.changes()["key"]
    assert len(keys) == LIMIT
    assert np.array_equal(np.diff(keys.astype(np.int64)), np.ones(LIMIT - 1))
    assert log.nbytes == LIMIT * 18
    log.add(np.arange(2 * LIMIT, dtype=np.uint64), Tier.COLD, -1, 1e9)
    assert log.changes()["key"][-1] == 2 * LIMIT - 1
    assert set(log.changes()["sign"].tolist()) == {-1}
