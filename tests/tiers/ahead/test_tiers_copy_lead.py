"""How far ahead of their eviction blocks are copied."""

from __future__ import annotations

import pytest
from kvgraph.hooks.tiers.directory import CopyDirectory
from kvgraph.hooks.vllm.tiers.spiller import CopyLead

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


def test_a_large_memory_covers_larger_steps_and_prefetches_but_no_loads() -> None:
    for load in (0, 400):  # what a load takes is copied before it writes there
        assert lead(load).blocks(0, full(4000), POOL) == 8 + 3 * STEP
        assert lead(load).blocks(64, full(4000), POOL) == 8 + 3 * STEP + 64
    assert lead().blocks(4000, full(2000), POOL) == 8 + int(0.375 * 2000), "a part of it"


def test_free_memory_is_used_whatever_its_size() -> None:
    assert lead().blocks(400, CopyDirectory(100), POOL) == 100


@pytest.mark.parametrize(("late", "steps"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_copies_that_take_longer_are_begun_earlier(late: int, steps: int) -> None:
    assert lead(late=late).blocks(0, full(100), POOL) == pytest.approx(8 + steps * STEP, abs=1)


def test_the_largest_step_is_forgotten_by_work_and_not_by_rest() -> None:
    found = lead()
    found.stepped(0, 0, 1000.0)
    assert found.step > 0.9 * STEP, "an engine that rests begins where it left off"
    for number in range(1000):
        found.stepped(1, 0, 1000.0 + 0.02 * number)
    assert found.step < 2


def test_without_memory_nothing_is_copied() -> None:
    assert lead().blocks(64, CopyDirectory(0), POOL) == 0
