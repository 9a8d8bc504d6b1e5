"""How far ahead of their eviction blocks are copied."""

from __future__ import annotations

import pytest
from kvgraph.hooks.tiers.directory import CopyDirectory
from kvgraph.hooks.vllm.ahead.copy_lead import CopyLead

POOL = 1000
STEP = 10


def full(memory: int) -> CopyDirectory:
    directory = CopyDirectory(memory)
    for number in range(memory):
        directory.begin(number.to_bytes(32, "big"))
    return directory


def lead(load: int = 0, late: int = 0, steps: int = 100) -> CopyLead:
    """One that saw such steps, spills that ended so many steps later, and then a load."""
    found = CopyLead(0.0)
    for number in range(steps):
        found.stepped(STEP, 0, 0.01 * number)
        found.ended(found.steps - late)
    found.stepped(STEP, load, 0.01 * steps)
    return found


def test_a_small_memory_keeps_what_the_pool_lost_whatever_a_load_took() -> None:
    for load in (0, 400):
        assert lead(load).blocks(0, full(100), POOL) == 8 + STEP
    assert lead(400).blocks(64, full(100), POOL) == 8 + STEP, "nor for a prefetch"


def test_a_large_memory_covers_loads_and_prefetches() -> None:
    assert lead().blocks(0, full(4000), POOL) == 8 + 3 * STEP
    assert lead().blocks(64, full(4000), POOL) == 8 + 3 * STEP + 64
    assert lead(400).blocks(0, full(4000), POOL) == 8 + 3 * 400
    assert lead(400).blocks(0, full(2000), POOL) == 8 + int(0.375 * 2000), "a part of it"


def test_free_memory_is_used_whatever_its_size() -> None:
    assert lead(400).blocks(0, CopyDirectory(100), POOL) == 100


@pytest.mark.parametrize(("late", "steps"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_copies_that_take_longer_are_begun_earlier(late: int, steps: int) -> None:
    assert lead(late=late).blocks(0, full(100), POOL) == pytest.approx(8 + steps * STEP, abs=1)


def test_a_load_of_long_ago_is_forgotten() -> None:
    found = lead(400)
    found.stepped(STEP, 0, 100.0)
    assert found.blocks(0, full(4000), POOL) == 8 + 3 * STEP


def test_without_memory_nothing_is_copied() -> None:
    assert lead().blocks(64, CopyDirectory(0), POOL) == 0
